"""What is kept per client between rounds. A client that never took part takes no room.

The clients used last stay in memory, the others lie on disk; how a crash does no harm there, see `slots`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ..core.allocator import give_back
from ..errors import FedflatError
from .vector_file import Archive, new_vector

UNITS = {
    "": 1,
    **{prefix + "b": 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))},
    **{prefix + "ib": 1024**power for power, prefix in enumerate(("k", "m", "g", "t"), 1)},
}


class ClientStore:
    """Named vectors per client; beyond the budget, those of the clients used least recently are on disk.

    Args:
        directory: where to put files, for checkpoints to last; it must be this store's alone. By default they are
            temporary and unnamed, vanish with the process, and are made only once the budget is spent.
        budget: at most so many bytes in memory, None for no limit.
        device: where vectors are kept while in memory, and handed out.
        name: the checkpoint in the directory to go on from; by default the store is empty.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        budget: int | None = None,
        device: torch.device | str = "cpu",
        name: str | None = None,
    ) -> None:
        if budget is not None and budget < 0:
            raise FedflatError(f"A budget of {budget} bytes is not possible: give 0 or more.")
        self.budget, self.device = budget, torch.device(device)
        self._disk = Archive(None if directory is None else Path(directory), name)
        self._held: OrderedDict[int, dict[str, Tensor]] = OrderedDict()
        """in memory, those used least recently first"""
        self._unwritten: set[int] = set()
        """clients in memory of whom the disk lacks something"""
        self._bytes = 0
        self._passed = 0
        """bytes that came or went since freed memory was last given back to the system"""

    @classmethod
    def restore(
        cls,
        directory: str | Path,
        name: str,
        budget: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """The store as it was at a checkpoint."""
        return cls(directory, budget, device, name)

    @property
    def bytes_in_memory(self) -> int:
        """Never more than the budget."""
        return self._bytes

    def get(self, client: int) -> dict[str, Tensor]:
        """What is kept of a client, as a dictionary of its own; empty for one that never took part.

        The vectors themselves are the store's: replace them, do not change them in place.
        """
        if client in self._held:
            self._held.move_to_end(client)
        elif client in self._disk.rows:
            fits = self._make_room(sum(kind.size for kind in self._disk.kinds(client)))
            vectors = {name: vector.to(self.device) for name, vector in self._disk.read(client).items()}
            if not fits:
                return vectors
            self._hold(client, vectors)
        return dict(self._held.get(client, {}))

    def put(self, client: int, state: Mapping[str, Tensor], copy: bool = True) -> None:
        """Replace what is kept of a client; an empty state leaves nothing.

        With `copy=False` the vectors become the store's: the caller must not change them afterwards. One that `get`
        has just given is neither copied nor written again.
        """
        old = self._drop(client)
        same = {name for name, vector in state.items() if vector is old.get(name)}
        self._disk.forget(client, but=same)
        if not state:
            return
        if not self._make_room(_size(state)):
            self._disk.write(client, state)
            return
        own = {name: vector if name in same else self._own(vector, copy) for name, vector in state.items()}
        self._hold(client, own)
        self._unwritten.add(client)

    def clients(self) -> list[int]:
        """The clients something is kept of."""
        return sorted(self._held.keys() | self._disk.rows.keys())

    def checkpoint(self, name: str) -> None:
        """Keep everything as it is now under a name, for `restore`; beside it the checkpoint before is kept.

        Only what changed since then is written. When this returns, it has reached the disk.
        """
        if self._disk.directory is None:
            raise FedflatError("A checkpoint of client states needs a directory: ClientStore(directory).")
        if not re.fullmatch(r"[\w.-]+", name):
            raise FedflatError(f"'{name}' cannot name a checkpoint: use letters, digits, '.', '-' and '_'.")
        for client in sorted(self._unwritten):
            self._disk.write(client, self._held[client])
        self._unwritten.clear()
        self._disk.checkpoint(name)

    def verify(self) -> None:
        """Read everything that is on disk; what is damaged is an error."""
        for client in list(self._disk.rows):
            self._disk.read(client)

    def close(self) -> None:
        """Let go of memory and files. Checkpoints stay; the store is empty."""
        self._disk.close()
        self._held.clear()
        self._unwritten.clear()
        self._bytes = 0

    def _make_room(self, size: int) -> bool:
        """Move clients out of memory until so many bytes fit in; False if they never will."""
        if self.budget is None or size > self.budget:
            return self.budget is None
        while self._bytes + size > self.budget:
            client = next(iter(self._held))
            if client in self._unwritten:
                self._disk.write(client, self._held[client])
            self._drop(client)
        self._passed += size
        if self._passed > max(self.budget // 16, 2**20):
            self._passed = 0
            give_back()
        return True

    def _own(self, vector: Tensor, copy: bool) -> Tensor:
        """A vector of the store's, in memory that is given back the moment the vector goes, if there is a budget."""
        vector = vector.detach()
        if self.budget is None or self.device.type != "cpu":
            return vector.to(self.device, copy=copy, memory_format=torch.contiguous_format)
        return new_vector(vector.shape, vector.dtype).copy_(vector)

    def _hold(self, client: int, vectors: dict[str, Tensor]) -> None:
        self._held[client] = vectors
        self._bytes += _size(vectors)

    def _drop(self, client: int) -> dict[str, Tensor]:
        """Remove a client from memory."""
        self._unwritten.discard(client)
        vectors = self._held.pop(client, {})
        size = _size(vectors)
        self._bytes -= size
        self._passed += size
        return vectors


class StoreAbove(ClientStore):
    """A store in memory that begins with what is in another one, and leaves that alone."""

    def __init__(self, below: ClientStore) -> None:
        super().__init__(device=below.device)
        self._below = below

    def get(self, client: int) -> dict[str, Tensor]:
        """What is kept of a client, here or below."""
        return super().get(client) or self._below.get(client)


def _size(vectors: Mapping[str, Tensor]) -> int:
    return sum(vector.nbytes for vector in vectors.values())


def parse_size(text: str) -> int:
    """Bytes from a size as people write it: `2GiB`, `800 MB`, `1e9`."""
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:e\+?\d\d?)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in UNITS:
        raise FedflatError(
            f"'{text}' is not a size: write bytes, such as 1e9, or a number and a unit, such as 800MB or 2GiB."
        )
    return int(float(match[1]) * UNITS[match[2]])
