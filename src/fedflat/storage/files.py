"""Durable writing of files."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..errors import explained


def replace_file(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a file in one step: a reader, or a crash, finds the new content or the old.

    With `durable`, the file has reached the disk when this returns.
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
