"""A run's rounds as columns of numbers, no more than a page can show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

POINTS = 1000
"""Rounds of a run that are drawn."""
DIGITS = 4
"""Of a measured number."""
AXIS_DIGITS = 7
"""Of a sum over rounds: neighbouring rounds must stay apart."""

Row = Mapping[str, Any]
Column = list[float | None]


def columns(rows: Sequence[Row]) -> dict[str, Any]:
    """The axes and series of a run: what it had used up after a round, and what was measured then."""
    kept = thinned(rows)
    return {
        "axes": {name: [column[n] for n in kept] for name, column in _axes(rows).items()},
        "series": _series([rows[n] for n in kept]),
        "thinned": len(kept) < len(rows),
    }


def thinned(rows: Sequence[Row], most: int = POINTS) -> list[int]:
    """The rounds to draw: all, or those with a test, evenly spaced, always with the last."""
    every = range(len(rows))
    if len(rows) <= most:
        return list(every)
    tested = [
        n
        for n in every
        if any(rows[n].get(key) is not None for key in ("accuracy", "loss")) or rows[n].get("measures")
    ]
    chosen = tested or list(every)
    step = math.ceil(len(chosen) / most)
    return sorted({*chosen[::-step]})


def _axes(rows: Sequence[Row]) -> dict[str, list[float]]:
    """What the rounds so far have cost, by the name of the axis."""

    def sums(*names: str) -> list[float]:
        totals = accumulate(sum(_number(row.get(name)) or 0 for name in names) for row in rows)
        return [rounded(total, AXIS_DIGITS) for total in totals]

    return {
        "rounds": [row["index"] + 1 for row in rows],
        "bytes": sums("bytes_down", "bytes_up"),
        "passes": sums("forward", "backward"),
        "seconds": sums("seconds"),
    }


def _series(rows: Sequence[Row]) -> dict[str, Column]:
    """What was measured, by name; a dot separates what is recorded as a group."""
    found = {
        "accuracy": [row.get("accuracy") for row in rows],
        "loss": [row.get("loss") for row in rows],
        "train_loss": [row.get("train_loss") for row in rows],
        "train_loss_std": [row.get("train_loss_std") for row in rows],
        "lr": [row.get("lr") for row in rows],
    }
    for group in ("client_accuracy", "accuracy_by_group", "measures", "scalars"):
        groups = [inner if isinstance(inner := row.get(group), dict) else {} for row in rows]
        for name in dict.fromkeys(name for inner in groups for name in inner):
            found[f"{group}.{name}"] = [inner.get(name) for inner in groups]
    held_out = [_mapping(row.get("validation")) for row in rows]
    tested: dict[str, list[Mapping[str, Any]]] = {
        "metrics": [_mapping(row.get("metrics")) for row in rows],
        "validation": [{**inner, **_mapping(inner.get("metrics"))} for inner in held_out],
    }
    for group, every in tested.items():
        for name in dict.fromkeys(
            name for inner in every for name, value in inner.items() if _number(value) is not None
        ):
            found[f"{group}.{name}"] = [inner.get(name) for inner in every]
    shown = {name: _column(values) for name, values in found.items()}
    return {name: column for name, column in shown.items() if any(value is not None for value in column)}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _column(values: Iterable[Any]) -> Column:
    return [None if (number := _number(value)) is None else rounded(number) for value in values]


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def rounded(value: float, digits: int = DIGITS) -> float:
    """A number with few digits, and without a point where it needs none."""
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def rounded_all(value: Any) -> Any:
    """Nested lists and mappings with all their numbers rounded; what is not finite is None."""
    if isinstance(value, Mapping):
        return {str(key): rounded_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded_all(item) for item in value]
    if isinstance(value, float):
        return rounded(value) if math.isfinite(value) else None
    return value
