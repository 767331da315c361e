"""The table of a checkpoint of client states: which vector lies in which slot, with its checksum."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import FedflatError, explained
from .files import replace_file
from .formats import TABLE, check_file

ENTRY = struct.Struct("<qqII")
"""Entries are packed in memory too, so that 100,000 of them take few megabytes."""


class Entry(NamedTuple):
    """One vector in a table."""

    client: int
    slot: int
    kind: int
    """index into the table's kinds"""
    checksum: int

    def pack(self) -> bytes:
        """Return the entry as bytes."""
        return ENTRY.pack(*self)


class Kind(NamedTuple):
    """The name and form of a vector. There are few kinds, and many vectors of each."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    """in bytes"""


class Table(NamedTuple):
    """The vectors of a checkpoint. On disk: a line of JSON, the entries, and a checksum of both."""

    kinds: list[Kind]
    entries: bytes

    def slots(self, size: int) -> set[int]:
        """Return the slots in use among those of one size."""
        kinds = {number for number, kind in enumerate(self.kinds) if kind.size == size}
        return {entry.slot for entry in unpack(self.entries) if entry.kind in kinds}

    def write(self, path: Path) -> None:
        """Write the table in one step; when this returns it has reached the disk."""
        head = json.dumps({"format": TABLE, "kinds": self.kinds}).encode()
        body = head + b"\n" + self.entries
        replace_file(path, body + zlib.crc32(body).to_bytes(4, "little"))

    @classmethod
    def read(cls, path: Path) -> Table:
        """Read a table; a damaged one is an error."""
        with explained(f"{path} cannot be read"):
            data = path.read_bytes()
        body = memoryview(data)[:-4]
        if len(data) <= 4 or zlib.crc32(body).to_bytes(4, "little") != data[-4:]:
            raise FedflatError(f"{path} is damaged: its checksum differs. Resume from another checkpoint.")
        line, _, entries = bytes(body).partition(b"\n")
        head = json.loads(line)
        check_file(path, head["format"], TABLE)
        kinds = [Kind(name, dtype, tuple(shape), size) for name, dtype, shape, size in head["kinds"]]
        return cls(kinds, entries)


def unpack(entries: bytes) -> Iterator[Entry]:
    """Iterate over packed entries."""
    return map(Entry._make, ENTRY.iter_unpack(entries))
