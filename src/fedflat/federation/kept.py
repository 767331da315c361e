"""What a client keeps between rounds, on its node's disk: survives a crash at any moment, and never advances twice.

Every round that changes the state adds a file; the server's word says which one the next round starts from. A reply
that was lost or refused is thus forgotten by itself: the server goes on naming the state before it. Two states older
than the newest are kept, for a server that goes back by a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ..checkpoint import read_checkpoint, write_checkpoint
from ..errors import FedflatError, explained

KEEP = 3
"""So many states of a client."""

Receipt = tuple[int, int]
"""The round after which a state was kept, and its checksum."""


class LostState(FedflatError):
    """The server names a state that is not here."""


class KeptState:
    """The states of one client in one run, in a directory of their own."""

    def __init__(self, home: Path, run: str, client: int) -> None:
        self.directory = home / run / f"client-{client}"
        self.client = client

    def read(self, receipt: Receipt | None) -> dict[str, Tensor]:
        """The state that the server names; None is a client that has not taken part yet."""
        if receipt is None:
            return {}
        path = self._path(receipt[0])
        if not path.exists():
            raise LostState(
                f"its state after round {receipt[0]} is not in {self.directory}. Put the files back, or let it start "
                "anew with `lost_state: restart`."
            )
        vectors, numbers = read_checkpoint(path)
        if numbers["checksum"] != receipt[1]:
            raise LostState(
                f"its state after round {receipt[0]} in {self.directory} is another one than the server was told of. "
                "Put the right files back, or let it start anew with `lost_state: restart`."
            )
        return vectors

    def write(self, round: int, state: Mapping[str, Tensor]) -> Receipt | None:
        """Keep a state; when this returns it has reached the disk. An empty state leaves nothing."""
        if not state:
            return None
        with explained(f"{self.directory} cannot be made"):
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        checksum = checksum_of(state)
        write_checkpoint(self._path(round), dict(state), {"checksum": checksum})
        with explained(f"{self.directory} cannot be written"):
            for old in sorted(self.rounds())[:-KEEP]:
                if old != round:
                    self._path(old).unlink()
        return round, checksum

    def rounds(self) -> list[int]:
        """The rounds after which a state was kept."""
        found = (re.fullmatch(r"round-(\d+)", path.stem) for path in self.directory.glob("*.safetensors"))
        return sorted(int(match[1]) for match in found if match)

    def _path(self, round: int) -> Path:
        return self.directory / f"round-{round:07d}.safetensors"


def checksum_of(state: Mapping[str, Tensor]) -> int:
    """Of all vectors and their names."""
    import zlib

    from ..slots import memory

    total = 0
    for name in sorted(state):
        total = zlib.crc32(memory(state[name]), zlib.crc32(name.encode(), total))
    return total
