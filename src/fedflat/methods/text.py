"""Methods from words: `fedgmt`, `fedsam(rho=0.1)`, `local-ascent(rho=0.05) + control-variates`.

Method and mechanism names may be mixed and written with `-` or `_`; a method in a sum stands for its
mechanisms. The equivalent in a configuration file is a list of these words or of `{name: {parameter: value}}`.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ..errors import FedflatError, nearest, shortened
from . import named
from .mechanism import Mechanism, registry
from .method import Method

LONGEST = 10_000
"""Characters of a method's name and parameters."""
_TERM = re.compile(r"\s*([A-Za-z][\w-]*)\s*(?:\((.*)\))?\s*", re.DOTALL)


_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None}
"""What people write for a switch."""


MethodLike: TypeAlias = str | Method | Mechanism | Sequence[Any] | Mapping[str, Any]
"""What `as_method` makes a method of."""


def as_method(given: MethodLike) -> Method:
    """A method from itself, a name, a composition, or a list as found in a configuration file."""
    if isinstance(given, Method):
        return given
    if isinstance(given, Mechanism):
        return Method(given.name, [given])
    if isinstance(given, Sequence) and any(isinstance(part, Method | Mechanism) for part in given):
        parts_given = [as_method(part) for part in given]
        listed = [mechanism for part in parts_given for mechanism in part.mechanisms]
        return Method(" + ".join(part.name for part in parts_given), listed)
    terms = method_terms(given)
    if not terms:
        raise FedflatError("The method is empty; name one, such as fedavg.")
    parts = [_build(name, arguments) for name, arguments in terms]
    if len(parts) == 1 and isinstance(parts[0], Method):
        return parts[0]
    mechanisms: list[Mechanism] = []
    for part in parts:
        mechanisms.extend(part.mechanisms if isinstance(part, Method) else [part])
    title = given if isinstance(given, str) else " + ".join(name for name, _ in terms)
    return Method(title, mechanisms)


def method_terms(given: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names with their arguments, from a text or from the lists and mappings of a file."""
    if isinstance(given, str):
        return [_parse(text) for text in _split(given)]
    if isinstance(given, Mapping):
        for name, arguments in given.items():
            if arguments is not None and not isinstance(arguments, Mapping):
                raise FedflatError(
                    f"The parameters of '{name}' must be written by name, such as {name}: {{rho: 0.05}}, "
                    f"not {shortened(repr(arguments))}."
                )
        return [(str(name), dict(arguments or {})) for name, arguments in given.items()]
    if isinstance(given, Sequence):
        return [term for item in given for term in method_terms(item)]
    if callable(given) and hasattr(given, "__name__"):  # a class, or a function that makes a method
        raise FedflatError(f"{given.__name__} is not a method yet; call it: {given.__name__}(...).")
    raise FedflatError(
        f"A method is a name, a composition or a list of mechanisms, not {shortened(repr(given))}."
    )


def _split(text: str) -> list[str]:
    """The terms of a sum; a + inside parentheses does not split."""
    terms, depth, current = [], 0, ""
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "+" and depth == 0:
            terms.append(current)
            current = ""
        else:
            current += character
    terms.append(current)
    return terms


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    match = _TERM.fullmatch(text)
    if match is None or len(text) > LONGEST:
        raise FedflatError(
            f"Cannot read '{shortened(text.strip())}' as part of a method. "
            'Write for example "local-ascent(rho=0.05) + control-variates".'
        )
    name, arguments = match.group(1), match.group(2)
    if not arguments or not arguments.strip():
        return name, {}
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise SyntaxError
        given = {str(k.arg): _literal(k.value) for k in call.keywords}
        if len(given) != len(call.keywords):
            raise SyntaxError
    except (
        SyntaxError,
        ValueError,
        TypeError,
        RecursionError,
        MemoryError,
    ):  # the last two: too many brackets
        raise FedflatError(
            f"Cannot read the parameters of '{shortened(text.strip())}'. Write for example {name}(rho=0.05)."
        ) from None
    if call.args:
        raise FedflatError(
            f"Write the parameters of '{shortened(text.strip())}' by name, such as {name}(rho=0.05)."
        )
    return name, given


def _literal(node: ast.expr) -> Any:
    """A number, text, True, False or None; a bare word is text, so that `prox=norm` works in a shell."""
    if isinstance(node, ast.Name):
        return _WORDS.get(node.id.lower(), node.id)
    return ast.literal_eval(node)


def _build(name: str, arguments: dict[str, Any]) -> Method | Mechanism:
    maker: Callable[..., Method | Mechanism]
    if name.replace("-", "_").lower() in named.METHODS:
        maker = named.METHODS[name.replace("-", "_").lower()]
    elif name.replace("_", "-").lower() in registry:
        maker = registry[name.replace("_", "-").lower()]
    else:
        written = [method.replace("_", "-") for method in named.METHODS]
        raise FedflatError(
            f"There is no method or mechanism '{shortened(name)}'."
            f"{nearest(name.replace('_', '-').lower(), [*written, *registry])} "
            "`fedflat methods` lists them all."
        )
    known = inspect.signature(maker).parameters
    for argument in arguments:
        if argument not in known:
            hint = nearest(argument, known) if known else f" {name} has no parameters."
            raise FedflatError(f"{name} has no parameter '{argument}'.{hint}")
    missing = [p for p, q in known.items() if q.default is q.empty and p not in arguments]
    if missing:
        raise FedflatError(f"{name} needs a value for '{missing[0]}': {name}({missing[0]}=...).")
    for argument, value in arguments.items():
        if isinstance(known[argument].default, bool) and not isinstance(value, bool):
            raise FedflatError(f"{name}: {argument} must be true or false, not {value!r}.")
    return maker(**arguments)
