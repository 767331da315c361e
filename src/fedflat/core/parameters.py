"""Hyper-parameters that say what values they take."""

from __future__ import annotations

import dataclasses
import math
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
    optional: bool = False,
    whole: bool = False,
) -> Any:
    """A numeric hyper-parameter with its range, checked when the mechanism is built."""
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    facts = {"bounds": bounds, "optional": optional, "whole": whole}
    return dataclasses.field(default=default, metadata=facts)


def choice(*words: str, default: str) -> Any:
    """A hyper-parameter that is one of a few words."""
    return dataclasses.field(default=default, metadata={"words": words})


_HOLDS = {
    "at least": lambda value, bound: value >= bound,
    "above": lambda value, bound: value > bound,
    "at most": lambda value, bound: value <= bound,
    "below": lambda value, bound: value < bound,
}


def check_parameters(thing: Any, label: str) -> None:
    """Hold every field against what was declared: `number`, `choice`, or a plain switch."""
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        words, bounds = field.metadata.get("words"), field.metadata.get("bounds")
        if words is not None and value not in words:
            listed = " or ".join(repr(word) for word in words)
            raise FedflatError(f"{label}: {field.name} must be {listed}, not {value!r}.")
        if field.type in ("bool", bool) and not isinstance(value, bool):
            raise FedflatError(f"{label}: {field.name} must be True or False, not {value!r}.")
        if bounds is None or (value is None and field.metadata["optional"]):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FedflatError(f"{label}: {field.name} must be a number, not {value!r}.")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise FedflatError(f"{label}: {field.name} must be at most {LARGEST:g}.")
        if math.isinf(value):
            kind = "a whole" if field.metadata["whole"] else "a finite"
            raise FedflatError(f"{label}: {field.name} must be {kind} number, not {value!r}.")
        wrong = [k for k, b in bounds.items() if b is not None and not _HOLDS[k](value, b)]
        if wrong:
            ranges = " and ".join(f"{k} {b:g}" for k, b in bounds.items() if b is not None)
            raise FedflatError(f"{label}: {field.name} must be {ranges}, not {value:g}.")
        if field.metadata["whole"]:
            if value != int(value):
                raise FedflatError(f"{label}: {field.name} must be a whole number, not {value:g}.")
            object.__setattr__(thing, field.name, int(value))
