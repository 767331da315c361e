"""Vectors of clients on disk: files of equally large slots, one for every size of vector, and tables.

A table says which vector lies in which slot, with its checksum; written in one atomic step, it is a checkpoint. What
the last two checkpoints refer to is never overwritten, so that a crash at any moment harms neither: a slot is fresh
when written, belongs to the next checkpoint, is released when its vector is replaced, and is free again once the last
two checkpoints do without it.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import FedflatError, explained, nearest
from .files import replace_file
from .formats import TABLE, check_file

ROW = struct.Struct("<qqII")
"""Rows are kept packed, so that 100,000 of them take few megabytes."""


class Row(NamedTuple):
    """One vector in a table."""

    client: int
    slot: int
    kind: int
    checksum: int


class Kind(NamedTuple):
    """What a vector looks like. There are few kinds, and many vectors of each."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    """in bytes"""


class Slots:
    """Slots of `size` bytes in the file at `path`, or in an unnamed one that vanishes with the process."""

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
        """a flag for every slot: written since the last checkpoint"""
        self._free: list[int] = []
        self._released: list[int] = []
        """in the last checkpoint, but not in the next"""
        self._waiting: list[int] = []
        """in the last but one, but not in the last"""
        self._synced = True

    def adopt(self, live: set[int], used: set[int]) -> None:
        """Take over a file: used slots that are not live are needed only until the next checkpoint."""
        self._fresh = bytearray(max(used, default=-1) + 1)
        self._waiting = sorted(used - live)
        self._free = [slot for slot in range(len(self._fresh)) if slot not in used]

    def write(self, data: memoryview) -> int:
        """Write into a slot that no checkpoint refers to, and return it."""
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
        """The slot is needed no longer, except by checkpoints."""
        (self._free if self._fresh[slot] else self._released).append(slot)

    def sync(self) -> None:
        """Return when everything written has reached the disk."""
        if not self._synced:
            with explained(f"{self.name} cannot be written"):
                os.fsync(self._file.fileno())
            self._synced = True

    def turn(self) -> None:
        """A checkpoint was made: nobody waits for the last but one any longer."""
        self._free += self._waiting
        self._waiting, self._released = self._released, []
        self._fresh = bytearray(len(self._fresh))

    def length(self) -> int:
        """Of the file, in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it could not be opened
            self._file.close()


class Archive:
    """Vectors by client and name in files in a directory, or in unnamed temporary files.

    Checkpoints found in the directory stay until the next one is made.
    """

    def __init__(self, directory: Path | None, name: str | None = None) -> None:
        self.directory = directory
        self.rows: dict[int, bytes] = {}
        """the vectors on disk, by client"""
        self._kinds: list[Kind] = []
        self._slots: dict[int, Slots] = {}
        self._last: str | None = None
        """name of the last checkpoint"""
        if directory is not None:
            with explained(f"{directory} cannot be made"):
                if name is None:
                    directory.mkdir(parents=True, exist_ok=True)
            self._take_over(directory, name)

    def kinds(self, client: int) -> list[Kind]:
        """The vectors of a client that are on disk."""
        return [self._kinds[row.kind] for row in self._of(client)]

    def read(self, client: int) -> dict[str, Tensor]:
        """Read what is on disk of a client."""
        vectors = {}
        for row in self._of(client):
            kind = self._kinds[row.kind]
            vectors[kind.name] = new_vector(kind.shape, getattr(torch, kind.dtype))
            data = memory(vectors[kind.name])
            if not self._file(kind).read(row.slot, data):
                raise self._damaged(row, "the file ends too early")
            if zlib.crc32(data) != row.checksum:
                raise self._damaged(row, "its checksum differs")
        return vectors

    def write(self, client: int, vectors: Mapping[str, Tensor]) -> None:
        """Write the vectors of a client that are not on disk yet."""
        written = {kind.name for kind in self.kinds(client)}
        for name, vector in vectors.items():
            if name not in written:
                dtype = str(vector.dtype).removeprefix("torch.")
                kind = Kind(name, dtype, tuple(vector.shape), vector.nbytes)
                if kind not in self._kinds:
                    self._kinds.append(kind)
                data = memory(vector)
                slot = self._file(kind).write(data)
                row = ROW.pack(client, slot, self._kinds.index(kind), zlib.crc32(data))
                self.rows[client] = self.rows.get(client, b"") + row

    def forget(self, client: int, but: Collection[str] = ()) -> None:
        """Forget the vectors of a client, but some."""
        kept = b""
        for row in self._of(client):
            if self._kinds[row.kind].name in but:
                kept += ROW.pack(*row)
            else:
                self._file(self._kinds[row.kind]).release(row.slot)
        self.rows.pop(client, None)
        if kept:
            self.rows[client] = kept

    def checkpoint(self, name: str) -> None:
        """Write the table, and keep it beside the one before."""
        assert self.directory is not None
        for slots in self._slots.values():
            slots.sync()
        Table(self._kinds, b"".join(self.rows.values())).write(self.directory / f"{name}.table")
        with explained(f"{self.directory} cannot be written"):
            for table in self.directory.glob("*.table"):
                if table.stem not in (name, self._last):
                    table.unlink()
        for slots in self._slots.values():
            slots.turn()
        self._last = name

    def close(self) -> None:
        """Let go of the files."""
        self._slots, self.rows = {}, {}

    def _of(self, client: int) -> Iterator[Row]:
        return unpack(self.rows.get(client, b""))

    def _file(self, kind: Kind) -> Slots:
        if kind.size not in self._slots:
            path = None if self.directory is None else self.directory / f"vectors-{kind.size}.bin"
            self._slots[kind.size] = Slots(kind.size, path)
        return self._slots[kind.size]

    def _take_over(self, directory: Path, name: str | None) -> None:
        """Be as at a checkpoint, or empty. What other checkpoints refer to waits for the next one."""
        tables = {path.stem: path for path in directory.glob("*.table")}
        if name is not None and name not in tables:
            known = nearest(name, tables) if tables else ""
            raise FedflatError(f"{directory} holds no checkpoint '{name}' of client states.{known}")
        current = Table([], b"") if name is None else Table.read(tables.pop(name))
        self._kinds, self._last = current.kinds, name
        found = [current]
        for path in tables.values():
            with contextlib.suppress(FedflatError):  # a damaged one cannot be restored anyway
                found.append(Table.read(path))
        for kind in {kind.size: kind for table in found for kind in table.kinds}.values():
            used = [table.slots(kind.size) for table in found]
            self._file(kind).adopt(used[0], set().union(*used))
        ends = [self._file(kind).length() for kind in current.kinds]
        for row in unpack(current.rows):
            if (row.slot + 1) * self._kinds[row.kind].size > ends[row.kind]:
                raise self._damaged(row, "the file ends too early")
            self.rows[row.client] = self.rows.get(row.client, b"") + ROW.pack(*row)

    def _damaged(self, row: Row, reason: str) -> FedflatError:
        kind = self._kinds[row.kind]
        return FedflatError(
            f"client {row.client}: its '{kind.name}' in {self._file(kind).name} is damaged: {reason}. "
            "Resume from another checkpoint, or start anew."
        )


class Table(NamedTuple):
    """Which vector lies in which slot. On disk: a line of JSON, the rows, and a checksum of all that."""

    kinds: list[Kind]
    rows: bytes

    def slots(self, size: int) -> set[int]:
        """The slots in use among those of one size."""
        kinds = {number for number, kind in enumerate(self.kinds) if kind.size == size}
        return {row.slot for row in unpack(self.rows) if row.kind in kinds}

    def write(self, path: Path) -> None:
        """Write the table, or leave what is there."""
        head = json.dumps({"format": TABLE, "kinds": self.kinds}).encode()
        body = head + b"\n" + self.rows
        replace_file(path, body + zlib.crc32(body).to_bytes(4, "little"))

    @classmethod
    def read(cls, path: Path) -> Table:
        """Read a table; a damaged one is an error."""
        with explained(f"{path} cannot be read"):
            data = path.read_bytes()
        body = memoryview(data)[:-4]
        if len(data) <= 4 or zlib.crc32(body).to_bytes(4, "little") != data[-4:]:
            raise FedflatError(f"{path} is damaged: its checksum differs. Resume from another checkpoint.")
        line, _, rows = bytes(body).partition(b"\n")
        head = json.loads(line)
        check_file(path, head["format"], TABLE)
        return cls(
            [Kind(name, dtype, tuple(shape), size) for name, dtype, shape, size in head["kinds"]], rows
        )


def unpack(rows: bytes) -> Iterator[Row]:
    """Rows, one by one."""
    return map(Row._make, ROW.iter_unpack(rows))


LARGE = 2**16
"""Bytes from which a vector gets pages of its own."""
MAPPINGS = 30_000
"""At most so many of those: Linux allows a process about twice as many."""


def new_vector(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A vector in memory of its own, which the system has back as soon as the vector is gone.

    The usual allocator keeps freed pieces between others still in use: with thousands of vectors that come and go, a
    process grows to twice of what it holds.
    """
    count = math.prod(shape)
    if count * dtype.itemsize < LARGE or _Pages.alive >= MAPPINGS:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(_Pages(-1, count * dtype.itemsize), dtype=dtype, count=count).view(shape)


class _Pages(mmap.mmap):
    """Memory straight from the system."""

    alive = 0

    def __init__(self, *_: int) -> None:
        _Pages.alive += 1

    def __del__(self) -> None:
        _Pages.alive -= 1


def memory(vector: Tensor) -> memoryview:
    """The bytes of a vector, not a copy if it is contiguous and on the CPU."""
    return vector.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
