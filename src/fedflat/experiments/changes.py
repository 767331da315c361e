"""A person's changes to an experiment, such as `local.lr=0.05`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import FedflatError
from .parsing import parse_value
from .problems import SECTIONS, Lines


def changed(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The content with other values, by dotted keys such as `local.lr`, `partition.alpha` or `method.rho`."""
    result: dict[str, Any] = copy.deepcopy(dict(content))
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        if parents == ["partition"]:
            result["partition"] = {**_partition_parts(result.get("partition", "dirichlet:0.1")), last: value}
            continue
        if parents == ["method"]:
            result["method"] = _with_parameter(result.get("method", "fedgmt"), last, value)
            continue
        section = result
        for parent in parents:
            inner = section.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise FedflatError(f"{dotted}: '{parent}' has no parts to set.")
            section = inner
        section[last] = value
    return result


def _partition_parts(given: Any) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    from ..data.partitions.text import partition_parts

    return partition_parts(str(given))


def _with_parameter(method: Any, name: str, value: Any) -> Any:
    """A method of one name with another parameter."""
    from ..methods.text import method_terms

    terms = method_terms(method)
    if len(terms) == 1:
        ((only, parameters),) = terms
        return {only: {**parameters, name: value}}
    raise FedflatError(
        f"method.{name}: the method is a composition; write the parameter there, such as "
        f"local-ascent({name}={value})."
    )


def unchanged(lines: Lines, changes: Iterable[str]) -> Lines:
    """The lines of what still is as in the file; what is changed has none."""
    for dotted in changes:
        parts = tuple(dotted.split("."))
        key = parts if parts[0] in SECTIONS else parts[:1]
        lines = {**{place: line for place, line in lines.items() if place[: len(key)] != key}, key: None}
    return lines


def split_values(text: str) -> list[Any]:
    """The values of a list such as `0.01,0.1,1`; a comma inside brackets does not separate."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    return [parse_value(part.strip()) for part in [*parts, current]]


def parse_changes(given: Iterable[str]) -> dict[str, str]:
    """`key=value` texts as a mapping of texts."""
    changes = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise FedflatError(f"--set {text}: write key=value, such as local.lr=0.05.")
        changes[key.strip()] = value.strip()
    return changes
