"""Ways to deal one training set out to clients. Each is deterministic in its seed and returns index lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import FedflatError, nearest
from ..randomness import generator


class Partition(Protocol):
    """Deals samples out to clients."""

    def split(self, labels: np.ndarray, clients: int, seed: int) -> list[np.ndarray]:
        """The rows of every client."""


@dataclass(frozen=True)
class IID:
    """A shuffled deck, dealt out evenly."""

    def split(self, labels: np.ndarray, clients: int, seed: int) -> list[np.ndarray]:
        """Sizes differ by at most one."""
        _enough(len(labels), clients)
        order = generator(seed, "partition iid").permutation(len(labels))
        return [np.sort(part) for part in np.array_split(order, clients)]


@dataclass(frozen=True)
class Dirichlet:
    """Every client draws its class proportions `q_i ~ Dir(α 1_C)`; equal sizes, no sample twice.

    The clients take turns at random; each draws a class from `q_i` restricted to the classes that still have
    samples, and takes one. Samples that are left over after equal division are unused.
    """

    alpha: float

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise FedflatError(f"Dirichlet({self.alpha}): alpha must be above 0.")

    def split(self, labels: np.ndarray, clients: int, seed: int) -> list[np.ndarray]:
        """`N // clients` samples each."""
        rng = generator(seed, "partition dirichlet")
        classes = int(labels.max()) + 1
        priors = rng.dirichlet(np.full(classes, self.alpha), size=clients)
        return _deal(priors, labels, clients, rng)


@dataclass(frozen=True)
class Pathological:
    """Every client sees only a few classes (McMahan et al. 2017): equal sizes, no sample twice.

    The classes of all clients are dealt from a deck in which every class is equally frequent, and each class is
    cut into as many shards as it was dealt.
    """

    classes: int

    def __post_init__(self) -> None:
        if self.classes < 1 or self.classes != int(self.classes):
            raise FedflatError(f"Pathological({self.classes}): give a whole number of classes.")

    def split(self, labels: np.ndarray, clients: int, seed: int) -> list[np.ndarray]:
        """At most `classes` different labels each."""
        _enough(len(labels), clients * self.classes)
        rng = generator(seed, "partition pathological")
        present = np.unique(labels)
        deck = np.resize(rng.permutation(present), clients * self.classes)
        rng.shuffle(deck)
        shards = {
            label: np.array_split(rng.permutation(np.flatnonzero(labels == label)), count)
            for label, count in zip(*np.unique(deck, return_counts=True), strict=True)
        }
        hands = deck.reshape(clients, self.classes)
        return [np.sort(np.concatenate([shards[label].pop() for label in hand])) for hand in hands]


def _deal(priors: np.ndarray, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal equal numbers of samples by the clients' class priors, without repetition."""
    _enough(len(labels), clients)
    pools = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in range(priors.shape[1])]
    left = np.array([len(pool) for pool in pools])
    size = len(labels) // clients
    hands: list[list[int]] = [[] for _ in range(clients)]
    turns = rng.permutation(np.repeat(np.arange(clients), size))
    draws = rng.random(len(turns))
    for client, draw in zip(turns, draws, strict=True):
        weights = np.where(left > 0, priors[client], 0.0)
        total = weights.sum()
        if total <= 0:  # all its classes are used up: take what is left, as it comes
            weights, total = left.astype(float), float(left.sum())
        chosen = int(np.searchsorted(np.cumsum(weights), draw * total, side="right"))
        hands[client].append(pools[chosen].pop())
        left[chosen] -= 1
    return [np.sort(np.array(hand)) for hand in hands]


def _enough(samples: int, needed: int) -> None:
    if samples < needed:
        raise FedflatError(f"{samples} samples cannot be dealt into {needed} parts; use fewer clients.")


def parse_partition(text: str) -> Partition:
    """A partition from `iid`, `dirichlet:0.1` or `pathological:2`."""
    name, _, parameter = text.partition(":")
    makers = {"iid": None, "dirichlet": float, "pathological": int}
    if name not in makers:
        raise FedflatError(f"There is no partition '{name}'.{nearest(name, makers)}")
    if name == "iid":
        return IID()
    try:
        value = makers[name](parameter)  # type: ignore[misc]
    except ValueError:
        raise FedflatError(
            f"'{text}': write {name}:NUMBER, for example "
            f"{'dirichlet:0.1' if name == 'dirichlet' else 'pathological:2'}."
        ) from None
    return Dirichlet(value) if name == "dirichlet" else Pathological(int(value))
