"""The picture of a split that papers draw: samples by client and class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import FedflatError, MissingExtra
from .split_report import describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

DOTS = 30
"""Clients and classes up to which the picture has dots; beyond, it is a heat map."""

BLUE, GREY, FAINT = "#0072B2", "#999999", "#E4E4E4"


def draw(
    labels: np.ndarray,
    indices: Sequence[np.ndarray],
    classes: int,
    path: str | Path,
    title: str = "",
    names: Sequence[str] = (),
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
    paint(figure, counts, title, names=names)
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
    figure: Figure | SubFigure,
    counts: np.ndarray,
    title: str,
    top: int | None = None,
    shrunk: float = 1.0,
    names: Sequence[str] = (),
) -> None:
    """The picture; its scale ends at `top` samples of a class, and dots are for a figure that is `shrunk`."""
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
    if names:
        main.set_xticklabels([names[client] for client in _ticks(clients)], rotation=60, ha="right")
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
