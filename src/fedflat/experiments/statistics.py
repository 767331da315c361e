"""The numbers that papers print of a run, each from the run's rows, by the kind that a preset names."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .presets import PaperCell

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
    return KINDS[cell.statistic["kind"]](cell, rows)


# -- accuracy --------------------------------------------------------------------------------------


def _accuracies(cell: PaperCell, rows: Rows) -> list[float]:
    """In the cell's unit, of the last rounds where the statistic is about these."""
    scale = 100.0 if cell.unit == "percent" else 1.0
    values = [scale * row["accuracy"] for row in rows if row.get("accuracy") is not None]
    return values[-int(cell.statistic.get("last", len(values))) :]


def _mean(cell: PaperCell, rows: Rows) -> Number:
    values = _accuracies(cell, rows)
    spread = statistics.stdev(values) if len(values) > 1 else None
    return Number(_of(statistics.fmean, values), f"mean of the last {len(values)}", spread)


def _deviation(cell: PaperCell, rows: Rows) -> Number:
    values = _accuracies(cell, rows)
    return Number(
        statistics.stdev(values) if len(values) > 1 else None, f"deviation of the last {len(values)}"
    )


def _maximum(cell: PaperCell, rows: Rows) -> Number:
    last = cell.statistic.get("last")
    return Number(
        _of(max, _accuracies(cell, rows)), "maximum" if last is None else f"maximum of the last {last}"
    )


def _final(cell: PaperCell, rows: Rows) -> Number:
    return Number(_of(lambda values: values[-1], _accuracies(cell, rows)), "final")


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
        name, reached = f"{what} to {cell.target}", _until(cell, rows)
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


def _none(cell: PaperCell, rows: Rows) -> Number:
    return Number(None, str(cell.statistic.get("of", "")))


KINDS: dict[str, Callable[[PaperCell, Rows], Number]] = {
    "mean": _mean,
    "deviation": _deviation,
    "max": _maximum,
    "accuracy": _maximum,  # where a paper does not say what it reports, codes print the best
    "final": _final,
    "figure": _figure,
    "rounds-to": _reaching("rounds", len),
    "minutes-to": _reaching("minutes", lambda rows: sum(row["seconds"] for row in rows) / 60),
    "transmissions-to": _reaching("hundred models", lambda rows: sum(map(_transmissions, rows)) / 100),
    "transmissions": _per_round,
    "seconds": _seconds,
    "recorded": _recorded,
    "other": _none,
}
"""By the name in a preset: `{kind: mean, last: 50}`. Beside the kind, `relative_to: ROW` divides by that row's number
and `gain_over: ROW` subtracts it, in points; `deviation: rounds` says what the paper's ± is over."""
