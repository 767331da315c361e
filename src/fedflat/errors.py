"""Mistakes as sentences that a person can act on: the thing, the place, the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


class FedflatError(ValueError):
    """Something the person can put right; the command line prints it without a traceback."""


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


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest known name, or the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Known: {', '.join(known)}."


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what the system says into a sentence."""
    try:
        yield
    except OSError as problem:
        raise FedflatError(f"{what}: {problem.strerror or problem}.") from problem
