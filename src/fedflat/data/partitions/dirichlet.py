"""Label skew by Dirichlet proportions, in the forms that papers use under one name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from ...core.randomness import generator
from ...errors import FedflatError
from .base import check_form, check_number, count_clients, rows_by_class, shown
from .dealing import NOTHING, deal, deal_refilling, deal_single_classes, proportions, random_turns

Form = Literal["equal", "refill", "chunked", "hsu"]

CHUNK = 10
"""Clients that share a chunk in the chunked form."""

DRAWS = 500_000
"""Draws of a class after which the chunked form gives up on a chunk: 50,000 chunks of ten classes."""

BATCH = 64
"""Chunks that are drawn at once."""


@dataclass(frozen=True)
class Dirichlet:
    """Label skew: class proportions from a Dirichlet distribution, the more uneven the smaller α is.

    `Dirichlet(0)` is the limit: client i owns class `i mod C` alone, in every form. The forms:

    - `equal` (default): proportions `q_i ~ Dir(α 1_C)` for every client, equal sizes `N // M`, no sample twice. The
      clients take turns at random; each draws a class from `q_i`, restricted to the classes that have samples left,
      and takes one (or any sample, when all of its classes are used up).
    - `refill`: the same, but a class that is used up is filled again, so proportions are exactly Dirichlet, some
      samples occur several times and others never. This is what the code of FedSpeed and FedSMOO (FL-Simulator),
      FedLESAM and FedWMSAM does.
    - `chunked`: the shuffled samples are cut into a chunk for every ten clients; within one, each class is cut by
      `p ~ Dir(α 1_10)` over the clients that have less than an even share yet, and the chunk is drawn anew until
      each has half an even share (Lin et al. 2020, FedDF). Then all is joined, client by client and class by class,
      and cut again into M parts that are equal up to one sample, as Shang et al. 2022 (CReFF) and FedGMT do. All
      samples are used.
    - `hsu`: as `equal` with the *total* concentration α, `q_i ~ Dir(α/C 1_C)`, and client after client (Hsu et al.
      2019; FedSAM of Caldarola et al. 2022). FedGF's paper states α per class: its 0.005 on CIFAR-10 is 0.05 here.
    """

    alpha: float
    form: Form = "equal"

    def __post_init__(self) -> None:
        check_number("dirichlet", "alpha", self.alpha, 0)
        check_form("dirichlet", self.form, get_args(Form))

    def __str__(self) -> str:
        return f"dirichlet:{shown(self.alpha)}" + ("" if self.form == "equal" else f":{self.form}")

    def split(
        self, labels: np.ndarray, clients: int | None, seed: int, groups: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """`N // M` samples each; the chunked form uses all, at α = 0 a class's clients share it evenly."""
        classes = rows_by_class(labels)
        clients = count_clients(self, clients, len(labels))
        size = len(labels) // clients
        rng = generator(seed, "partition dirichlet")
        if self.alpha == 0:
            return deal_single_classes(self, classes, clients, rng)
        if self.form == "chunked":
            return self._chunked(labels, classes, clients, rng)
        concentration = self.alpha / len(classes) if self.form == "hsu" else self.alpha
        priors = proportions(concentration, len(classes), clients, rng)
        if self.form == "refill":
            return deal_refilling(priors, classes, size, rng)
        shuffled = [rng.permutation(rows) for rows in classes]
        if self.form == "hsu":
            return deal(priors, shuffled, np.repeat(np.arange(clients), size), rng)
        return deal(priors, shuffled, random_turns(clients, size, rng), rng)

    def _chunked(
        self, labels: np.ndarray, classes: list[np.ndarray], clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        number = np.empty(len(labels), np.int64)  # of the class, among those that occur
        for index, rows in enumerate(classes):
            number[rows] = index
        order = rng.permutation(len(labels))
        joined = []
        for first in range(0, clients, CHUNK):
            after = min(first + CHUNK, clients)
            chunk = order[len(labels) * first // clients : len(labels) * after // clients]
            chunk = chunk[np.argsort(number[chunk], kind="stable")]
            available = np.bincount(number[chunk], minlength=len(classes))
            counts = self._draw_chunk(available, first, after - first, rng)
            owners = np.concatenate([np.repeat(np.arange(after - first), row) for row in counts])
            joined.append(chunk[np.argsort(owners, kind="stable")])
        return [np.sort(part) for part in np.array_split(np.concatenate(joined), clients)]

    def _draw_chunk(
        self, available: np.ndarray, first: int, clients: int, rng: np.random.Generator
    ) -> np.ndarray:
        """How many samples of each class (rows) each client (columns) gets."""
        share = available.sum() / clients
        tries = max(DRAWS // len(available), 1)
        counts = np.empty((BATCH, len(available), clients), np.int64)
        for _ in range(0, tries, BATCH):
            sizes = np.zeros((BATCH, clients), np.int64)
            for number, samples in enumerate(available.tolist()):
                open_ = sizes < share
                weights = proportions(self.alpha, clients, BATCH, rng) * open_
                lost = weights.sum(axis=1) < NOTHING  # for tiny alpha: then it is one open client, any
                weights[lost, (rng.random(weights.shape) * open_).argmax(axis=1)[lost]] = 1
                ends = np.cumsum(weights, axis=1)
                cuts = (ends[:, :-1] / ends[:, -1:] * samples).astype(np.int64)
                counts[:, number] = np.diff(cuts, prepend=0, append=samples)
                sizes += counts[:, number]
            filled = sizes.min(axis=1) >= share / 2
            if filled.any():
                accepted: np.ndarray = counts[filled.argmax()]
                return accepted
        worst = first + int(sizes[sizes.min(axis=1).argmax()].argmin())
        raise FedflatError(
            f"{self}: {tries:,} draws did not fill client {worst} with half of an even share of "
            f"{share:g} samples; use a larger alpha, fewer clients or the equal form."
        )
