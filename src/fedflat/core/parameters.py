"""Parameters that know their range."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from ..errors import FedflatError

LARGEST = 10**300
"""What a whole number may be: beyond it there is no floating-point number."""


def number(
    *,
    default: float | object | None = dataclasses.MISSING,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    optional: bool | str = False,
    whole: bool = False,
    pattern: str = "",
    by_name: bool = False,
    help: str = "",
) -> Any:
    """A numeric parameter with its range, checked when its class is built.

    Args:
        default: where it is left out.
        at_least: the smallest value.
        above: what every value exceeds.
        at_most: the largest value.
        below: what no value reaches.
        optional: whether it may be None; a word is how files and options write None.
        whole: whether it is a whole number.
        pattern: of texts that stand for a number, as `2GiB` does; whoever reads them checks more.
        by_name: whether a mapping may give one to every name.
        help: what it means, as a clause.
    """
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    facts = {"bounds": bounds, "optional": optional, "whole": whole, "by_name": by_name, "help": help}
    return dataclasses.field(default=default, metadata={**facts, **({"pattern": pattern} if pattern else {})})


def choice(*words: str, default: str, help: str = "") -> Any:
    """A parameter that is one of a few words."""
    return dataclasses.field(default=default, metadata={"words": words, "help": help})


def flag(*, default: bool, help: str = "") -> Any:
    """A parameter that is true or false."""
    return dataclasses.field(default=default, metadata={"help": help})


def text(*, default: str, pattern: str = "", help: str = "") -> Any:
    """A parameter that is text; whoever reads it checks more than the pattern that files are held against."""
    return dataclasses.field(default=default, metadata={"pattern": pattern, "help": help})


def entries(*, option: str = "", help: str = "") -> Any:
    """A parameter that is a list, by default empty, of names or of `{name: {setting: value}}`.

    `option` is what one entry is called on the command line, if not as the list is.
    """
    return dataclasses.field(default=(), metadata={"entries": True, "option": option, "help": help})


_HOLDS = {
    "at least": lambda value, bound: value >= bound,
    "above": lambda value, bound: value > bound,
    "at most": lambda value, bound: value <= bound,
    "below": lambda value, bound: value < bound,
}


def check_parameters(thing: Any, label: str) -> None:
    """Hold every field against what was declared: `number`, `choice`, or a plain switch."""
    for field in dataclasses.fields(thing):
        value, facts = getattr(thing, field.name), field.metadata
        if "words" in facts and value not in facts["words"]:
            listed = " or ".join(repr(word) for word in facts["words"])
            raise FedflatError(f"{label}: {field.name} must be {listed}, not {value!r}.")
        if field.type in ("bool", bool) and not isinstance(value, bool):
            raise FedflatError(f"{label}: {field.name} must be True or False, not {value!r}.")
        if "entries" in facts and (isinstance(value, str) or not isinstance(value, Sequence)):
            raise FedflatError(f"{label}: {field.name} must be a list, not {value!r}.")
        if "bounds" not in facts or (value is None and facts["optional"]):
            continue
        for one in value.values() if facts["by_name"] and isinstance(value, Mapping) else (value,):
            if not (isinstance(one, str) and "pattern" in facts):
                _check_number(one, field, label)
        if facts["whole"]:
            object.__setattr__(thing, field.name, int(value))


def _check_number(value: Any, field: dataclasses.Field[Any], label: str) -> None:
    facts, is_number = field.metadata, isinstance(value, Real)
    if isinstance(value, bool) or not is_number:
        raise FedflatError(f"{label}: {field.name} must be a number, not {value!r}.")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise FedflatError(f"{label}: {field.name} must be at most {LARGEST:g}.")
    if math.isinf(value):
        kind = "a whole" if facts["whole"] else "a finite"
        raise FedflatError(f"{label}: {field.name} must be {kind} number, not {value!r}.")
    bounds = {words: bound for words, bound in facts["bounds"].items() if bound is not None}
    if not all(_HOLDS[words](value, bound) for words, bound in bounds.items()):
        ranges = " and ".join(f"{words} {bound:g}" for words, bound in bounds.items())
        raise FedflatError(f"{label}: {field.name} must be {ranges}, not {value:g}.")
    if facts["whole"] and value != int(value):
        raise FedflatError(f"{label}: {field.name} must be a whole number, not {value:g}.")
