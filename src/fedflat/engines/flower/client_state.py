"""What a client keeps between rounds, on its node's disk: survives a crash at any moment, and never advances twice.

Every round that changes the state adds a file; the server's word says which one the next round starts from. A reply
that was lost or refused is thus forgotten by itself: the server goes on naming the state before it, which stays
however often that happens. Two states older than the newest are kept too, for a server that goes back.

The server's word is a receipt: a round and a mark. The mark is made of the order that led to the state and of the
node's secret, never of the state itself: whoever guesses the samples could confirm the guess with a checksum of the
state. The same order leads to the same state, and has the same mark however often it is carried out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ...core.vector_memory import memory
from ...errors import FedflatError, explained
from ...storage.checkpoint import read_checkpoint, write_checkpoint
from ...storage.files import replace_file

KEEP = 3
"""States of a client that are kept."""

Receipt = tuple[int, int]
"""The round after which a state was kept, and its mark."""


class LostState(FedflatError):
    """The server names a state that is not here."""


class KeptState:
    """The states of one client in one run, in a directory of their own."""

    def __init__(self, home: Path, run: str, client: int) -> None:
        self.directory = home / run / f"client-{client}"
        self.client = client
        self._named: int | None = None
        """the round whose state the server has named last"""

    def read(self, receipt: Receipt | None) -> dict[str, Tensor]:
        """The state that the server names; None is a client that has not taken part yet."""
        if receipt is None:
            return {}
        self._named = receipt[0]
        path = self._path(receipt[0])
        if not path.exists():
            raise LostState(
                f"its state after round {receipt[0]} is not in the node's state directory. Put the files back, or "
                "let it start anew with `lost_state: restart`."
            )
        vectors, numbers = read_checkpoint(path)
        # states from before there were marks have a checksum, which the server was told then
        if numbers.get("mark", numbers.get("checksum")) != receipt[1]:
            raise LostState(
                f"its state after round {receipt[0]} is another one than the server was told of. Put the right files "
                "back, or let it start anew with `lost_state: restart`."
            )
        return vectors

    def write(self, round: int, state: Mapping[str, Tensor], mark: int) -> Receipt | None:
        """Keep a state; when this returns it has reached the disk. An empty state leaves nothing."""
        if not state:
            return None
        self._make()
        write_checkpoint(self._path(round), dict(state), {"mark": mark})
        with explained(f"{self.directory} cannot be written"):
            for old in sorted(self.rounds())[:-KEEP]:
                if old not in (round, self._named):
                    self._path(old).unlink()
        return round, mark

    def count_zeroed(self, more: int) -> int:
        """How many vectors of this run were not finite and left as zeros, some more with these; stays here."""
        path = self.directory / "zeroed"
        with explained(f"{path} cannot be read"):
            before = path.read_text() if path.exists() else "0"
        total = more + (int(before) if before.isdecimal() else 0)
        self._make()
        replace_file(path, str(total).encode())
        return total

    def rounds(self) -> list[int]:
        """The rounds after which a state was kept."""
        found = (re.fullmatch(r"round-(\d+)", path.stem) for path in self.directory.glob("*.safetensors"))
        return sorted(int(match[1]) for match in found if match)

    def _make(self) -> None:
        with explained(f"{self.directory} cannot be made"):
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _path(self, round: int) -> Path:
        return self.directory / f"round-{round:07d}.safetensors"


def mark_of(order: Mapping[str, Mapping[str, object]], secret: bytes, anew: bool = False) -> int:
    """A number for the state that an order leads to, from the order and the node's secret alone.

    `anew` is whether the client begins with nothing though the order names a state.
    """
    digest = hashlib.blake2b(b"anew" if anew else b"", key=secret, digest_size=6, person=b"receipt")
    for part, record in sorted(order.items()):
        for name, value in sorted(record.items()):
            data = _bytes(value)
            digest.update(f"{part}:{name}:{len(data)}:".encode())
            digest.update(data)
    return int.from_bytes(digest.digest(), "little")


def _bytes(value: object) -> bytes | memoryview:
    """Of a vector, of one of Flower's arrays, or of anything small."""
    if isinstance(value, Tensor):
        return memory(value)
    data = getattr(value, "data", None)
    return data if isinstance(data, bytes) else repr(value).encode()
