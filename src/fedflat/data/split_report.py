"""How uneven a split is: numbers, a table and the picture of clients and classes that papers draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..errors import FedflatError, MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

ALL_CLIENTS = 20
"""Up to so many clients the table shows every one."""

FIRST_CLIENTS = 5
"""How many it shows otherwise, beside the extremes."""

DOTS = 30
"""Up to so many clients and classes the picture has dots, beyond it is a heat map."""

BLUE, GREY, FAINT = "#0072B2", "#999999", "#E4E4E4"


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
                str(client),
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


def describe(labels: np.ndarray, indices: Sequence[np.ndarray], classes: int) -> SplitReport:
    """The numbers of a split: the labels of all samples, the rows of every client, the number of classes."""
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
    return SplitReport(counts, unused=len(labels) - used, repeated=int(counts.sum()) - used)


def draw(
    labels: np.ndarray, indices: Sequence[np.ndarray], classes: int, path: str | Path, title: str = ""
) -> Path:
    """Draw a split into a file: samples by client (across) and class (up), and beside it samples per class.

    Dots whose area is the number of samples, or a heat map when there are more than 30 clients or classes. The end
    of the file's name chooses the format: png, pdf or svg.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "plot", "Drawing a split") from None
    counts = describe(labels, indices, classes).counts
    figure = Figure(figsize=picture_size(*counts.shape), dpi=150, layout="constrained")
    paint(figure, counts, title)
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except (OSError, ValueError) as problem:
        raise FedflatError(f"Cannot draw into {path} ({problem}); choose another file.") from None
    return path


def picture_size(clients: int, classes: int) -> tuple[float, float]:
    """Inches that give a cell room but fit on a page."""
    if max(clients, classes) > DOTS:
        return 9.5, min(max(2.8, 1.2 + 0.2 * classes), 7.0)
    return max(5.2, 3.2 + 0.34 * clients), max(2.4, 1.2 + 0.3 * classes)


def paint(
    figure: Figure | SubFigure, counts: np.ndarray, title: str, top: int | None = None, shrunk: float = 1.0
) -> None:
    """The picture; its scale ends at `top` samples of a class, and dots are for a figure that is shrunk so much."""
    top = top or int(counts.max())
    clients, classes = counts.shape
    dots = max(clients, classes) <= DOTS
    width = max(0.34 * clients, 2.6) if dots else 6.5
    main, side = figure.subplots(1, 2, sharey=True, width_ratios=(width, 1.0))
    if dots:
        _dots(figure, main, counts, top, 260 * shrunk**2)
    else:
        _heat(figure, (main, side), counts, top)
    main.set(xlabel="client", ylabel="class", xticks=_ticks(clients), yticks=_ticks(classes))
    main.set(xlim=(-0.5, clients - 0.5), ylim=(-0.5, classes - 0.5))
    side.barh(np.arange(classes), counts.sum(axis=0), height=0.8 if classes <= DOTS else 1.0, color=GREY)
    all_clients = int(counts.sum(axis=0).max())
    side.set(xlabel="all clients", xlim=(0, all_clients), xticks=[0, all_clients])
    side.set_xticklabels(["0", f"{all_clients:,}"])
    side.tick_params(axis="y", left=False)
    for axes in (main, side):
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        main.set_title(title, loc="left", fontsize=11 * shrunk)


def _dots(figure: Figure | SubFigure, axes: Axes, counts: np.ndarray, top: int, largest: float) -> None:
    """Area proportional to the number of samples, but never too small to see; the largest about fills its cell."""
    axes.set_axisbelow(True)
    axes.grid(color=FAINT, linewidth=0.6)
    area = largest / top
    client, label = np.nonzero(counts)
    axes.scatter(client, label, s=np.maximum(counts[client, label] * area, 1.5), color=BLUE, linewidths=0)
    steps = sorted({_nice(top * part) for part in (1.0, 0.5, 0.1, 0.02)}, reverse=True)
    sizes = [axes.scatter([], [], s=n * area, color=BLUE, linewidths=0, label=f"{n:,}") for n in steps]
    figure.legend(handles=sizes, title="samples", loc="outside right upper", frameon=False, labelspacing=0.9)


def _heat(figure: Figure | SubFigure, axes: tuple[Axes, Axes], counts: np.ndarray, top: int) -> None:
    """Colour from light (few) to dark (many); white is none."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    colours = ListedColormap(colormaps["Blues"](np.linspace(0.22, 1, 256)))
    axes[0].grid(False)
    gap = 0.4 if max(counts.shape) <= 120 else 0.0
    clients, classes = (np.arange(count + 1) - 0.5 for count in counts.shape)
    image = axes[0].pcolormesh(
        clients,
        classes,
        np.ma.masked_equal(counts.T, 0),
        cmap=colours,
        vmin=0,
        vmax=top,
        edgecolors="white" if gap else "none",
        linewidth=gap,
    )
    figure.colorbar(image, ax=axes, label="samples (white: none)", pad=0.02, fraction=0.04)


def _ticks(count: int) -> list[int]:
    """Every number up to 30, then every tenth or so."""
    step = 1 if count <= DOTS else _nice(count / 8)
    return list(range(0, count, step))


def _nice(value: float) -> int:
    """The greatest of 1, 2, 5, 10, 20, 50, ... up to the value."""
    power = int(10 ** (len(str(max(int(value), 1))) - 1))
    return max(step * power for step in (1, 2, 5) if step == 1 or step * power <= value)


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
