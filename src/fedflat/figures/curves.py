"""Learning curves: FedGMT Figure 5, FedWMSAM Figures 3, 4, 8, 10, FedNSAM Figures 4 to 6, FedGF Figures 4, 8, 13."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.monitor import Monitor
from ..errors import FedflatError, nearest
from ..experiments.compare import REPORTED, leave_out
from .footnote import noted
from .lines import draw_against, line_of
from .style import legend_above, look, panels
from .trials import Runs, gather, monitored_by_all

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VALUES = {
    "accuracy": ("test accuracy (%)", 100.0),
    "validation": ("validation accuracy (%)", 100.0),
    "loss": ("test loss", 1.0),
    "train_loss": ("training loss of the active clients", 1.0),
    "worst_decile": ("accuracy of the worst tenth of clients (%)", 100.0),
}
"""What there is to draw: what the axis says, and the factor."""
TESTED = ("accuracy", "loss")
"""What clients report where the server has no test set."""


@noted
def learning_curves(
    runs: Runs,
    value: str | None = None,
    against: str = "rounds",
    smooth: int = 1,
    within: tuple[float, float] | None = None,
    width: str = "one",
) -> Figure:
    """Accuracy or loss over rounds, bytes, passes or seconds; the mean over seeds, the band their deviation.

    Args:
        runs: directories, or histories by name; see `fedflat.figures.trials.Runs`.
        value: accuracy, validation (the monitored metric there), loss, train_loss, worst_decile, or a recorded
            metric; by default the monitored one.
        against: rounds, bytes, passes or seconds.
        smooth: every point is the mean of this many last tests.
        within: the lower and the upper end of the vertical axis.
        width: one or two columns.
    """
    trials = gather(runs)
    value = monitored_by_all(trials).name if value is None else value
    recorded = {
        name for one in trials for rows in one.histories for row in rows for name in row.get("metrics") or {}
    }
    if value not in VALUES and value not in recorded:
        raise FedflatError(
            f"A learning curve has no '{value}'.{nearest(value, [*VALUES, *sorted(recorded)])}"
        )
    held_out = monitored_by_all(trials) if value == "validation" else None
    lines = [line_of(one, lambda row: _value(row, value, held_out), against, smooth) for one in trials]
    missing = [one.name for one, line in zip(trials, lines, strict=True) if line is None]
    untested = [f"{name} has no {value.replace('_', ' ')} yet: no round has been tested." for name in missing]
    if len(missing) == len(trials):
        raise FedflatError(untested[0])
    for sentence in untested:
        leave_out(sentence)
    label, scale = VALUES.get(value, (f"test {Monitor(value).title}", 1.0))
    if held_out is not None and held_out.name != "accuracy":
        label, scale = f"validation {held_out.title}", 1.0
    if value in TESTED and any(one.by_clients for one in trials):
        label = label.removeprefix("test ")
        if all(one.by_clients for one in trials):
            label = label.replace(value, value + REPORTED)
        else:
            lines = [
                replace(line, name=f"{line.name},{REPORTED}") if line is not None and one.by_clients else line
                for one, line in zip(trials, lines, strict=True)
            ]
    with look():
        figure, (axes,) = panels(1, width, 2.3)
        draw_against(axes, lines, against, label, scale)
        if within is not None:
            axes.set_ylim(*within)
        legend_above(figure, [axes])
    return figure


def _value(row: Mapping[str, Any], name: str, held_out: Monitor | None) -> float | None:
    if held_out is not None:
        return held_out.of(row.get("validation") or {})
    if name == "worst_decile":
        row, name = row.get("client_accuracy") or {}, "worst_decile"
    given: float | None = row.get(name) if name in VALUES else Monitor(name).of(row)
    return given
