"""Client states on disk: a file of slots for every size of vector, and a table for each of the last two checkpoints.

A table is written in one atomic step after the vectors that it names have reached the disk. What the tables refer to
is never overwritten (see `vector_file`), so a crash at any byte leaves both checkpoints whole.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..core.vector_memory import memory, new_vector
from ..errors import FedflatError, explained, nearest
from .vector_file import VectorFile
from .vector_table import Entry, Kind, Table, unpack


class ClientArchive:
    """Vectors by client and name in files in a directory, or in unnamed temporary files.

    The archive begins as it was at the checkpoint `name`, or empty; checkpoints in the directory stay until the next
    one is made.
    """

    def __init__(self, directory: Path | None, name: str | None = None) -> None:
        self.directory = directory
        self._entries: dict[int, bytes] = {}
        """packed, by client"""
        self._kinds: list[Kind] = []
        self._files: dict[int, VectorFile] = {}
        """by size of vector"""
        self._last: str | None = None
        """name of the last checkpoint"""
        if directory is not None:
            if name is None:
                with explained(f"{directory} cannot be made"):
                    directory.mkdir(parents=True, exist_ok=True)
            self._take_over(directory, name)

    def __contains__(self, client: int) -> bool:
        return client in self._entries

    def __iter__(self) -> Iterator[int]:
        """Iterate over the clients with vectors on disk."""
        return iter(self._entries)

    def size(self, client: int) -> int:
        """Return the bytes that a client's vectors take."""
        return sum(self._kinds[entry.kind].size for entry in self._of(client))

    def read(self, client: int) -> dict[str, Tensor]:
        """Read the vectors of a client; a damaged one is an error."""
        vectors = {}
        for entry in self._of(client):
            kind = self._kinds[entry.kind]
            vectors[kind.name] = new_vector(kind.shape, getattr(torch, kind.dtype))
            data = memory(vectors[kind.name])
            if not self._file(kind).read(entry.slot, data):
                raise self._damaged(entry, "the file ends too early")
            if zlib.crc32(data) != entry.checksum:
                raise self._damaged(entry, "its checksum differs")
        return vectors

    def write(self, client: int, vectors: Mapping[str, Tensor]) -> None:
        """Write the vectors of a client that are not on disk yet."""
        written = {self._kinds[entry.kind].name for entry in self._of(client)}
        for name, vector in vectors.items():
            if name not in written:
                dtype = str(vector.dtype).removeprefix("torch.")
                kind = Kind(name, dtype, tuple(vector.shape), vector.nbytes)
                if kind not in self._kinds:
                    self._kinds.append(kind)
                data = memory(vector)
                slot = self._file(kind).write(data)
                entry = Entry(client, slot, self._kinds.index(kind), zlib.crc32(data))
                self._add(entry)

    def forget(self, client: int, keep: Collection[str] = ()) -> None:
        """Forget the vectors of a client, except those named in `keep`."""
        for entry in unpack(self._entries.pop(client, b"")):
            kind = self._kinds[entry.kind]
            if kind.name in keep:
                self._add(entry)
            else:
                self._file(kind).release(entry.slot)

    def checkpoint(self, name: str) -> None:
        """Make a checkpoint, and keep it beside the one before."""
        assert self.directory is not None
        for file in self._files.values():
            file.sync()
        Table(self._kinds, b"".join(self._entries.values())).write(self.directory / f"{name}.table")
        with explained(f"{self.directory} cannot be written"):
            for table in self.directory.glob("*.table"):
                if table.stem not in (name, self._last):
                    table.unlink()
        for file in self._files.values():
            file.commit()
        self._last = name

    def close(self) -> None:
        """Close the files."""
        self._files, self._entries = {}, {}

    def _of(self, client: int) -> Iterator[Entry]:
        return unpack(self._entries.get(client, b""))

    def _add(self, entry: Entry) -> None:
        self._entries[entry.client] = self._entries.get(entry.client, b"") + entry.pack()

    def _file(self, kind: Kind) -> VectorFile:
        if kind.size not in self._files:
            path = None if self.directory is None else self.directory / f"vectors-{kind.size}.bin"
            self._files[kind.size] = VectorFile(kind.size, path)
        return self._files[kind.size]

    def _take_over(self, directory: Path, name: str | None) -> None:
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
        for entry in unpack(current.entries):
            if (entry.slot + 1) * self._kinds[entry.kind].size > ends[entry.kind]:
                raise self._damaged(entry, "the file ends too early")
            self._add(entry)

    def _damaged(self, entry: Entry, reason: str) -> FedflatError:
        kind = self._kinds[entry.kind]
        return FedflatError(
            f"client {entry.client}: its '{kind.name}' in {self._file(kind).name} is damaged: {reason}. "
            "Resume from another checkpoint, or start anew."
        )
