"""What a mechanism's hooks must be like: a slip is a sentence, not a silent change of the method."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from typing import Any

from torch import Tensor

from ..errors import FedflatError

CLOSE = 0.8
"""How alike a function's name and a hook's must be to be taken for a misspelt one."""


class FrozenMechanism(FedflatError, FrozenInstanceError):
    """Somebody wanted to keep something in a mechanism."""


# -- when a class is written -----------------------------------------------------------------------


def check_class(kind: type, base: type) -> None:
    """Whether a new mechanism's hooks exist and take what they are given, and its parameters are fields."""
    hooks = {name: hook for name, hook in vars(base).items() if inspect.isfunction(hook) and name[0] != "_"}
    fields = inspect.get_annotations(kind)
    if "__init__" in vars(kind):
        raise FedflatError(
            f"{kind.__name__} has an __init__; write its parameters as fields instead, such as "
            "rho: float = number(default=0.1, at_least=0)."
        )
    for name, value in vars(kind).items():
        if name in hooks:
            _check_arguments(kind, name, value, hooks[name])
        elif name[0] == "_" or name == "name":
            continue
        elif inspect.isfunction(value):
            if close := difflib.get_close_matches(name, hooks, n=1, cutoff=CLOSE):
                raise FedflatError(
                    f"{kind.__name__}.{name}: there is no such hook. Did you mean '{close[0]}'? A function of "
                    f"your own that is called so begins with an underscore: _{name}."
                )
        elif isinstance(value, int | float | str) and name not in fields and name.islower():
            raise FedflatError(
                f"{kind.__name__}.{name} has no type and would be no parameter; write {name}: "
                f"{type(value).__name__} = {value!r}, or {name.upper()} if it is a constant."
            )


def _check_arguments(kind: type, name: str, given: object, hook: Any) -> None:
    if not inspect.isfunction(given):
        return
    wanted = list(inspect.signature(hook).parameters)
    parameters = inspect.signature(given).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return
    needed = [p for p in parameters if p.default is p.empty]
    if not len(needed) <= len(wanted) <= len(parameters):
        raise FedflatError(
            f"{kind.__name__}.{name}({', '.join(p.name for p in parameters)}) is called with other arguments: "
            f"write {name}({', '.join(wanted)})."
        )


def refuse_change(self: Any, name: str, value: object) -> None:
    """In the place of `__setattr__`: the same mechanism serves all clients, in any order and process."""
    raise FrozenMechanism(
        f"{self.name}: a mechanism does not change once it is made, so self.{name} cannot be set. What a client "
        "keeps goes into local.state, what a round needs into local.memo[self], what the server keeps is named by "
        "server_state."
    )


# -- what hooks return -----------------------------------------------------------------------------


def in_place(mechanism: Any, hook: str, remedy: str, *arguments: object) -> None:
    """Call a hook that changes what it is given."""
    if getattr(mechanism, hook)(*arguments) is not None:
        raise FedflatError(f"{mechanism.name}: what {hook} returns is not used; {remedy}.")


def vector_like(mechanism: Any, hook: str, returned: object, w: Tensor) -> Tensor:
    """For hooks that return a vector as long as the model."""
    if isinstance(returned, Tensor) and returned.shape == w.shape:
        return returned
    size = "" if returned is None else f" of {len(w):,} numbers"
    raise FedflatError(
        f"{mechanism.name}: {hook} returns {_described(returned)}; it must return a vector{size}."
    )


def one_move(mechanism: Any, returned: object, w: Tensor) -> Any:
    """For a move that is alike in every step; None is none."""
    match returned:
        case None:
            return None
        case (Tensor(shape=w.shape), int() | float()):
            return returned
    raise FedflatError(
        f"{mechanism.name}: steady_shift returns {_described(returned)}; it must return a vector and its "
        "scale, such as (local.received['momentum'], 0.9), or None."
    )


def one_per_output(mechanism: Any, returned: object, outputs: Tensor) -> tuple[Tensor, float]:
    """For the gradient of a term of the loss: a tensor and what it is to be multiplied by."""
    scale = 1.0
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], int | float):
        returned, scale = returned
    if isinstance(returned, Tensor) and returned.shape == outputs.shape:
        return returned, scale
    raise FedflatError(
        f"{mechanism.name}: loss_gradient returns {_described(returned)}; it must return a tensor of the outputs' "
        f"shape {tuple(outputs.shape)}, or a pair of such a tensor and a number."
    )


def one_number(mechanism: Any, returned: object) -> Any:
    """For a term of the loss."""
    if isinstance(returned, int | float) or (isinstance(returned, Tensor) and returned.numel() == 1):
        return returned
    raise FedflatError(
        f"{mechanism.name}: loss returns {_described(returned)}; it must return one number, such as a mean."
    )


def named(mechanism: Any, hook: str, returned: object) -> Mapping[str, Any]:
    """For hooks that return things by name; None is none."""
    if returned is None:
        return {}
    if isinstance(returned, Mapping):
        return returned
    raise FedflatError(
        f'{mechanism.name}: {hook} returns {_described(returned)}; it must return a mapping, such as {{"m": ...}}.'
    )


def _described(returned: object) -> str:
    if isinstance(returned, Tensor):
        return f"a tensor of shape {tuple(returned.shape)}"
    return "nothing" if returned is None else f"{returned!r:.40}"


# -- what hooks ask for -----------------------------------------------------------------------------


class Received(dict[str, Any]):
    """What a client received beside the model; what it did not is explained."""

    def __missing__(self, name: str) -> Any:
        raise FedflatError(
            f"Nothing named '{name}' was received. A mechanism that reads it names it in its contract: down, for "
            "what its own server_state keeps, each, for what it sends, or reads, for another's; None is not sent."
        )


class Kept(dict[str, Tensor]):
    """What a client keeps; what it does not keep yet is explained."""

    def __missing__(self, name: str) -> Tensor:
        raise FedflatError(
            f"The client keeps no '{name}' yet; local.kept('{name}') is a vector of zeros then."
        )


# -- what hooks leave alone ------------------------------------------------------------------------


class Untouched:
    """Vectors that hooks read and must not change in place."""

    def __init__(self, **vectors: object) -> None:
        self._seen = [
            (name, vector, vector._version)
            for name, vector in vectors.items()
            if isinstance(vector, Tensor) and not vector.is_inference()
        ]

    def check(self, remedy: str) -> None:
        """An error if one of them was changed."""
        for name, vector, version in self._seen:
            if vector._version != version:
                raise FedflatError(f"A mechanism changed '{name}' in place; {remedy}.")
