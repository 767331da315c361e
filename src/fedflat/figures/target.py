"""What a target accuracy costs, communication against computation: FedGMT Figure 4."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.monitor import Monitor
from ..errors import FedflatError
from ..experiments.compare import Mean, _mean, _method_name, describe, first_reached
from .footnote import noted
from .lines import cost_named, spent, with_unit
from .style import MARKERS, legend_above, look, panels, pen
from .trials import Runs, Trials, gather, monitored_by_all, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SHORT = {"rounds": "rounds", "bytes": "traffic", "passes": "passes", "seconds": "time"}
WIDE = 10
"""Ratio of the highest to the lowest cost from which the axis is logarithmic."""


@dataclass(frozen=True)
class Reached:
    """What one experiment spent until its test accuracy first reached the target; means over the seeds that did."""

    method: str
    setting: str
    """what else its name says"""
    x: Mean
    y: Mean
    seeds: int
    of: int


@noted
def cost_to_target(
    runs: Runs,
    target: float | None = None,
    computation: str = "seconds",
    communication: str = "bytes",
    width: str = "one",
) -> Figure:
    """Computation across, communication up, until the test accuracy first reaches the target.

    A method's experiments, such as its partitions, are joined by a line, with a marker for each partition; bars are
    the deviation over seeds. A hollow marker has seeds that did not get there; experiments none of whose seeds did
    are named below. Without a target it is the highest whole per cent that all runs reach.
    """
    every = gather(runs)
    monitor = monitored_by_all(every)
    if target is None:
        target = _reached_by_all(every, monitor)
    if monitor.share and not 0 < target <= 1:
        raise FedflatError(f"target={target}: give {with_article(monitor)} as a fraction, such as 0.8.")
    found = [_reached(trials, target, computation, communication) for trials in every]
    there = [one for one in found if one.seeds]
    if not there:
        easier = "lower" if monitor.larger_is_better else "higher"
        raise FedflatError(
            f"No run reaches {with_article(monitor)} of {monitor.goal(target)}; give a {easier} target."
        )
    methods = list(dict.fromkeys(one.method for one in there))
    settings = sorted({one.setting for one in there}, key=_by_number)
    there.sort(key=lambda one: settings.index(one.setting))
    with look():
        figure, (axes,) = panels(1, width, 2.4)
        per = []
        for axis, name in (("x", computation), ("y", communication)):
            costs = [getattr(one, axis)[0] for one in there]
            divisor, unit = cost_named(name).unit(max(costs))
            per.append(divisor)
            getattr(axes, f"set_{axis}label")(
                with_unit(f"{SHORT[name]} to {monitor.goal(target)} {monitor.title}", unit)
            )
            wide = max(costs) >= WIDE * min(costs)
            getattr(axes, f"set_{axis}scale")("log" if wide else "linear")
        for number, method in enumerate(methods):
            _draw(axes, number, [one for one in there if one.method == method], per, settings)
        axes.margins(0.08)
        if len(settings) > 1:
            for number, setting in enumerate(settings):
                axes.plot([], [], MARKERS[number % len(MARKERS)], color="#777777", label=setting)
        legend_above(figure, [axes])
        lost = [" ".join([one.method, one.setting]).strip() for one in found if not one.seeds]
        if lost:
            text = textwrap.fill(f"not reached: {', '.join(lost)}", 70 if width == "one" else 150)
            figure.supxlabel(text, fontsize=6, color="#555555")
    return figure


def with_article(monitor: Monitor) -> str:
    """The metric's name in a sentence: an accuracy, an AUROC, a mean squared error."""
    return f"{'an' if monitor.title[0] in 'aAF' else 'a'} {monitor.title}"


def _reached_by_all(trials: Sequence[Trials], monitor: Monitor) -> float:
    histories = [[monitor.of(row) for row in history] for one in trials for history in one.histories]
    tested = [[value for value in history if value is not None] for history in histories]
    best = [monitor.best(history) for history in tested if history]  # a run that has just begun has none
    if not monitor.share and best:
        return min(best) if monitor.larger_is_better else max(best)
    lowest = 100 * min(best, default=0.0)
    whole = math.floor(lowest + 1e-9)  # 0.57 is 57 %, though 100 * 0.57 is a little less
    if whole < 1:
        raise FedflatError(f"No {monitor.title} is reached by all runs: give a target, such as 0.8.")
    return whole / 100


def _by_number(setting: str) -> tuple[list[float], str]:
    """`alpha=0.1` before `alpha=1`."""
    return [float(number) for number in re.findall(r"(?<==)-?\d+(?:\.\d+)?(?:e-?\d+)?", setting)], setting


def _reached(trials: Trials, target: float, computation: str, communication: str) -> Reached:
    x: list[float] = []
    y: list[float] = []
    for history in trials.histories:
        first = first_reached(list(history), target, trials.monitor)
        if first is None:
            continue
        position = next(number for number, row in enumerate(history) if row["index"] == first)
        x.append(float(spent(history, computation)[position]))
        y.append(float(spent(history, communication)[position]))
    method = written(_method_name(describe(trials.places[0]).get("method"))) if trials.places else trials.name
    if not trials.name.startswith(method):
        method = trials.name  # the person's own name
    setting = trials.name.removeprefix(method).strip()
    return Reached(method, setting, _mean(x), _mean(y), len(x), len(trials.histories))


def _draw(
    axes: Axes, number: int, points: Sequence[Reached], per: Sequence[float], settings: Sequence[str]
) -> None:
    """One method: its line, and a marker for each of its experiments, by setting where there are several."""
    look = pen(number)
    shape = look.pop("marker")
    x, y = ([getattr(one, axis)[0] / unit for one in points] for axis, unit in zip("xy", per, strict=True))
    shown = {} if len(settings) > 1 else {"marker": shape}
    axes.plot(x, y, label=points[0].method, **look, **shown)
    for one, across, up in zip(points, x, y, strict=True):
        spread = [(getattr(one, axis)[1] or 0.0) / unit for axis, unit in zip("xy", per, strict=True)]
        if any(spread):
            axes.errorbar(across, up, spread[1], spread[0], color=look["color"], linewidth=0.7, capsize=1.5)
        marker = MARKERS[settings.index(one.setting) % len(MARKERS)] if len(settings) > 1 else shape
        full = one.seeds == one.of
        axes.plot(
            across,
            up,
            marker,
            markersize=4.5,
            markerfacecolor=look["color"] if full else "white",
            markeredgecolor="white" if full else look["color"],
            markeredgewidth=0.4 if full else 0.8,
            zorder=3,
        )
