"""The loss on the straight line from one model to another, such as from the global model to a client's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ..errors import FedflatError
from .lines import Line, draw_lines
from .style import legend_above, look, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def interpolations(
    lines: Mapping[str, tuple[np.ndarray, np.ndarray]],
    start: str = "start",
    end: str = "end",
    ceiling: float | None = None,
    log: bool = False,
    width: str = "one",
) -> Figure:
    """`L((1−t) start + t end)` against t, of what `fedflat.interpolation` returned, by name."""
    if not lines:
        raise FedflatError("There is nothing to draw: give at least one line, by name.")
    with look():
        figure, (axes,) = panels(1, width, 2.2)
        draw_lines(axes, [Line(name, *(np.asarray(one) for one in line)) for name, line in lines.items()])
        for place in (0, 1):
            axes.axvline(place, color="#777777", linewidth=0.7, zorder=0)
        axes.set(xlabel=f"t, from 0 ({start}) to 1 ({end})", ylabel="loss")
        if log:
            axes.set_yscale("log")
        axes.set_ylim(top=ceiling)
        legend_above(figure, [axes])
    return figure
