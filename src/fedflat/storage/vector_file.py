"""A file of vectors of one size, in slots, of which the last two checkpoints can always be read.

Checkpoints refer to slots by number. A slot goes through these states:

    fresh       written since the last checkpoint
    committed   the last checkpoint refers to it
    released    the last checkpoint refers to it, the next one will not
    waiting     the last checkpoint but one refers to it, the last does not
    free        no checkpoint that is kept refers to it

Only free slots are written, so a crash at any byte harms neither of the last two checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from ..core.vector_memory import memory as memory
from ..errors import explained


class VectorFile:
    """Slots of `size` bytes in the file at `path`, or in an unnamed file that vanishes with the process."""

    def __init__(self, size: int, path: Path | None) -> None:
        self.size = size
        self.name = "an unnamed file in the temporary folder" if path is None else str(path)
        with explained(f"{self.name} cannot be opened"):
            if path is None:
                self.name = f"an unnamed file in {tempfile.gettempdir()}"
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            else:
                path.touch()
                self._file = path.open("r+b", buffering=0)
        self._fresh = bytearray()
        """a flag for every slot"""
        self._free: list[int] = []
        self._released: list[int] = []
        self._waiting: list[int] = []
        self._synced = True

    def adopt(self, committed: set[int], used: set[int]) -> None:
        """Take over a file: slots in use by other checkpoints wait for the next commit."""
        self._fresh = bytearray(max(used, default=-1) + 1)
        self._waiting = sorted(used - committed)
        self._free = [slot for slot in range(len(self._fresh)) if slot not in used]

    def write(self, data: memoryview) -> int:
        """Write into a free slot, and return its number."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._fresh)
            self._fresh.append(0)
        self._fresh[slot], self._synced = 1, False
        with explained(f"{self.name} cannot be written"):
            self._file.seek(slot * self.size)
            while data:
                data = data[self._file.write(data) :]
        return slot

    def read(self, slot: int, into: memoryview) -> bool:
        """Fill a buffer from a slot; False if the file ends too early."""
        with explained(f"{self.name} cannot be read"):
            self._file.seek(slot * self.size)
            while into:
                count = self._file.readinto(into)
                if not count:
                    return False
                into = into[count:]
        return True

    def release(self, slot: int) -> None:
        """Give up a slot: at once if it is fresh, else after the checkpoints that refer to it."""
        (self._free if self._fresh[slot] else self._released).append(slot)

    def sync(self) -> None:
        """Return when everything written has reached the disk."""
        if not self._synced:
            with explained(f"{self.name} cannot be written"):
                os.fsync(self._file.fileno())
            self._synced = True

    def commit(self) -> None:
        """Note that a checkpoint was made: slots of the last checkpoint but one become free."""
        self._free += self._waiting
        self._waiting, self._released = self._released, []
        self._fresh = bytearray(len(self._fresh))

    def length(self) -> int:
        """Return the length of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it could not be opened
            self._file.close()
