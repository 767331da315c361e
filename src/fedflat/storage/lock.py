"""A lock that keeps a directory to one process."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import ClassVar


class Lock:
    """A lock on a file that vanishes with the process that holds it, however the process ends.

    Forked processes, which may outlive their parent for a while, do not hold it.
    """

    _all: ClassVar[weakref.WeakSet[Lock]] = weakref.WeakSet()

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+")
        self._all.add(self)

    def acquire(self) -> bool:
        """Take the lock; False if another process holds it. Where the system has no locks, always True."""
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
        """Close the files in a forked process, which leaves the locks with its parent."""
        for lock in list(cls._all):
            lock.release()

    def release(self) -> None:
        """Release the lock."""
        self._file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Lock.forget_all)
