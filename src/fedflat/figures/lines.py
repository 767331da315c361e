"""Lines over the course of training: one per experiment, smoothed, the mean over seeds with a band."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FedflatError, nearest
from .style import pen, sparse
from .trials import History, Trials

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Value = Callable[[Mapping[str, Any]], float | None]
"""A number of a round's row, if it has it."""


def recorded(name: str, *columns: str) -> Value:
    """A number by name among a row's `measures`, or another column of numbers."""

    def value(row: Mapping[str, Any]) -> float | None:
        found: dict[str, float | None] = {}
        for column in columns or ("measures",):
            found |= row.get(column) or {}
        return found.get(name)

    return value


@dataclass(frozen=True)
class Line:
    """What is drawn of one experiment."""

    name: str
    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    """the band, where there is one"""


@dataclass(frozen=True)
class Cost:
    """What training costs, summed over rounds."""

    noun: str
    of: Value
    units: tuple[tuple[float, float, str], ...] = ((0, 1, ""),)
    """from which number on, divided by what, and its name; the smallest first"""

    def unit(self, most: float) -> tuple[float, str]:
        """What to divide by, and the name of that unit, if the largest value is this."""
        fitting = [unit for unit in self.units if most >= unit[0]] or [self.units[0]]
        return fitting[-1][1:]


COSTS = {
    "rounds": Cost("round", lambda row: 1.0),
    "bytes": Cost(
        "traffic down and up",
        lambda row: (row.get("bytes_down") or 0) + (row.get("bytes_up") or 0),
        ((0, 1e6, "MB"), (2e9, 1e9, "GB"), (2e12, 1e12, "TB")),
    ),
    "passes": Cost(
        "forward and backward passes",
        lambda row: (row.get("forward") or 0) + (row.get("backward") or 0),
        ((0, 1, ""), (2e4, 1e3, "thousands"), (2e7, 1e6, "millions")),
    ),
    "seconds": Cost(
        "training time",
        lambda row: row.get("seconds"),
        ((0, 1, "seconds"), (300, 60, "minutes"), (3 * 3600, 3600, "hours")),
    ),
}
"""What a curve can be drawn against."""


def with_unit(text: str, unit: str) -> str:
    """What an axis says."""
    return f"{text} ({unit})" if unit else text


def cost_named(name: str) -> Cost:
    """One of them."""
    if name not in COSTS:
        raise FedflatError(f"Nothing can be drawn against '{name}'.{nearest(name, COSTS)}")
    return COSTS[name]


def spent(history: History, name: str) -> np.ndarray:
    """A cost from the first round up to each one."""
    of = cost_named(name).of
    return np.cumsum([float(of(row) or 0.0) for row in history])


def smoothed(values: Sequence[float] | np.ndarray, last: int) -> np.ndarray:
    """At every place the mean of the last values, of fewer at the beginning.

    The end is then what `fedflat compare --last` prints.
    """
    if last < 1:
        raise FedflatError(f"smooth={last}: give at least 1, the number of values to take the mean of.")
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - last, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def line_of(trials: Trials, value: Value, against: str = "rounds", smooth: int = 1) -> Line | None:
    """The mean over seeds, with their deviation as band if there are several; None where there is no value.

    Seeds meet in the rounds for which all of them have a value; costs are the mean over seeds too.
    """
    found = [_points(history, value, against, smooth) for history in trials.histories]
    found = [points for points in found if points]
    if not found:
        return None
    rounds = sorted(set.intersection(*(set(points) for points in found)))
    if not rounds:
        raise FedflatError(f"The seeds of {trials.name} have no round in common; draw them one by one.")
    both = np.array([[points[index] for index in rounds] for points in found])
    x, values = both[..., 0].mean(axis=0), both[..., 1]
    mean = values.mean(axis=0)
    if len(found) == 1:
        return Line(trials.name, x, mean)
    deviation = values.std(axis=0, ddof=1)
    return Line(trials.name, x, mean, mean - deviation, mean + deviation)


def _points(history: History, value: Value, against: str, smooth: int) -> dict[int, tuple[float, float]]:
    """By round: what was spent until then, and the smoothed value."""
    costs = spent(history, against)
    having = [
        (number, float(given))
        for number, row in enumerate(history)
        if (given := value(row)) is not None and math.isfinite(given)
    ]
    if not having:
        return {}
    values = smoothed([given for _, given in having], smooth)
    return {
        int(history[number]["index"]): (float(costs[number]), float(one))
        for (number, _), one in zip(having, values, strict=True)
    }


def draw_lines(axes: Axes, lines: Sequence[Line | None], per: float = 1.0, scale: float = 1.0) -> None:
    """Draw lines into a panel, x divided by `per` and y times `scale`; None leaves its colour to the others."""
    for number, line in enumerate(lines):
        if line is None:
            continue
        x = line.x / per
        look = pen(number)
        axes.plot(x, scale * line.mean, label=line.name, markevery=sparse(len(x), number), **look)
        if line.low is not None and line.high is not None:
            axes.fill_between(
                x, scale * line.low, scale * line.high, color=look["color"], alpha=0.18, linewidth=0
            )
    axes.margins(x=0.02)


def draw_against(
    axes: Axes, lines: Sequence[Line | None], against: str, label: str, scale: float = 1.0
) -> None:
    """Draw lines over a cost, in the unit that suits it, and name the axes."""
    most = max(float(line.x.max()) for line in lines if line is not None)
    cost = cost_named(against)
    per, unit = cost.unit(most)
    draw_lines(axes, lines, per, scale)
    axes.set(xlabel=with_unit(cost.noun, unit), ylabel=label)
    if against == "rounds":
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
