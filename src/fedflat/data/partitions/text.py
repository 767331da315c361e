"""Partitions as text: `iid`, `dirichlet:0.1`, `longtail:2/dirichlet:0.1:chunked`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from ...errors import FedflatError, nearest, shortened
from .base import Partition
from .dirichlet import Dirichlet
from .even import IID, Quantity
from .long_tail import LongTail
from .natural import ByDomain, ByUser
from .pathological import Pathological

LONGEST = 1000
"""Characters of a partition's text."""


class _Spelling(NamedTuple):
    make: Callable[..., Partition]
    example: str
    number: Callable[[str], Any] | None = None
    has_form: bool = False


SPELLINGS = {
    "iid": _Spelling(IID, "iid"),
    "quantity": _Spelling(Quantity, "quantity:0.5", float),
    "dirichlet": _Spelling(Dirichlet, "dirichlet:0.1 or dirichlet:0.1:chunked", float, has_form=True),
    "hsu": _Spelling(partial(Dirichlet, form="hsu"), "hsu:0.5", float),
    "pathological": _Spelling(Pathological, "pathological:2 or pathological:3:prior", int, has_form=True),
    "by-user": _Spelling(ByUser, "by-user"),
    "by-domain": _Spelling(ByDomain, "by-domain"),
    "longtail": _Spelling(LongTail, "longtail:2/dirichlet:0.1", float),
}


def parse_partition(text: str) -> Partition:
    """A partition from its text: a name, its number and form after colons, and after `longtail` a slash and the next.

    For example `iid`, `dirichlet:0.1`, `dirichlet:0.1:chunked`, `hsu:0.5`, `pathological:2`, `pathological:3:prior`,
    `quantity:0.5`, `by-user`, `by-domain` or `longtail:2/dirichlet:0.1:chunked`. `str(partition)` writes it.
    """
    if len(text) > LONGEST:
        raise FedflatError(f"'{shortened(text)}' is too long for a partition.")
    head, slash, rest = text.strip().partition("/")
    name, *values = head.strip().split(":")
    if name not in SPELLINGS:
        raise FedflatError(f"There is no partition '{name}'.{nearest(name, SPELLINGS)}")
    spelling = SPELLINGS[name]
    arguments: list[Any] = list(values)
    try:
        if spelling.number is not None:
            arguments[0] = spelling.number(values[0])
        fits = len(values) <= (spelling.number is not None) + spelling.has_form
    except (ValueError, IndexError):
        fits = False
    if not fits or (slash and name != "longtail"):
        raise FedflatError(f"'{text}' is not a partition: write for example {spelling.example}.")
    if slash:
        arguments.append(parse_partition(rest))
    return spelling.make(*arguments)


def partition_from_parts(parts: Mapping[str, Any]) -> Partition:
    """A partition from a mapping as in a file: `{name: dirichlet, alpha: 0.1}`; `then` may be text or a mapping."""
    given = dict(parts)
    name = given.pop("name", None)
    if name not in SPELLINGS:
        raise FedflatError(f"There is no partition '{name}'.{nearest(str(name), SPELLINGS)}")
    make = SPELLINGS[name].make
    known = [p for p in inspect.signature(make).parameters if not (name == "hsu" and p == "form")]
    for key in given:
        if key not in known:
            hint = nearest(key, known) if known else " It has no parameters."
            raise FedflatError(f"The partition {name} has no '{key}'.{hint}")
    then = given.get("then")
    if then is not None:
        given["then"] = parse_partition(then) if isinstance(then, str) else partition_from_parts(then)
    try:
        return make(**given)
    except TypeError:
        missing = [p for p in known if p not in given]
        raise FedflatError(f"The partition {name} needs a value for '{missing[0]}'.") from None


def partition_parts(text: str) -> dict[str, Any]:
    """The mapping that stands for a partition's text."""
    partition = parse_partition(text)
    name = text.strip().partition("/")[0].split(":")[0]
    parts = {f.name: getattr(partition, f.name) for f in dataclasses.fields(partition)}  # type: ignore[arg-type]
    if name == "hsu":
        parts.pop("form")
    if "then" in parts:
        parts["then"] = str(parts["then"])
    return {"name": name, **parts}
