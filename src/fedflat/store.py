"""What is kept per client between rounds. A client that never took part takes no room."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class ClientStore:
    """Named vectors per client."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, Tensor]] = {}

    def get(self, client: int) -> dict[str, Tensor]:
        """What is kept of a client, as a dictionary of its own; empty for one that never took part."""
        return dict(self._kept.get(client, {}))

    def put(self, client: int, state: Mapping[str, Tensor]) -> None:
        """Replace what is kept of a client."""
        if state:
            self._kept[client] = dict(state)

    def clients(self) -> list[int]:
        """The clients something is kept of."""
        return sorted(self._kept)
