"""How many threads torch computes with: a setting of the whole process, which several trainings may want."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import FedflatError

_lock = threading.Lock()
_wanted: list[tuple[int, int]] = []
"""Python's thread and torch's threads of every training under way, in the order in which they began"""
_before = 1
"""torch's threads when none was"""


def _after_fork() -> None:
    """In a new process no training is under way but the one that it was made in."""
    global _lock
    _lock = threading.Lock()
    _wanted[:] = [entry for entry in _wanted if entry[0] == threading.get_ident()]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Let torch compute with this many threads inside the block.

    A training within another one may have its own number; trainings that run side by side, in threads of Python's,
    must agree on one, since it is the process's.
    """
    global _before
    here = threading.get_ident()
    with _lock:
        other = next((count for thread, count in _wanted if thread != here and count != threads), None)
        if other is not None:
            raise FedflatError(
                f"Another thread of this process trains with threads={other}, which holds for both: give "
                f"threads={other} here too, or train in a process of its own."
            )
        if not _wanted:
            _before = torch.get_num_threads()
        _wanted.append((here, threads))
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        with _lock:
            _wanted.remove((here, threads))
            own = [count for thread, count in _wanted if thread == here]
            rest = own or [count for _, count in _wanted]
            torch.set_num_threads(rest[-1] if rest else _before)
