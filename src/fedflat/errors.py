"""Mistakes as sentences that a person can act on: the thing, the place, the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any


class FedflatError(ValueError):
    """Something the person can put right; the command line prints it without a traceback."""

    def __str__(self) -> str:
        """The sentence; of a name that is not UTF-8, what can be printed."""
        return super().__str__().encode("utf-8", "backslashreplace").decode()


class Diverged(FedflatError):
    """A training whose model is no longer finite; the command line ends with exit code 3."""

    run: Any = None
    """the `Run` until then, with the last finite model"""


class MissingExtra(FedflatError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {package}, which is not installed. "
            f'Install it with: pip install "fedflat[{extra}]"'
        )


def require(module: str, package: str, extra: str, purpose: str) -> None:
    """Say that an optional dependency is missing before work begins that would be lost; nothing is imported."""
    if find_spec(module) is None:
        raise MissingExtra(package, extra, purpose)


def shortened(text: str, most: int = 100) -> str:
    """A text that somebody gave, as far as it is worth repeating."""
    return text if len(text) <= most else f"{text[:most]} ..."


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest known name, or the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name)[:100], known, n=1, cutoff=0.5)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Known: {', '.join(known)}."


def reason_of(problem: BaseException) -> str:
    """What a problem says, in one line; its kind where it says nothing."""
    return next(iter(str(problem).strip().splitlines()), "") or type(problem).__name__


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what the system says into a sentence."""
    try:
        yield
    except OSError as problem:
        raise FedflatError(f"{what}: {problem.strerror or problem}.") from problem
