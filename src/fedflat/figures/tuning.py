"""A search for settings: what every trial came to, trial by trial, then against every setting that was searched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import FedflatError, require
from .style import COLOURS, legend_above, look, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def tuning(study: str | Path, width: str = "two") -> Figure:
    """A panel with all trials in their order, and one for every setting; the chosen trial is marked in each.

    Args:
        study: the directory that `fedflat tune` wrote.
        width: one or two columns.
    """
    require("optuna", "optuna", "tune", "Drawing a search")
    from ..experiments.study import COMPLETE, PRUNED, read_study
    from ..experiments.tune import monitor_of_study

    trials, monitor = read_study(Path(study)), monitor_of_study(Path(study))
    scale = monitor.sign * (100 if monitor.share else 1)  # studies maximise
    done = [
        (trial, scale * trial.value)
        for trial in trials
        if trial.value is not None and trial.state is COMPLETE
    ]
    early = [
        (trial, scale * trial.intermediate_values[trial.last_step])
        for trial in trials
        if trial.state is PRUNED and trial.last_step is not None
    ]
    if not done:
        raise FedflatError(f"No trial in {study} has ended: there is nothing to draw.")
    best = max(done, key=lambda one: (monitor.sign * one[1], -one[0].number))
    names = list(best[0].params)
    with look():
        figure, axes = panels(1 + len(names), width, 2.1)
        for place, name in zip(axes, [None, *names], strict=True):
            _scatter(place, done, early, best, name)
            place.set_ylabel(f"validation {monitor.title}{' (%)' if monitor.share else ''}")
        reached = [
            monitor.best(value for other, value in done if other.number <= trial.number)
            for trial, value in done
        ]
        axes[0].step(
            [trial.number for trial, _ in done], reached, where="post", color=COLOURS[0], label="best so far"
        )
        legend_above(figure, axes)
    return figure


def _scatter(axes: Axes, done: list[Any], early: list[Any], best: Any, name: str | None) -> None:
    """Trials as dots against their number, or against a setting."""
    axes.set_xlabel(name or "trial")
    range_ = best[0].distributions.get(name)
    choices = list(getattr(range_, "choices", ()))

    def across(trial: Any) -> Any:
        if name is None:
            return trial.number
        return choices.index(trial.params[name]) if choices else trial.params[name]

    styles: list[tuple[list[Any], dict[str, Any]]] = [
        (done, {"color": COLOURS[0], "label": "ran to its end"}),
        (early, {"facecolors": "none", "edgecolors": COLOURS[1], "label": "ended early, its last test"}),
        ([best], {"s": 70, "facecolors": "none", "edgecolors": "black", "label": "chosen"}),
    ]
    for ones, style in styles:
        if ones:
            axes.scatter(
                [across(one) for one, _ in ones],
                [value for _, value in ones],
                **{"s": 14, "zorder": 3, **style},
            )
    if choices:
        axes.set_xticks(range(len(choices)), [str(choice) for choice in choices])
    elif getattr(range_, "log", False):
        axes.set_xscale("log")
