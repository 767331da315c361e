"""Writing files so that a crash leaves the old one or the new one, and sentences for what the system says."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

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
        if durable and os.name == "posix":  # elsewhere a directory cannot be synced, and need not be
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)


class Lock:
    """A lock on a file that vanishes with the process that holds it, however that ends."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+")

    def acquire(self) -> bool:
        """Whether nobody else holds it; where the system has no such locks, always."""
        try:
            import fcntl
        except ImportError:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def release(self) -> None:
        """Let go of it."""
        self._file.close()
