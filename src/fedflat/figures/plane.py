"""Where local training goes, on a plane of the loss: FedGMT Figure 6."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import FedflatError, nearest
from ..flatness.landscape import Plane, merged
from .levels import Scale
from .style import COLOURS, columns_wide, legend_above, look, panels, pen, sparse

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MERGED = "merged"
PATHS = tuple(COLOURS[n] for n in (1, 6, 3, 4, 0, 2, 5))
"""Colours in an order that begins far from those of the loss."""
HALO = 2.6
"""Points of the white line under a path: it is seen on any colour."""


def trajectories(
    seen: Plane,
    parts: Sequence[str] | None = None,
    start: str = "start",
    ceiling: float | None = None,
    width: str = "two",
) -> Figure:
    """Paths over the loss of each kind of data, and over `merged`, their sum after each is scaled to [0, 1].

    Args:
        seen: what `fedflat.plane` returned: losses by data, such as local and global, and paths by name.
        parts: which of them to draw, `merged` among them; all by default, merged where there are several.
        start: what to call the first of the plane's three points.
        ceiling: the highest loss to tell apart, but for merged.
        width: one or two columns.
    """
    losses = dict(seen.losses)
    if len(losses) > 1:
        losses[MERGED] = merged(list(seen.losses.values()))
    for part in parts or ():
        if part not in losses:
            raise FedflatError(f"The plane has no loss '{part}'.{nearest(part, losses)}")
    chosen = list(parts or losses)
    with look():
        across = 1 if width == "one" else min(3, len(chosen))
        side = columns_wide(width) / (across + 0.4)
        figure, axes = panels(len(chosen), width, 0.95 * side, most=across, sharex=True, sharey=True)
        for one, part in zip(axes, chosen, strict=True):
            scale = Scale.of([losses[part]], None if part == MERGED else ceiling)
            scale.bar(figure, scale.contours(one, seen.axes, losses[part]), one)
            for number, (name, path) in enumerate(seen.paths.items()):
                _path(one, number, name, path)
            one.plot(*seen.corners[0], "*", color="white", markeredgecolor="black", markersize=8, label=start)
            one.set_title(
                f"{' + '.join(seen.losses)}, each scaled to 0–1" if part == MERGED else f"{part} loss"
            )
        figure.supxlabel("distance, direction 1", fontsize=7.5)
        figure.supylabel("distance, direction 2", fontsize=7.5)
        legend_above(figure, axes)
    return figure


def _path(axes: Axes, number: int, name: str, path: np.ndarray) -> None:
    look = {**pen(number), "color": PATHS[number % len(PATHS)]}
    _, step = sparse(len(path), 0)
    axes.plot(*path.T, color="white", linewidth=HALO)
    axes.plot(*path.T, label=name, markevery=[*range(0, len(path), step), len(path) - 1], **look)
