"""Class imbalance ahead of another partition."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ...core.randomness import generator
from ...errors import FedflatError
from .base import Partition, check_number, count_clients, rows_by_class, shown
from .even import IID
from .natural import check_groups


@dataclass(frozen=True)
class LongTail:
    """Exponentially fewer samples from class to class (Cao et al. 2019), then another partition of what is kept.

    Of C classes in N samples, class c keeps `⌊N/C · imbalance^(−c/(C−1))⌋` random samples, or all if it has fewer,
    so that the first has `imbalance` times as many as the last. FedGMT uses imbalance 2 ahead of
    `Dirichlet(alpha, "chunked")`.
    """

    imbalance: float
    then: Partition = field(default_factory=IID)

    def __post_init__(self) -> None:
        check_number("longtail", "imbalance", self.imbalance, 1)

    def __str__(self) -> str:
        return f"longtail:{shown(self.imbalance)}/{self.then}"

    def split(
        self, labels: np.ndarray, clients: int | None, seed: int, groups: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """As the second partition promises, of the samples kept; rows refer to all samples."""
        labels = np.asarray(labels)
        rng = generator(seed, "partition long tail")
        classes = rows_by_class(labels)
        kept = [
            rng.permutation(rows)[:count] for rows, count in zip(classes, self.keep(classes), strict=True)
        ]
        rows = np.sort(np.concatenate(kept))
        if clients is not None:
            count_clients(self, clients, len(rows))
        if groups is not None:
            groups = check_groups(groups, len(labels))[rows]
        return [rows[part] for part in self.then.split(labels[rows], clients, seed, groups)]

    def keep(self, classes: list[np.ndarray]) -> list[int]:
        """How many samples each class keeps, given the rows of all."""
        even, last = sum(map(len, classes)) / len(classes), max(len(classes) - 1, 1)
        counts = [math.floor(even * self.imbalance ** (-c / last) + 1e-9) for c in range(len(classes))]
        if min(counts) < 1:
            raise FedflatError(
                f"{self}: class {counts.index(0)} of {len(classes)} would keep no sample; use a smaller imbalance."
            )
        return counts
