"""The numbers that papers print of a run, each from the run's rows, by the kind that a preset names."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import FedflatError
from .presets import PaperCell
from .sweep import Cell

EARLY = 100
"""Rounds that do not count for the low tenth."""
OF_ACCURACY = ("mean", "max", "accuracy", "final", "low-tenth")
"""Kinds in whose place a person may choose another."""
Rows = Sequence[Mapping[str, Any]]
"""A run's rounds, as in its metrics.jsonl."""


class Number(NamedTuple):
    """A statistic of one run, in the cell's unit."""

    value: float | None
    """None where the run does not have it"""
    name: str
    deviation: float | None = None
    """over the rounds of a mean"""
    note: str = ""
    """in the place of a value, such as >500"""


def statistic(cell: PaperCell, rows: Rows) -> Number:
    """The cell's statistic of a run."""
    found = KINDS[cell.statistic["kind"]](cell, rows)
    group = cell.statistic.get("group")
    return found if group is None else found._replace(name=f"{found.name}, {group}")


# -- accuracy --------------------------------------------------------------------------------------


def _accuracies(cell: PaperCell, rows: Rows) -> list[float]:
    """In the cell's unit, of one user or domain and of the last rounds where the statistic is about these."""
    scale = 100.0 if cell.unit == "percent" else 1.0
    group = cell.statistic.get("group")
    found = [
        row.get("accuracy") if group is None else (row.get("accuracy_by_group") or {}).get(group)
        for row in rows
    ]
    values = [scale * accuracy for accuracy in found if accuracy is not None]
    return values[-int(cell.statistic.get("last", len(values))) :]


def _mean(cell: PaperCell, rows: Rows) -> Number:
    values = _accuracies(cell, rows)
    return Number(
        _of(statistics.fmean, values), f"mean of the last {len(values)}", _spread(cell.statistic, values)
    )


def _deviation(cell: PaperCell, rows: Rows) -> Number:
    values = _accuracies(cell, rows)
    return Number(_spread(cell.statistic, values), f"deviation of the last {len(values)}")


def _spread(how: Mapping[str, Any], values: list[float]) -> float | None:
    """The standard deviation, of a sample unless the paper's is of the population."""
    if len(values) < 2:
        return None
    return statistics.pstdev(values) if how.get("population") else statistics.stdev(values)


def _maximum(cell: PaperCell, rows: Rows) -> Number:
    last = cell.statistic.get("last")
    return Number(
        _of(max, _accuracies(cell, rows)), "maximum" if last is None else f"maximum of the last {last}"
    )


def _final(cell: PaperCell, rows: Rows) -> Number:
    return Number(_of(lambda values: values[-1], _accuracies(cell, rows)), "final")


def _low_tenth(cell: PaperCell, rows: Rows) -> Number:
    """What nine tenths of the later tests exceed: how low accuracies fall that go up and down."""
    values = _accuracies(cell, [row for row in rows if row["index"] >= EARLY])
    low = statistics.quantiles(values, n=10, method="inclusive")[0] if len(values) > 1 else None
    return Number(low, f"low tenth from round {EARLY + 1} on")


def _figure(cell: PaperCell, rows: Rows) -> Number:
    """Figures show more than a number: beside them the final accuracy, in the cell's row of the table."""
    values = [row["accuracy"] for row in rows if row.get("accuracy") is not None]
    return Number(_of(lambda found: found[-1], values), "final accuracy")


def _of(what: Callable[[list[float]], float], values: list[float]) -> float | None:
    return what(values) if values else None


# -- until an accuracy is reached ------------------------------------------------------------------


def _until(cell: PaperCell, rows: Rows) -> list[Mapping[str, Any]] | None:
    """The rounds up to the first that reaches the target; None if none does."""
    for number, row in enumerate(rows, start=1):
        if cell.target is not None and (row.get("accuracy") or 0.0) >= cell.target:
            return list(rows[:number])
    return None


def _reaching(what: str, measure: Callable[[Rows], float]) -> Callable[[PaperCell, Rows], Number]:
    def found(cell: PaperCell, rows: Rows) -> Number:
        goal = cell.target if cell.target is not None else f"{cell.statistic.get('target_of')}'s accuracy"
        name, reached = f"{what} to {goal}", _until(cell, rows)
        if cell.target is None:
            return Number(None, name, note=f"needs {cell.statistic.get('target_of')}")
        if reached is None:
            return Number(None, name, note=f">{measure(rows):.4g}")
        return Number(measure(reached), name)

    return found


def _transmissions(row: Mapping[str, Any], which: Sequence[str] = ("up", "down")) -> float:
    """Vectors as long as the model, per client."""
    sent: int = sum(row[f"vectors_{way}"] for way in which)
    return sent / max(1, len(row["clients"]))


# -- others ----------------------------------------------------------------------------------------


def _per_round(cell: PaperCell, rows: Rows) -> Number:
    """From the second round on what a method sends is complete."""
    which = {"upload": ("up",), "download": ("down",)}.get(cell.statistic.get("of", ""), ("up", "down"))
    return Number(_transmissions(rows[-1], which) if rows else None, "models sent per client and round")


def _seconds(cell: PaperCell, rows: Rows) -> Number:
    return Number(_of(statistics.median, [row["seconds"] for row in rows]), "seconds a round")


def _recorded(cell: PaperCell, rows: Rows) -> Number:
    """A measure of flatness, as it was last recorded."""
    name = str(cell.statistic["of"])
    return Number(next(_newest(rows, name), None), f"{name} at the end")


def _newest(rows: Rows, name: str) -> Iterator[float]:
    for row in reversed(rows):
        value = (row.get("measures") or {}).get(name)
        if value is not None:
            yield value


KINDS: dict[str, Callable[[PaperCell, Rows], Number]] = {
    "mean": _mean,
    "deviation": _deviation,
    "max": _maximum,
    "accuracy": _maximum,  # where a paper does not say what it reports, codes print the best
    "final": _final,
    "low-tenth": _low_tenth,
    "figure": _figure,
    "rounds-to": _reaching("rounds", len),
    "minutes-to": _reaching("minutes", lambda rows: sum(row["seconds"] for row in rows) / 60),
    "transmissions-to": _reaching("hundred models", lambda rows: sum(map(_transmissions, rows)) / 100),
    "transmissions": _per_round,
    "seconds": _seconds,
    "recorded": _recorded,
}
"""By the name in a preset: `{kind: mean, last: 50}`. Beside the kind, `group: NAME` is about the accuracy on the test
samples of that user or domain; `relative_to: ROW` divides by that row's number and `gain_over: ROW` subtracts it, in
points; `deviation: rounds` says what the paper's ± is over, `population: true` that it is the population's;
`target_of: ROW` is a target that is that row's own mean of the `last` tests."""


# -- chosen by a person ----------------------------------------------------------------------------


def parse_statistic(text: str) -> dict[str, Any]:
    """From the command line: max, last, mean:50 or low-tenth."""
    name, colon, number = text.strip().lower().partition(":")
    kinds = {"max": "max", "last": "final", "low-tenth": "low-tenth"}
    if name in kinds and not colon:
        return {"kind": kinds[name]}
    if name == "mean" and number.isdecimal() and int(number) > 0:
        return {"kind": "mean", "last": int(number)}
    raise FedflatError(
        f"--statistic {text}: write max, last, mean:50 (of the last 50 tests) or low-tenth (what nine tenths of the "
        f"tests from round {EARLY + 1} on exceed)."
    )


def with_statistic(cells: Sequence[PaperCell], text: str) -> list[PaperCell]:
    """The cells with another statistic of the accuracy; those that are about something else as they are."""
    given = parse_statistic(text)
    if not any(cell.statistic["kind"] in OF_ACCURACY for cell in cells):
        raise FedflatError(f"--statistic {text}: none of these cells is an accuracy; leave it out.")
    kept = ("relative_to", "gain_over", "deviation", "group", "population")
    return [
        replace(cell, statistic={**{k: v for k, v in cell.statistic.items() if k in kept}, **given})
        if cell.statistic["kind"] in OF_ACCURACY
        else cell
        for cell in cells
    ]


def check_rounds(planned: Iterable[tuple[PaperCell, Sequence[Cell]]]) -> None:
    """Whether runs are long enough for their statistic."""
    for cell, runs in planned:
        for run in runs:
            rounds = run.experiment.with_defaults().rounds or 1
            if cell.statistic["kind"] == "low-tenth" and rounds < EARLY + 2:
                raise FedflatError(
                    f"The low tenth is of the tests from round {EARLY + 1} on, and {run.name} has {rounds} rounds: "
                    "choose another --statistic."
                )
