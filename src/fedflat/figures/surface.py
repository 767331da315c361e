"""The loss around trained models as surfaces in space, on shared axes: FedGMT Figure 7, FedNSAM Figures 1 and 7."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FedflatError
from ..flatness.landscape import Landscape
from .footnote import noted
from .landscape import choose, in_a_row, titled
from .levels import Scale
from .style import HEAT, columns_wide, look, name_panels
from .trials import Place

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FINE = 96
"""Points to a side of the grid that is drawn."""


@noted
def surfaces(
    seen: Landscape | Place | Sequence[Place],
    parts: Sequence[str] | None = None,
    ceiling: float | None = None,
    width: str = "two",
) -> Figure:
    """The loss over a plane as a surface in space, a panel for every model and part of the data.

    All have the same axes and colours; what is above the ceiling is cut off.
    """
    seen, chosen = choose(seen, parts)
    if len(seen.axes) != 2:
        raise FedflatError(
            "A surface needs a landscape in two dimensions; this one is a line. Compute it without --line."
        )
    titles, grids = titled(seen, chosen)
    levels = Scale.of(grids, ceiling).levels
    low, high = float(levels[0]), float(levels[-1])
    with look():
        from matplotlib.colors import Normalize

        from .shown import ShownFigure

        inches = columns_wide(width)
        across = 1 if width == "one" else min(in_a_row(len(seen.losses), len(chosen), width), len(grids))
        down = -(-len(grids) // across)
        side = inches / across
        figure = ShownFigure(figsize=(inches, 0.9 * down * side))
        figure.subplots_adjust(
            left=0.0, right=0.96, bottom=0.04, top=1 - 0.25 / (0.9 * down * side), wspace=0.04
        )
        every: list[Any] = [
            figure.add_subplot(down, across, number + 1, projection="3d") for number in range(len(grids))
        ]
        for one, losses in zip(every, grids, strict=True):
            (first, second), fine = _refined(seen.axes, losses)
            one.plot_surface(
                *np.meshgrid(first, second, indexing="ij"),
                _cut(fine, high),
                cmap=HEAT,
                norm=Normalize(low, high),
                rcount=FINE,
                ccount=FINE,
                linewidth=0,
                antialiased=False,
                rasterized=True,  # thousands of faces make a large vector file
            )
            one.set_zlim(low, high)
            for axis, place in zip("xy", seen.axes, strict=True):
                ends = [float(place[0]), float(place[0] + place[-1]) / 2, float(place[-1])]
                one.set(**{f"{axis}lim": (ends[0], ends[-1]), f"{axis}ticks": ends})
                getattr(one, f"set_{axis}ticklabels")([f"{end:.3g}".replace("-", "−") for end in ends])
            one.locator_params("z", nbins=5)
            one.tick_params(pad=-2.5, labelsize=6)
            one.set_xlabel("direction 1", labelpad=-9)
            one.set_ylabel("direction 2", labelpad=-9)
            one.set_zlabel("loss", labelpad=-4)
            one.view_init(elev=28, azim=-60)
            one.set_box_aspect((1, 1, 0.8), zoom=0.95)
        name_panels(every, titles, int(15 * side))
    return figure


def _refined(
    axes: Sequence[np.ndarray], losses: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """The same surface by linear interpolation on a finer grid, so that a ceiling cuts a clean edge."""
    first, second = (np.linspace(axis[0], axis[-1], FINE) for axis in axes)
    rows = np.stack([np.interp(first, axes[0], column) for column in losses.T], axis=1)
    return (first, second), np.stack([np.interp(second, axes[1], row) for row in rows])


def _cut(losses: np.ndarray, ceiling: float) -> np.ndarray:
    """Nothing above the ceiling, but for the points next to it, which end the surface at its height."""
    below = losses <= ceiling
    padded = np.pad(below, 1)
    near = np.any(
        [padded[i : i + len(below), j : j + below.shape[1]] for i in range(3) for j in range(3)], axis=0
    )
    return np.where(near & np.isfinite(losses), np.minimum(losses, ceiling), np.nan)
