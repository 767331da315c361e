"""How figures look: legible in a column of a paper, in grey and for any colour vision; the same bits every time."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import FedflatError, MissingExtra, explained, nearest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe & Ito (2008), without the yellow, which is too light for lines on white."""
MARKERS = ("o", "s", "^", "D", "v", ">", "<")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (9, 2)))
"""As many as have no factor in common with the colours: 35 lines before one comes again."""
CLASSES = (*COLOURS, "#882255", "#999999", "#999933")
"""And three more, from Tol's: as many as datasets often have classes."""
HEAT = "viridis"
"""Even steps of lightness, so that it can be read in grey."""
WIDTHS = {"one": 3.4, "two": 7.0}
"""Inches: one column of a paper, or two."""
ENDINGS = (".png", ".svg", ".pdf")
MARKS = 8
"""Markers on a line, about."""
SMALL = 7.0
"""Points of the letters, but for titles."""

LOOK: dict[str, Any] = {
    "font.size": SMALL,
    "axes.titlesize": 8.0,
    "axes.labelsize": SMALL + 0.5,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "legend.columnspacing": 1.4,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # conferences refuse the other kind
    "svg.hashsalt": "fedflat",  # otherwise names inside the file are new every time
}


@contextmanager
def look() -> Iterator[None]:
    """Draw in this style, whatever the person's own matplotlib settings are."""
    try:
        from matplotlib import style
    except ImportError:
        raise MissingExtra("matplotlib", "plot", "Drawing a figure") from None
    with style.context(["default", LOOK]):
        yield


def columns_wide(width: str) -> float:
    """Inches of a width by name."""
    if width not in WIDTHS:
        raise FedflatError(f"A figure is one or two columns wide, not '{width}'.{nearest(width, WIDTHS)}")
    return WIDTHS[width]


def panels(
    count: int, width: str, height: float, most: int | None = None, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of some panels of this height in inches, as many in a row as there is room for, or `most`."""
    from .shown import ShownFigure

    inches = columns_wide(width)
    across = min(count, most or (1 if width == "one" else 2))
    down = -(-count // across)
    figure = ShownFigure(figsize=(inches, height * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, **shared)
    every = list(grid.flat)
    for spare in every[count:]:
        spare.remove()
    return figure, every[:count]


def pen(number: int) -> dict[str, Any]:
    """Colour, dashes and marker of one of several lines."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number % len(DASHES)],
        "marker": MARKERS[number % len(MARKERS)],
        "markeredgecolor": "white",
        "markeredgewidth": 0.4,
    }


def sparse(length: int, number: int) -> tuple[int, int]:
    """Where a long line has markers, lines beside each other at different places: the first, and the step."""
    if length <= 2 * MARKS:
        return 0, 1
    step = length // MARKS
    return (number * step // len(MARKERS)) % step, step


def legend_above(figure: Figure, axes: Sequence[Axes], **more: Any) -> None:
    """The names of all lines over the figure, which grows for it; a name that several panels have, once."""
    named: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    if not named:
        return
    handles, labels = list(named.values()), list(named)
    points = 72 * figure.get_figwidth()
    letter = 0.62 * SMALL
    room = int((points - 50) / letter)
    labels = [textwrap.fill(label, room) for label in labels]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    across = max(1, min(len(labels), int(points / (longest * letter + 38))))
    down = -(-len(labels) // across)
    across = -(-len(labels) // down)  # rows of equal length
    lines = down * max(label.count("\n") + 1 for label in labels)
    figure.set_figheight(figure.get_figheight() + 0.1 + lines * 1.7 * SMALL / 72)
    figure.legend(handles, labels, loc="outside upper center", ncols=across, **more)


def name_panels(axes: Sequence[Axes], titles: Sequence[str], room: int) -> None:
    """A title over every panel, broken into lines of at most this many letters."""
    for one, title in zip(axes, titles, strict=True):
        one.set_title(textwrap.fill(title, room))


def check_ending(path: Path) -> None:
    """Whether a figure can be written to a file of this name."""
    if path.suffix.lower() not in ENDINGS:
        raise FedflatError(
            f"{path}: a figure is written to .png, .svg or .pdf.{nearest(path.suffix, ENDINGS)}"
        )


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as png, svg or pdf, as the file's name ends; the same figure gives the same bytes."""
    path = Path(path)
    check_ending(path)
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with look(), explained(f"{path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata=undated.get(path.suffix.lower()))
    return path
