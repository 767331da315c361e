"""Reading metrics.jsonl, one row per round: the mark of a crash is repaired, damage is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import FedflatError, explained

MOST = 1e15
"""A bound on seconds, steps and bytes that no run reaches."""


class Row(dict[str, Any]):
    """The row of one round; a missing key is an error that names the file and the round."""

    def __init__(self, content: Mapping[str, Any], file: Path) -> None:
        super().__init__(content)
        self.file = file

    def __missing__(self, key: str) -> Any:
        raise FedflatError(f"{self.file}: round {self.get('index')} has no '{key}'; was it edited?")

    def copy(self) -> Row:
        """Return a copy to change."""
        return Row(self, self.file)


def read_metrics(path: str | Path) -> list[Row]:
    """Read the rows of a run. A last line that a crash cut off and repeated lines are left out.

    Any other damage is an error: its numbers could not be trusted.
    """
    file = Path(path) / "metrics.jsonl"
    with explained(f"{file} cannot be read"):
        lines = file.read_bytes().splitlines()
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            found = read_json(line)
        except ValueError:
            if number < len(lines):
                raise FedflatError(f"{file}, line {number}, is not JSON; was it edited?") from None
            break
        place = f"{file}, line {number}"
        fault = _fault(found)
        if fault is not None:
            raise FedflatError(f"{place}, is no round: {fault}. Was it edited?")
        index = found["index"]
        if index < len(rows):
            if rows[index] == found:
                continue
            raise FedflatError(
                f"{place}, has round {index} once more, with other numbers; remove one of the two."
            )
        if index > len(rows):
            raise FedflatError(
                f"{place}, is round {index}, not {len(rows)}; lines were removed. Put them back."
            )
        rows.append(Row(found, file))
    return rows


def read_json(text: bytes | str) -> Any:
    """Parse JSON, without NaN and infinity, which are not part of it; a ValueError if that fails."""
    try:
        return json.loads(text, parse_constant=_refused, parse_float=_finite_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refused(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _finite_number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refused(text)


# -- checks of a row's values ------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1.7e308


def _is_amount(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= MOST


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _or_none(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


def _mapping_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_right, value.values()))


def _is_spread(value: Any) -> bool:
    return _mapping_of(_is_number)(value) and "worst_decile" in value


def _is_report(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    clients = value.get("clients", {})
    numbers = {name: number for name, number in value.items() if name != "clients"}
    of_clients = _mapping_of(_mapping_of(_or_none(_is_number)))
    return _mapping_of(_or_none(_is_number))(numbers) and of_clients(clients)


def _is_value(value: Any) -> bool:
    """Whether it may be the value of a metric: a number, or lists and mappings of them."""
    if isinstance(value, list | dict):
        return all(map(_is_value, value.values() if isinstance(value, dict) else value))
    return value is None or _is_number(value)


def _are_clients(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(client, int) for client in value)


def _are_sentences(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(sentence, str) for sentence in value)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "clients": _are_clients,
    "accuracy": _or_none(_is_share),
    **dict.fromkeys(("loss", "train_loss", "train_loss_std"), _or_none(_is_number)),
    "client_accuracy": _or_none(_is_spread),
    "accuracy_by_group": _or_none(_mapping_of(_or_none(_is_share))),
    "metrics": lambda value: isinstance(value, dict) and _is_value(value),
    "validation": _or_none(lambda value: isinstance(value, dict) and _is_value(value)),
    "reported": _or_none(_is_report),
    **dict.fromkeys(("rejected", "clipped"), _are_sentences),
    "undone": _or_none(lambda value: isinstance(value, str)),
    **dict.fromkeys(("steps", "forward", "backward", "spared_forward", "spared_backward"), _is_amount),
    **dict.fromkeys(("vectors_down", "vectors_up", "bytes_down", "bytes_up", "seconds"), _is_amount),
    "lr": _is_number,
    **dict.fromkeys(("scalars", "measures"), _mapping_of(_or_none(_is_number))),
}
"""Checks by key; a key may be missing."""


def _fault(row: Any) -> str | None:
    """Say why a value is not the row of a round; None if it is."""
    if not isinstance(row, dict):
        return "it is no list of names and values"
    index = row.get("index")
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        return "it does not say which"
    wrong = next(
        (name for name, is_right in _CHECKS.items() if name in row and not is_right(row[name])), None
    )
    return None if wrong is None else f"its '{wrong}' cannot be {_shortened(row[wrong])}"


def _shortened(value: Any, most: int = 60) -> str:
    text = json.dumps(value)
    return text if len(text) <= most else f"{text[:most]} ..."
