"""How uneven a split is, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..errors import FedflatError

ALL_CLIENTS = 20
"""Clients up to which the table shows every one."""

FIRST_CLIENTS = 5
"""How many it shows otherwise, beside the extremes."""


class Spread(NamedTuple):
    """A quantity over the clients."""

    min: float
    median: float
    mean: float
    max: float


@dataclass(frozen=True, eq=False)
class SplitReport:
    """A split in numbers; `rich.print` shows it as a table."""

    counts: np.ndarray
    """Samples by client (rows) and class (columns)."""

    unused: int
    """Samples that no client has."""

    repeated: int
    """Samples dealt beyond the first time, to the same client or another."""

    names: Sequence[str] = ()
    """What clients are called; without, they are numbered."""

    @property
    def samples(self) -> np.ndarray:
        """The samples of every client."""
        return np.asarray(self.counts.sum(axis=1))

    @property
    def present(self) -> np.ndarray:
        """The number of classes of which each client has a sample."""
        return np.asarray((self.counts > 0).sum(axis=1))

    @property
    def effective(self) -> np.ndarray:
        """Every client's effective number of classes: `exp` of the entropy of its labels."""
        shares = self._shares
        logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
        return np.asarray(np.exp(-(shares * logs).sum(axis=1)))

    @property
    def distance(self) -> np.ndarray:
        """Total variation, from 0 to 1, between the labels of each client and those of all clients together."""
        everyone = self.counts.sum(axis=0) / self.counts.sum()
        return np.asarray(np.abs(self._shares - everyone).sum(axis=1) / 2)

    @property
    def _shares(self) -> np.ndarray:
        return np.asarray(self.counts / self.counts.sum(axis=1, keepdims=True))

    def summary(self) -> dict[str, Spread]:
        """Least, median, mean and greatest over the clients, by quantity."""
        return {
            name: Spread(*(float(f(values)) for f in (np.min, np.median, np.mean, np.max)))
            for name, values in self._columns().items()
        }

    def summary_table(self) -> Table:
        """The summary, one line per quantity."""
        table = _table(f"{len(self.counts):,} clients", "min", "median", "mean", "max")
        for name, spread in self.summary().items():
            table.add_row(name, *(_number(value, name) for value in spread))
        return table

    def clients_table(self) -> Table:
        """All clients when there are few, otherwise the first and the extremes."""
        columns = self._columns()
        table = _table("client", *columns)
        table.add_column("")
        clients = range(len(self.counts))
        notes = self._extremes() if len(clients) > ALL_CLIENTS else {}
        first = clients if len(clients) <= ALL_CLIENTS else clients[:FIRST_CLIENTS]
        for client in [*first, *sorted(set(notes) - set(first))]:
            table.add_row(
                self.names[client] if self.names else str(client),
                *(_number(values[client], name) for name, values in columns.items()),
                ", ".join(notes.get(client, [])),
                end_section=client == first[-1],
            )
        return table

    def __rich__(self) -> Group:
        remarks = [
            f"{self.counts.sum():,} samples of {np.count_nonzero(self.counts.sum(axis=0))} classes",
            f"{self.unused:,} of the data's unused" if self.unused else "all used",
            f"{self.repeated:,} repeated" if self.repeated else "none twice",
        ]
        explained = (
            f"{', '.join(remarks)}\n"
            "effective classes: exp of a client's label entropy\n"
            "distance: total variation between a client's labels and those of all clients together"
        )
        return Group(self.summary_table(), self.clients_table(), Text(explained, style="dim"))

    def _columns(self) -> dict[str, np.ndarray]:
        return {
            "samples": self.samples,
            "classes": self.present,
            "effective classes": self.effective,
            "distance": self.distance,
        }

    def _extremes(self) -> dict[int, list[str]]:
        """The clients that stand out, and in what."""
        result: dict[int, list[str]] = {}
        for values, least, most, matters in (
            (self.samples, "fewest samples", "most samples", 1),
            (self.effective, "most uneven", "most even", 0.01),
            (self.distance, "nearest to all", "farthest from all", 0.001),
        ):
            if np.ptp(values) > matters:
                result.setdefault(int(values.argmin()), []).append(least)
                result.setdefault(int(values.argmax()), []).append(most)
        return result


def describe(
    labels: np.ndarray, indices: Sequence[np.ndarray], classes: int, names: Sequence[str] = ()
) -> SplitReport:
    """The numbers of a split: the labels of all samples, the rows of every client, the classes, and names."""
    labels = np.asarray(labels)
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise FedflatError(f"Labels must be from 0 to {classes - 1}, not {labels.min()} to {labels.max()}.")
    empty = [client for client, rows in enumerate(indices) if len(rows) == 0]
    if empty or len(indices) == 0:
        raise FedflatError(
            f"client {empty[0]} has no samples." if empty else "There are no clients to describe."
        )
    counts = np.stack([np.bincount(labels[rows], minlength=classes) for rows in indices])
    used = len(np.unique(np.concatenate(list(indices))))
    return SplitReport(counts, unused=len(labels) - used, repeated=int(counts.sum()) - used, names=names)


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _number(value: float, quantity: str) -> str:
    if quantity == "distance":
        return f"{value:.3f}"
    return f"{value:,.1f}" if quantity == "effective classes" or value != int(value) else f"{int(value):,}"
