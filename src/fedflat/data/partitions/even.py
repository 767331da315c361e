"""Partitions that do not look at the labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.randomness import generator
from .base import check_number, count_clients, shown
from .dealing import proportions


@dataclass(frozen=True)
class IID:
    """Shuffled samples, partitioned evenly (McMahan et al. 2017). All samples are used, none twice."""

    def __str__(self) -> str:
        return "iid"

    def split(
        self, labels: np.ndarray, clients: int | None, seed: int, groups: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Sizes differ by at most one."""
        clients = count_clients(self, clients, len(labels))
        order = generator(seed, "partition iid").permutation(len(labels))
        return [np.sort(part) for part in np.array_split(order, clients)]


@dataclass(frozen=True)
class Quantity:
    """Quantity skew (Li et al. 2022, NIID-Bench): shares of the shuffled deck are `Dir(α 1_M)`.

    Every client gets one sample and its share of the others, so none is empty however small α is. All samples are
    used, none twice; labels are as mixed as in `IID`.
    """

    alpha: float

    def __post_init__(self) -> None:
        check_number("quantity", "alpha", self.alpha, 0, above=True)

    def __str__(self) -> str:
        return f"quantity:{shown(self.alpha)}"

    def split(
        self, labels: np.ndarray, clients: int | None, seed: int, groups: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Sizes of at least one, and `N` together."""
        clients = count_clients(self, clients, len(labels))
        rng = generator(seed, "partition quantity")
        order = rng.permutation(len(labels))
        shares = np.cumsum(proportions(self.alpha, clients, 1, rng)[0])[:-1]
        cuts = np.arange(1, clients) + np.rint(shares * (len(labels) - clients)).astype(np.int64)
        return [np.sort(part) for part in np.split(order, cuts)]
