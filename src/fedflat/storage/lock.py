"""Keeping a directory to one process."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import ClassVar


class Lock:
    """A lock on a file that vanishes with the process that holds it, however that ends.

    Processes that it forks do not hold it: they may outlive it for a while.
    """

    _all: ClassVar[weakref.WeakSet[Lock]] = weakref.WeakSet()

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+")
        self._all.add(self)

    def acquire(self) -> bool:
        """Whether nobody else holds it; where the system has no such locks, always."""
        try:
            import fcntl
        except ImportError:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # not on this file system
            return True
        return True

    @classmethod
    def forget_all(cls) -> None:
        """In a forked process: close the files, which leaves the locks with the parent."""
        for lock in list(cls._all):
            lock.release()

    def release(self) -> None:
        """Let go of it."""
        self._file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Lock.forget_all)
