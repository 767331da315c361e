"""Partitions that the data bring along: one client per user or per domain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.randomness import generator
from ...errors import FedflatError
from .base import Partition, rows_by_value


@dataclass(frozen=True)
class ByUser:
    """One client per user, as in LEAF (Caldas et al. 2018).

    Given a number of clients, that many users are chosen at random by the seed; the others' samples are unused.
    Clients are in the order of the users' names.
    """

    def __str__(self) -> str:
        return "by-user"

    def split(
        self, labels: np.ndarray, clients: int | None, seed: int, groups: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """All samples of every user chosen."""
        users = _groups(self, "user", groups, len(labels))
        if clients is None or clients == len(users):
            return users
        if clients < 1:
            raise FedflatError(f"A federation needs at least one client, not {clients}.")
        if clients > len(users):
            raise FedflatError(
                f"{self}: there are {len(users):,} users, fewer than the {clients:,} clients asked for; "
                f"use fewer clients."
            )
        rng = generator(seed, "partition by user")
        return [users[k] for k in sorted(rng.choice(len(users), clients, replace=False).tolist())]


@dataclass(frozen=True)
class ByDomain:
    """One client per domain, as FedWMSAM partitions OfficeHome; clients are in the order of the domains' names."""

    def __str__(self) -> str:
        return "by-domain"

    def split(
        self, labels: np.ndarray, clients: int | None, seed: int, groups: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """All samples of every domain; a number of clients can only be the number of domains."""
        domains = _groups(self, "domain", groups, len(labels))
        if clients is not None and clients != len(domains):
            few = "fewer" if len(domains) < clients else "more"
            raise FedflatError(
                f"{self}: there are {len(domains)} domains, {few} than the {clients} clients asked for; "
                f"ask for {len(domains)} clients."
            )
        return domains


def check_groups(groups: np.ndarray, samples: int) -> np.ndarray:
    """One name or number per sample."""
    groups = np.asarray(groups)
    if groups.shape != (samples,):
        raise FedflatError(f"groups must name one group for each of {samples} samples, not {groups.shape}.")
    return groups


def _groups(partition: Partition, kind: str, groups: np.ndarray | None, samples: int) -> list[np.ndarray]:
    if groups is None:
        raise FedflatError(
            f"{partition} needs to know the {kind} of every sample, and these data do not say; "
            f"use another partition or give `groups`."
        )
    if samples == 0:
        raise FedflatError("There are no samples to partition.")
    return rows_by_value(check_groups(groups, samples))[1]
