"""Writing files so that a crash leaves the old one or the new one, and sentences for what the system says."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from .errors import FedflatError


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what the system says into a sentence."""
    try:
        yield
    except OSError as problem:
        raise FedflatError(f"{what}: {problem.strerror or problem}.") from problem


def replace_file(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a file in one step: whoever reads it sees all of it or what was there before.

    When this returns and `durable` is asked for, it has reached the disk.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    with explained(f"{path} cannot be written"):
        try:
            with unfinished.open("wb") as file:
                file.write(content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
        if durable:
            sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Return when the names in a directory have reached the disk."""
    if os.name == "posix":  # elsewhere a directory cannot be synced, and need not be
        directory = os.open(path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


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
