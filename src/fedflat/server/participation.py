"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..core.randomness import generator
from ..errors import FedflatError


class Participation(Protocol):
    """Chooses the active clients of a round."""

    def check(self, clients: int, rounds: int) -> None:
        """Complain before the first round about what cannot work."""

    def choose(self, round: int, clients: int, seed: int) -> list[int]:
        """The active clients in ascending order."""


@dataclass(frozen=True)
class Everyone:
    """All clients, every round."""

    def check(self, clients: int, rounds: int) -> None:
        """Nothing can go wrong."""

    def choose(self, round: int, clients: int, seed: int) -> list[int]:
        """All."""
        return list(range(clients))


@dataclass(frozen=True)
class Uniform:
    """A fixed number of clients, drawn uniformly without replacement."""

    count: int

    def check(self, clients: int, rounds: int) -> None:
        """There must be as many clients."""
        if not 1 <= self.count <= clients or self.count != int(self.count):
            raise FedflatError(
                f"Uniform({self.count}) cannot draw {self.count} of {clients} clients a round; "
                f"choose a number from 1 to {clients}."
            )

    def choose(self, round: int, clients: int, seed: int) -> list[int]:
        """`count` of them."""
        rng = generator(seed, "participation", round)
        return sorted(rng.choice(clients, self.count, replace=False, shuffle=False).tolist())


@dataclass(frozen=True)
class Bernoulli:
    """Every client independently with the same probability; a round may be empty."""

    probability: float

    def check(self, clients: int, rounds: int) -> None:
        """It must be a probability."""
        if not 0 < self.probability <= 1:
            raise FedflatError(f"Bernoulli({self.probability}): give a probability in (0, 1].")

    def choose(self, round: int, clients: int, seed: int) -> list[int]:
        """Whoever the coin chooses."""
        rng = generator(seed, "participation", round)
        return (rng.random(clients) < self.probability).nonzero()[0].tolist()


@dataclass(frozen=True)
class Schedule:
    """A given list of clients for every round."""

    rounds: Sequence[Sequence[int]]

    def check(self, clients: int, rounds: int) -> None:
        """It must be long enough and name existing clients, each once a round."""
        if len(self.rounds) < rounds:
            raise FedflatError(
                f"The schedule has {len(self.rounds)} rounds, {rounds} are asked for; extend it."
            )
        for index, active in enumerate(self.rounds):
            bad = [c for c in active if not 0 <= c < clients]
            if bad or len(set(active)) != len(active):
                raise FedflatError(
                    f"The schedule's round {index} is {list(active)}; name clients from 0 to "
                    f"{clients - 1}, each at most once."
                )

    def choose(self, round: int, clients: int, seed: int) -> list[int]:
        """As given, in ascending order."""
        return sorted(self.rounds[round])


def as_participation(given: Participation | int | None) -> Participation:
    """Who takes part: a number n is `Uniform(n)`, None is `Everyone()`."""
    if isinstance(given, bool | float):
        raise FedflatError(f"participation={given}: give a number of clients, or Bernoulli(0.1).")
    if given is None:
        return Everyone()
    if isinstance(given, int):
        return Uniform(given)
    if not hasattr(given, "choose"):
        raise FedflatError(
            f"participation must be a number of clients, Bernoulli(0.1) or the like, not {given!r}."
        )
    return given
