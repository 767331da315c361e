"""What a run is trained with, as far as can be told: its module, its loss; for resuming it in another process."""

from __future__ import annotations

import functools
import inspect
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

from torch import nn

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
"""What of a source is not its meaning."""
PLAIN = (int, float, str, bool, type(None))


def of_module(module: nn.Module) -> dict[str, str]:
    """What identifies a module: its layers with their settings, and the code of classes that are no library's."""
    layers = [f"{name} {_named(type(part))} {_settings(part)}" for name, part in module.named_modules()]
    state = [f"{name} {tuple(value.shape)}" for name, value in module.state_dict().items()]
    trained = [f"{name} {value.requires_grad}" for name, value in module.named_parameters()]
    classes = dict.fromkeys(kind for part in module.modules() for kind in type(part).__mro__)
    code = [text for kind in classes for text in _code_of_class(kind)]
    return {"layers": _digest([*layers, *state, *trained]), "code": _digest(code)}


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
    """Those of one layer, without addresses, which differ from process to process."""
    own = {} if _is_library(type(module)) else {k: v for k, v in vars(module).items() if k != "training"}
    plain = {name: value for name, value in own.items() if name[:1] != "_" and isinstance(value, PLAIN)}
    return re.sub(r" at 0x[0-9a-f]+", "", f"{module.extra_repr()} {plain}")


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


def _code(function: Any) -> Iterator[str]:
    """The code of a function that is no library's, with the numbers that it has at hand."""
    if isinstance(function, functools.partial):
        yield repr([*function.args, *function.keywords.items()])
        yield from _code(function.func)
    elif not inspect.isfunction(function):
        if not inspect.isbuiltin(function) and not isinstance(function, type):
            yield repr({k: v for k, v in getattr(function, "__dict__", {}).items() if isinstance(v, PLAIN)})
            yield from (text for kind in type(function).__mro__ for text in _code_of_class(kind))
    elif not _is_library(function):
        yield _source(function)
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        at_hand = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]
        yield repr([value for value in at_hand if isinstance(value, PLAIN)])
        for value in cells:
            if inspect.isfunction(value) and value is not function:
                yield _source(value)


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
