"""The loss around trained models as contours on shared axes: FedNSAM Figures 1 and 7, FedGF Figures 2 and 6."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import FedflatError, nearest
from ..flatness.landscape import Landscape
from .footnote import noted
from .levels import Scale
from .lines import Line, draw_lines
from .stored import stored_landscape
from .style import columns_wide, legend_above, look, name_panels, panels
from .trials import Place

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACROSS = 3
"""Panels in a row of a figure that is two columns wide."""


@noted
def landscapes(
    seen: Landscape | Place | Sequence[Place],
    parts: Sequence[str] | None = None,
    ceiling: float | None = None,
    width: str = "two",
) -> Figure:
    """Contours of the loss over a plane, a panel for every model and part of the data; over a line, curves.

    Args:
        seen: what `fedflat.landscape` returned, or runs with what `fedflat landscape` kept.
        parts: such as train and test; all there are by default.
        ceiling: the highest loss to tell apart.
        width: one or two columns.
    """
    seen, chosen = choose(seen, parts)
    if len(seen.axes) == 1:
        return _curves(seen, chosen, ceiling, width)
    titles, grids = titled(seen, chosen)
    scale = Scale.of(grids, ceiling)
    with look():
        across = in_a_row(len(seen.losses), len(chosen), width)
        side = columns_wide(width) / (min(across, len(grids)) + 0.45)
        figure, axes = panels(len(grids), width, side + 0.1, most=across, sharex=True, sharey=True)
        for one, losses in zip(axes, grids, strict=True):
            drawn = scale.contours(one, seen.axes, losses)
            one.plot(0, 0, marker="*", color="white", markeredgecolor="black", markersize=7, linestyle="none")
            one.set_aspect("equal")
        name_panels(axes, titles, int(15 * side))
        figure.supxlabel("direction 1 (filter lengths)", fontsize=7.5)
        figure.supylabel("direction 2 (filter lengths)", fontsize=7.5)
        scale.bar(figure, drawn, axes, "loss")
    return figure


def choose(
    seen: Landscape | Place | Sequence[Place], parts: Sequence[str] | None
) -> tuple[Landscape, list[str]]:
    """The landscape, and the parts of it that every model has."""
    if not isinstance(seen, Landscape):
        seen = stored_landscape(seen)
    if not seen.losses:
        raise FedflatError("The landscape has no model in it.")
    common = [
        part for part in next(iter(seen.losses.values())) if all(part in one for one in seen.losses.values())
    ]
    for part in parts or ():
        if part not in common:
            raise FedflatError(
                f"Not every landscape has the {part} loss.{nearest(part, common)} "
                f"`fedflat landscape RUNS... --part {part}` computes it."
            )
    if not common:
        raise FedflatError(
            "The landscapes have no part of the data in common: compute train or test for all."
        )
    return seen, list(parts or common)


def titled(seen: Landscape, parts: Sequence[str]) -> tuple[list[str], list[np.ndarray]]:
    """Titles and losses, part by part."""
    titles = [f"{name}, {part}" if len(parts) > 1 else name for part in parts for name in seen.losses]
    return titles, [losses[part] for part in parts for losses in seen.losses.values()]


def in_a_row(models: int, parts: int, width: str) -> int:
    """Panels in a row: a row for each part if that fits."""
    if width == "one":
        return 2
    return models if parts > 1 and models <= ACROSS + 1 else min(ACROSS, models * parts)


def _curves(seen: Landscape, parts: Sequence[str], ceiling: float | None, width: str) -> Figure:
    """The loss along one direction, a panel for each part of the data."""
    with look():
        figure, axes = panels(len(parts), width, 2.2, sharey=True)
        for one, part in zip(axes, parts, strict=True):
            draw_lines(one, [Line(name, seen.axes[0], losses[part]) for name, losses in seen.losses.items()])
            one.set(xlabel="random direction (filter lengths)", ylabel=f"{part} loss")
            one.set_ylim(top=ceiling)
        legend_above(figure, axes)
    return figure
