"""Client states between rounds. A client that never took part takes no room.

The clients used last stay in memory, the others are on disk (`client_archive` says why a crash does no harm there).
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
from ..core.vector_memory import new_vector
from ..errors import FedflatError
from .client_archive import ClientArchive

UNITS = {
    "": 1,
    **{prefix + "b": 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))},
    **{prefix + "ib": 1024**power for power, prefix in enumerate(("k", "m", "g", "t"), 1)},
}


class ClientStore:
    """Named vectors per client; beyond the budget, those of the clients used least recently are on disk.

    Args:
        directory: a directory for this store alone, where checkpoints last. By default files are temporary and
            unnamed, vanish with the process, and are made only once the budget is spent.
        budget: the most bytes to hold in memory; None for no limit.
        device: the device of vectors in memory.
        name: the checkpoint in the directory to begin with; by default the store is empty.
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
        self._disk = ClientArchive(None if directory is None else Path(directory), name)
        self._memory: OrderedDict[int, dict[str, Tensor]] = OrderedDict()
        """by client, those used least recently first"""
        self._unwritten: set[int] = set()
        """clients with changes not yet on disk"""
        self._bytes = 0
        self._turnover = 0
        """bytes allocated or freed since freed memory was last given back to the system"""

    @classmethod
    def restore(
        cls,
        directory: str | Path,
        name: str,
        budget: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Open a store as it was at a checkpoint."""
        return cls(directory, budget, device, name)

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of the vectors in memory, never more than the budget."""
        return self._bytes

    def get(self, client: int) -> dict[str, Tensor]:
        """Return the state of a client in a new dictionary; empty for a client that never took part.

        The vectors themselves are the store's: replace them, do not change them in place.
        """
        if client in self._memory:
            self._memory.move_to_end(client)
        elif client in self._disk:
            fits = self._make_room(self._disk.size(client))
            vectors = {name: vector.to(self.device) for name, vector in self._disk.read(client).items()}
            if not fits:
                return vectors
            self._hold(client, vectors)
        return dict(self._memory.get(client, {}))

    def put(self, client: int, state: Mapping[str, Tensor], copy: bool = True) -> None:
        """Replace the state of a client; an empty state removes the client.

        With `copy=False` the vectors become the store's: the caller must not change them afterwards. A vector that
        `get` has just returned is neither copied nor written again.
        """
        old = self._drop(client)
        unchanged = {name for name, vector in state.items() if vector is old.get(name)}
        self._disk.forget(client, keep=unchanged)
        if not state:
            return
        if not self._make_room(_size(state)):
            self._disk.write(client, state)
            return
        self._hold(
            client,
            {
                name: vector if name in unchanged else self._own(vector, copy)
                for name, vector in state.items()
            },
        )
        self._unwritten.add(client)

    def clients(self) -> list[int]:
        """Return the clients that have a state, in order."""
        return sorted({*self._memory, *self._disk})

    def checkpoint(self, name: str) -> None:
        """Save all states under a name for `restore`, and keep the checkpoint before.

        Only what changed since then is written. When this returns, the checkpoint has reached the disk.
        """
        if self._disk.directory is None:
            raise FedflatError("A checkpoint of client states needs a directory: ClientStore(directory).")
        if not re.fullmatch(r"[\w.-]+", name):
            raise FedflatError(f"'{name}' cannot name a checkpoint: use letters, digits, '.', '-' and '_'.")
        for client in sorted(self._unwritten):
            self._disk.write(client, self._memory[client])
        self._unwritten.clear()
        self._disk.checkpoint(name)

    def verify(self) -> None:
        """Read everything that is on disk; a damaged vector is an error."""
        for client in self._disk:
            self._disk.read(client)

    def close(self) -> None:
        """Empty the store and close its files. Checkpoints stay."""
        self._disk.close()
        self._memory.clear()
        self._unwritten.clear()
        self._bytes = 0

    def _make_room(self, size: int) -> bool:
        """Move clients out of memory until `size` bytes fit; False if they never will."""
        if self.budget is None or size > self.budget:
            return self.budget is None
        while self._bytes + size > self.budget:
            client = next(iter(self._memory))
            if client in self._unwritten:
                self._disk.write(client, self._memory[client])
            self._drop(client)
        self._turnover += size
        if self._turnover > max(self.budget // 16, 2**20):
            self._turnover = 0
            give_back()
        return True

    def _own(self, vector: Tensor, copy: bool) -> Tensor:
        """Make a vector the store's own; with a budget, its memory is given back the moment the vector goes."""
        vector = vector.detach()
        if self.budget is None or self.device.type != "cpu":
            return vector.to(self.device, copy=copy, memory_format=torch.contiguous_format)
        return new_vector(vector.shape, vector.dtype).copy_(vector)

    def _hold(self, client: int, vectors: dict[str, Tensor]) -> None:
        self._memory[client] = vectors
        self._bytes += _size(vectors)

    def _drop(self, client: int) -> dict[str, Tensor]:
        """Remove a client from memory, and return its vectors."""
        self._unwritten.discard(client)
        vectors = self._memory.pop(client, {})
        size = _size(vectors)
        self._bytes -= size
        self._turnover += size
        return vectors


class OverlayStore(ClientStore):
    """A store in memory over another one, which is read and never changed."""

    def __init__(self, below: ClientStore) -> None:
        super().__init__(device=below.device)
        self._below = below

    def get(self, client: int) -> dict[str, Tensor]:
        return super().get(client) or self._below.get(client)


def _size(vectors: Mapping[str, Tensor]) -> int:
    return sum(vector.nbytes for vector in vectors.values())


def parse_size(text: str) -> int:
    """Parse a size as people write it (`2GiB`, `800 MB`, `1e9`) into bytes."""
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:e\+?\d\d?)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in UNITS:
        raise FedflatError(
            f"'{text}' is not a size: write bytes, such as 1e9, or a number and a unit, such as 800MB or 2GiB."
        )
    return int(float(match[1]) * UNITS[match[2]])
