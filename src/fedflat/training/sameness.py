"""What a resumed run must have again: its module, its loss, its mechanisms, as far as can be told."""

from __future__ import annotations

import dis
import functools
import inspect
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any
from zlib import crc32

from torch import nn

from ..data.fingerprint import checksum

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
"""What of a source is not its meaning."""
PLAIN = (int, float, str, bool, type(None))


def of_module(module: nn.Module) -> dict[str, str]:
    """What identifies a module: its layers and their settings, the code of classes of its own, its frozen values."""
    layers = [f"{name} {_named(type(part))} {_settings(part)}" for name, part in module.named_modules()]
    state = [f"{name} {tuple(value.shape)}" for name, value in module.state_dict().items()]
    trained = [f"{name} {value.requires_grad}" for name, value in module.named_parameters()]
    classes = dict.fromkeys(kind for part in module.modules() for kind in type(part).__mro__)
    code = [text for kind in classes for text in _code_of_class(kind)]
    found = {"layers": _digest([*layers, *state, *trained]), "code": _digest(code)}
    frozen = [value.detach().flatten() for value in module.parameters() if not value.requires_grad]
    return {**found, "frozen": f"{checksum(frozen):08x}"} if frozen else found


def of_mechanisms(mechanisms: Iterable[object]) -> str:
    """What identifies mechanisms of a person's own: their code."""
    kinds = dict.fromkeys(kind for mechanism in mechanisms for kind in type(mechanism).__mro__)
    return _digest(text for kind in kinds for text in _code_of_class(kind))


def of_loss(loss: Callable[..., Any]) -> dict[str, str]:
    """What identifies a loss: its name, and its code where it is no library's."""
    if isinstance(loss, nn.Module):
        return {"name": type(loss).__name__, **of_module(loss)}
    return {"name": _name(loss), "code": _digest(_code(loss))}


def _digest(texts: list[str] | Iterator[str]) -> str:
    return f"{crc32('; '.join(texts).encode(errors='replace')):08x}"


def _name(function: Any) -> str:
    if isinstance(function, functools.partial):
        return _name(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def _named(kind: type) -> str:
    return kind.__qualname__


def _settings(module: nn.Module) -> str:
    """Those of one layer, functions among them, without addresses, which differ from process to process."""
    own = {name: v for name, v in vars(module).items() if name[:1] != "_" and name != "training"}
    plain = {} if _is_library(type(module)) else {k: v for k, v in own.items() if isinstance(v, PLAIN)}
    functions = {name: [_name(v), *_code(v)] for name, v in own.items() if _is_function(v)}
    return re.sub(r" at 0x[0-9a-f]+", "", f"{module.extra_repr()} {plain} {functions or ''}")


def _is_function(value: Any) -> bool:
    return isinstance(value, functools.partial) or inspect.isroutine(value)


def _is_library(thing: Any) -> bool:
    """Whether something comes with Python, torch, fedflat or another package that is installed."""
    home = str(getattr(thing, "__module__", "") or "").partition(".")[0]
    if home in ("torch", "fedflat", "builtins"):
        return True
    try:
        file = Path(inspect.getfile(thing))
    except (TypeError, OSError):
        return False
    return "site-packages" in file.parts or "dist-packages" in file.parts


def _code_of_class(kind: type) -> Iterator[str]:
    if _is_library(kind):
        return
    for name, value in vars(kind).items():
        function = getattr(
            value, "__func__", getattr(value, "fget", value)
        )  # static and class methods, properties
        if inspect.isfunction(function):
            yield f"{_named(kind)}.{name}"
            yield from _code(function)


def _code(function: Any, seen: frozenset[Any] = frozenset()) -> Iterator[str]:
    """The code of a function that is no library's, of those that it calls, and the numbers that it has at hand."""
    if isinstance(function, functools.partial):
        yield repr([*function.args, *function.keywords.items()])
        yield from _code(function.func, seen)
    elif not inspect.isfunction(function):
        if not inspect.isbuiltin(function) and not isinstance(function, type):
            yield repr({k: v for k, v in getattr(function, "__dict__", {}).items() if isinstance(v, PLAIN)})
            yield from (text for kind in type(function).__mro__ for text in _code_of_class(kind))
    elif not _is_library(function) and function.__code__ not in seen:
        yield _source(function)
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        scope = [function.__globals__.get(name) for name in _globals(function.__code__)]
        at_hand = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells, *scope]
        yield repr([value for value in at_hand if isinstance(value, PLAIN)])
        for value in at_hand:
            if inspect.isfunction(value):
                yield from _code(value, seen | {function.__code__})


def _globals(code: CodeType) -> list[str]:
    """The names that code takes from its module, functions within it included."""
    found = dict.fromkeys(str(i.argval) for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _globals(const)]
    return list(dict.fromkeys([*found, *inner]))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that has no value yet
        return False


def _source(function: Any) -> str:
    """Its words, without layout and comments; names and numbers where there is no source of its own."""
    code = function.__code__
    try:
        if code.co_name == "<lambda>":  # its lines hold what stands around it, too
            raise OSError
        text = inspect.getsource(function)
    except (OSError, TypeError):
        numbers = [value for value in code.co_consts if isinstance(value, PLAIN)]
        return repr([code.co_names, code.co_varnames, numbers])
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, IndentationError):
        return text
    return " ".join(token.string for token in tokens if token.type not in LAYOUT)
