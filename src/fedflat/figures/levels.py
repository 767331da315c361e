"""One scale of colours for several pictures of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FedflatError
from .style import HEAT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

STEPS = 14
WIDE = 20
"""Ratio of the highest to the lowest loss from which levels are multiples of each other."""


@dataclass(frozen=True)
class Scale:
    """One scale for all panels: levels from the lowest loss of all to the highest, or to a ceiling."""

    levels: np.ndarray
    log: bool
    cut: bool
    """whether there are losses above it"""

    @classmethod
    def of(cls, losses: Sequence[np.ndarray], ceiling: float | None = None) -> Scale:
        """A scale for some arrays; what is not finite does not count."""
        every = np.concatenate([one.ravel() for one in losses])
        every = every[np.isfinite(every)]
        if not len(every):
            raise FedflatError("All losses are NaN or infinite: has the training diverged?")
        low, most = float(every.min()), float(every.max())
        if ceiling is not None and ceiling <= low:
            raise FedflatError(f"ceiling={ceiling:g} is below every loss; the lowest is {low:.4g}.")
        high = most if ceiling is None else min(ceiling, most)
        if high == low:
            high = low + max(abs(low), 1.0) * 1e-6  # a plain: still a picture
        log = low > 0 and high / low >= WIDE
        spaced = np.geomspace if log else np.linspace
        return cls(spaced(low, high, STEPS + 1), log, most > high)

    def norm(self) -> Normalize:
        """From losses to colours."""
        from matplotlib.colors import LogNorm, Normalize

        return (LogNorm if self.log else Normalize)(self.levels[0], self.levels[-1])

    def contours(self, panel: Axes, axes: Sequence[np.ndarray], losses: np.ndarray) -> Any:
        """Draw filled contours with thin lines between them; `losses[i, j]` is at `axes[0][i]` and `axes[1][j]`."""
        shown = np.ma.masked_invalid(losses.T)
        extend = "max" if self.cut else "neither"
        drawn = panel.contourf(
            axes[0], axes[1], shown, self.levels, cmap=HEAT, norm=self.norm(), extend=extend
        )
        panel.contour(axes[0], axes[1], shown, self.levels, colors="white", linewidths=0.3, alpha=0.7)
        panel.grid(False)
        return drawn

    def bar(self, figure: Figure, drawn: Any, axes: Any, label: str = "") -> None:
        """The scale beside the pictures: every other level, in figures that can be read."""
        bar = figure.colorbar(drawn, ax=axes, label=label, aspect=30, pad=0.02)
        levels = self.levels[::2]
        bar.set_ticks(levels.tolist(), labels=[f"{level:.3g}" for level in levels])
        bar.minorticks_off()
        bar.outline.set_linewidth(0.4)
