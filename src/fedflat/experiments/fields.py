"""Keys of experiment files, made from the fields of dataclasses."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model

from ..data.protocols import Protocol

MOST = 10**12
"""No count in a file is larger."""
LEFT_OPEN = {field.name for field in dataclasses.fields(Protocol)}
"""Keys without a default of their own: what is left out is what is usual for the dataset."""


def with_keys(base: type[BaseModel], *sources: type, several: str = "") -> Any:
    """A section of a file with a key for every field of some classes: its kind, its default and what it means.

    Where classes have a field in common but not its default, what is left out is None in a file. The key `several`
    may be a list: an experiment for each of its values.
    """
    found: dict[str, list[dataclasses.Field[Any]]] = {}
    for source in sources:
        for field in dataclasses.fields(source):
            found.setdefault(field.name, []).append(field)
    keys: dict[str, Any] = {}
    for name, alike in found.items():
        default, about = alike[0].default, alike[0].metadata["help"]
        kind = _kind(alike[0])
        if name == several:
            kind |= list[kind]  # type: ignore[valid-type]
            about += "; a list is one run for each"
        if name in LEFT_OPEN or any(other.default != default for other in alike):
            default = None
        if default is None:
            kind |= None
        default = list(default) if isinstance(default, tuple) else default
        keys[name] = (kind, Field(default=default, description=about))
    return create_model(f"{base.__name__}Keys", __base__=base, __module__=__name__, **keys)


def _kind(field: dataclasses.Field[Any]) -> Any:
    """What a key may be, with its range."""
    facts = field.metadata
    if "words" in facts:
        return Literal[facts["words"]]
    if "entries" in facts:
        return list[str | dict[str, Any]]
    if "bounds" not in facts:
        return bool if field.type == "bool" else Annotated[str, Field(pattern=facts["pattern"] or None)]
    bounds, whole = facts["bounds"], facts["whole"]
    most = bounds["at most"] if bounds["at most"] is not None or not whole else MOST
    limits: dict[str, Any] = {
        "ge": bounds["at least"],
        "gt": bounds["above"],
        "le": most,
        "lt": bounds["below"],
        "allow_inf_nan": None if whole else False,
    }
    exact: Any = Field(strict=True, **{name: limit for name, limit in limits.items() if limit is not None})
    kind: Any = Annotated[int if whole else float, exact]
    if "pattern" in facts:
        kind |= Annotated[str, Field(pattern=facts["pattern"])]
    if isinstance(facts["optional"], str):
        kind |= Literal[facts["optional"]]
    return kind | dict[str, kind] if facts["by_name"] else kind
