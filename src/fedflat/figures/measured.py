"""Flatness over the course of training: FedGMT Figure 2, FedNSAM Figure 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import FedflatError, nearest
from ..flatness import MEASURES
from .footnote import noted
from .lines import Line, draw_against, line_of, recorded
from .style import legend_above, look, panels
from .trials import Runs, Trials, gather

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNITS = {
    "distance": "flatness distance",
    "distance to server": "distance to the server's model",
    "discrepancy": "flatness discrepancy",
    "discrepancy (active)": "flatness discrepancy, active clients",
    "drift": "diversity of updates",
    "gradient-drift": "diversity of gradients",
    "eigenvalues": r"$\lambda_{\max}$ of the Hessian",
    "trace": "trace of the Hessian",
    "low-pass": "low-pass filtered loss",
}
"""What the axis says, where the name alone would not do."""


@noted
def measure_curves(
    runs: Runs,
    measures: str | Sequence[str] = "sharpness",
    against: str = "rounds",
    smooth: int = 1,
    log: bool = False,
    width: str = "one",
) -> Figure:
    """Recorded measures over rounds, bytes, passes or seconds, a panel for each.

    The band is the deviation over seeds; of a single seed the confidence interval, where the measure has one.
    """
    names = [measures] if isinstance(measures, str) else list(measures)
    trials = gather(runs)
    found = [[_line(one, name, against, smooth) for one in trials] for name in names]
    with look():
        figure, axes = panels(len(names), width, 2.1)
        for one, name, lines in zip(axes, names, found, strict=True):
            draw_against(one, lines, against, UNITS.get(name, name))
            if log:
                one.set_yscale("log")
        legend_above(figure, axes)
    return figure


def _line(trials: Trials, name: str, against: str, smooth: int) -> Line:
    line = line_of(trials, recorded(name), against, smooth)
    if line is None:
        raise FedflatError(_refusal(trials, name))
    if len(trials.histories) > 1:
        return line
    ends = [line_of(trials, recorded(f"{name} {end}"), against, smooth) for end in ("low", "high")]
    low, high = (None if end is None or len(end.x) < len(line.x) else end.mean for end in ends)
    return replace(line, low=low, high=high)


def _refusal(trials: Trials, name: str) -> str:
    there = {key for history in trials.histories for row in history for key in row.get("measures") or {}}
    bare = name.split(" ")[0]
    if bare in MEASURES and not any(key.startswith(bare) for key in there):
        hint = (
            f" Record it while training: `fedflat run --measure {bare}`, or `measure: [{bare}]` in the file."
        )
    else:
        hint = nearest(name, there or MEASURES)
    return f"{trials.name} has not recorded '{name}'.{hint}"
