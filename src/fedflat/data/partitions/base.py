"""What all partitions share: the interface, the checks of what they are given, and the shape of the result."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, Protocol

import numpy as np

from ...errors import FedflatError, nearest


class Partition(Protocol):
    """Deals samples out to clients. `str()` of one is the text that `parse_partition` reads."""

    def split(
        self, labels: np.ndarray, clients: int | None, seed: int, groups: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """The rows of every client, ascending.

        `groups` names every sample's user or domain; only partitions by user or domain need it, and only they
        can do without a number of clients (None: as many as there are groups).
        """


def rows_by_class(labels: np.ndarray) -> list[np.ndarray]:
    """The rows of every class that occurs, in the order of the class numbers."""
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise FedflatError(f"Labels must be one number per sample, not an array of shape {labels.shape}.")
    if len(labels) == 0:
        raise FedflatError("There are no samples to partition: the list of labels is empty.")
    if labels.dtype.kind not in "iub":
        raise FedflatError(f"Labels must be whole numbers, not {labels.dtype}; use iid, quantity or by-user.")
    if labels.min() < 0:
        raise FedflatError(f"There is the label {labels.min()}; labels must be whole numbers from 0.")
    return rows_by_value(labels)[1]


def rows_by_value(values: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """The different values in ascending order, and the rows of each."""
    different, counts = np.unique(values, return_counts=True)
    order = np.argsort(values, kind="stable")
    return different, np.split(order, np.cumsum(counts)[:-1])


def count_clients(partition: Partition, clients: int | None, samples: int) -> int:
    """The number of clients, if the data can be partitioned over that many."""
    if samples == 0:
        raise FedflatError("There are no samples to partition.")
    if clients is None:
        raise FedflatError(
            f"{partition}: say how many clients; only by-user and by-domain find out themselves."
        )
    if clients < 1:
        raise FedflatError(f"A federation needs at least one client, not {clients}.")
    if clients > samples:
        raise FedflatError(f"{samples:,} samples are not enough for {clients:,} clients; use fewer clients.")
    return clients


def hands(owners: np.ndarray, rows: np.ndarray, clients: int) -> list[np.ndarray]:
    """Every client's rows in ascending order, when `rows[k]` went to client `owners[k]`."""
    order = np.lexsort((rows, owners))
    ends = np.cumsum(np.bincount(owners, minlength=clients))
    return np.split(rows[order].astype(np.int64), ends[:-1])


def check_number(maker: str, name: str, value: Any, least: float, above: bool = False) -> None:
    """A finite number from `least` on (or above it)."""
    good = isinstance(value, Real) and math.isfinite(value)
    if not good or value < least or (above and value == least):
        bound = f"above {least:g}" if above else f"at least {least:g}"
        raise FedflatError(f"{maker}: {name} must be {bound}, not {value}.")


def check_form(maker: str, form: str, known: Iterable[str]) -> None:
    """One of the known forms."""
    if form not in known:
        raise FedflatError(f"{maker} has no form '{form}'.{nearest(form, known)}")


def shown(value: float) -> str:
    """A number as short as it can be written and read back: 2, 0.1."""
    return repr(float(value)).removesuffix(".0")
