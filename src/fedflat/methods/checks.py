"""Checks of a mechanism's hooks: a mistake is an error with a remedy, never a silent change of the method."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from typing import Any

from torch import Tensor

from ..core.pull import Pull
from ..errors import FedflatError

CLOSE = 0.8
"""How alike a function's name and a hook's must be to be taken for a misspelt one."""


class FrozenMechanism(FedflatError, FrozenInstanceError):
    """An attempt to keep something in a mechanism."""


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
                    f"{kind.__name__}.{name}: there is no hook of this name. Did you mean '{close[0]}'? A function "
                    f"of your own that is called so begins with an underscore: _{name}."
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


def in_place(mechanism: Any, hook: str, remedy: str, iterate: Tensor | None, *arguments: object) -> None:
    """Call a hook that changes what it is given, and leaves the iterate alone."""
    before = 0 if iterate is None else iterate._version
    if getattr(mechanism, hook)(*arguments) is not None:
        raise FedflatError(f"{mechanism.name}: what {hook} returns is not used; {remedy}.")
    if iterate is not None and iterate._version != before:
        raise FedflatError(f"{mechanism.name}: {hook} changed the iterate itself in place; {remedy}.")


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


def check_term(mechanism: Any, returned: object, outputs: Tensor) -> Any:
    """For a term of the loss: a number, or a pull of the outputs' shape."""
    match returned:
        case Pull(vector=Tensor(shape=outputs.shape), scale=int() | float()):
            return returned
        case Pull():
            raise FedflatError(
                f"{mechanism.name}: loss returns a Pull with {_described(returned.vector)}; its vector must have the "
                f"outputs' shape {tuple(outputs.shape)}, and its scale be a number."
            )
    if isinstance(returned, int | float) or (isinstance(returned, Tensor) and returned.numel() == 1):
        return returned
    raise FedflatError(
        f"{mechanism.name}: loss returns {_described(returned)}; it must return a number, such as a mean, or a Pull."
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
    return "nothing" if returned is None else " ".join(repr(returned).split())[:40]


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


# -- what a client's round must be -----------------------------------------------------------------


def check_optimiser(method: Any, optimiser: Any) -> None:
    """An error if a mechanism is not defined for the clients' optimiser."""
    if optimiser.sums_gradients:
        return
    for mechanism, contract in zip(method.mechanisms, method.contracts, strict=True):
        if contract.mean_gradient:
            raise FedflatError(
                f"{mechanism.name}: it divides a client's update by the sum of its learning rates, which is a mean "
                f"gradient with SGD and not with {type(optimiser).__name__}. Use LocalSGD, or another method."
            )


def check_upload(method: Any, upload: Any) -> None:
    """An error unless what is kept and uploaded is what contracts name: it would be lost elsewhere without a word."""
    kept = {name for contract in method.contracts for name in contract.client}
    for name in set(upload.state) - kept - {"buffers"}:
        raise FedflatError(
            f"{method.name}: clients keep '{name}', which no contract names. Write Contract(client=('{name}',))."
        )
    for name in set(upload.vectors) - set(method.up):
        raise FedflatError(
            f"{method.name}: clients upload '{name}', which no contract names. Write Contract(up=('{name}',))."
        )
    for name in set(method.up) - set(upload.vectors):
        raise FedflatError(
            f"{method.name}: a contract names the upload '{name}', but it is not among what `end` returns."
        )


def training_failed(problem: Exception, client: int, round: int, step: Any) -> FedflatError:
    """Say where a client's training failed, and what to do about the usual reasons."""
    reason = str(problem).strip().split("\n")[0]
    if step is None:
        return FedflatError(
            f"client {client}, round {round}: training failed before the first step: {reason}"
        )
    return FedflatError(
        f"client {client}, round {round}: training failed in step {step.index} on inputs of shape "
        f"{tuple(step.inputs.shape)}: {reason}{_remedy(reason, step.inputs)}"
    )


def _remedy(reason: str, inputs: Tensor) -> str:
    """What to do about the usual reasons why a model does not take its samples."""
    end = "" if reason.endswith(".") else "."
    if "same dtype" in reason and not inputs.is_floating_point():
        return f"{end} The inputs are whole numbers: give the federation floats, with inputs.float()."
    if "out of bounds" in reason:
        return f"{end} Has the model an output for every class?"
    if "must be Tensor, not" in reason:
        return f"{end} The model must return one tensor, a row of outputs for every sample."
    return ""
