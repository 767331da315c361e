"""What is wrong with an experiment: every problem at once, with its line and the nearest name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from ..errors import FedflatError, nearest, shortened
from .schema import Experiment, LocalSection, RaySection

SECTIONS: dict[str, type[BaseModel]] = {"": Experiment, "local": LocalSection, "ray": RaySection}
"""Where unknown keys are looked up."""

Place = tuple[str | int, ...]
"""A key and its parents."""

Lines = Mapping[Place, int | None]
"""Where keys are in a file; None where a person changed them."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with a key."""

    place: Place
    sentence: str


class ExperimentError(FedflatError):
    """All that is wrong with an experiment."""

    def __init__(self, source: str, problems: Sequence[Problem], lines: Lines) -> None:
        self.problems = sorted(problems, key=lambda problem: _line(problem, lines) or 0)
        told = [_told(problem, lines) for problem in self.problems]
        head = f"{source} has {len(told)} problems:" if len(told) > 1 else f"{source}:"
        message = "\n  ".join([head, *told]) if len(told) > 1 else f"{head} {told[0]}"
        super().__init__(message)


def _told(problem: Problem, lines: Lines) -> str:
    line, name = _line(problem, lines), ".".join(map(str, problem.place))
    where = [f"line {line}"] if line is not None else []
    return f"{', '.join([*where, name] if name else where)}: {problem.sentence}".removeprefix(": ")


def _line(problem: Problem, lines: Lines) -> int | None:
    """The line of the key, or of what it is part of."""
    place = problem.place
    return next((lines[place[:n]] for n in range(len(place), 0, -1) if place[:n] in lines), None)


def schema_problems(error: ValidationError) -> list[Problem]:
    """One problem per place: alternatives of a key are one mistake, not several."""
    found: dict[Place, list[Any]] = {}
    for item in error.errors():
        place = item["loc"][:2] if item["loc"][0] in SECTIONS else item["loc"][:1]
        found.setdefault(place, []).append(item)
    return [Problem(place, _sentence(place, items)) for place, items in found.items()]


def _sentence(place: Place, items: list[Any]) -> str:
    first = items[0]
    if first["type"] == "extra_forbidden":
        section = SECTIONS[str(place[0]) if len(place) > 1 else ""]
        return f"there is no key of this name.{nearest(str(place[-1]), section.model_fields)}"
    name, given = place[-1], first["input"]
    kinds = {item["type"]: item.get("ctx", {}) for item in items}
    if "literal_error" in kinds and isinstance(given, str):
        known = re.findall(r"'([^']*)'", str(kinds["literal_error"]["expected"]))
        return f"{name}='{shortened(given)}' is not possible.{nearest(given, known)}"
    for kind, words in BOUNDS.items():
        if kind in kinds:
            bound = next(iter(kinds[kind].values()))
            limit = str(bound) if isinstance(bound, int) else f"{bound:g}"
            return f"{name} must be {words} {limit}, not {_shown(given)}."
    expected = list(dict.fromkeys(EXPECTED[kind] for kind in kinds if kind in EXPECTED))
    return f"{name} must be {' or '.join(expected) or 'something else'}, not {_shown(given)}."


def _shown(given: Any) -> str:
    """What a person gave; Python does not write numbers of thousands of digits."""
    try:
        return shortened(repr(given))
    except ValueError:
        return "a number of thousands of digits"


BOUNDS = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}
EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of keys and values",
    "literal_error": "'full'",
}
