"""The server's learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ...core.parameters import number
from ..mechanism import Contract, Mechanism

if TYPE_CHECKING:
    from ...server.server import Server


class ServerStep(Mechanism):
    """The server steps by `η_g` times what the mechanisms before it made of the update."""

    lr: float = number(default=1.0, above=0)

    def contract(self) -> Contract:
        """It scales the whole step, so it comes last."""
        return Contract(stage={"combine": "scale"})

    def combine(self, server: Server, update: Tensor) -> Tensor:
        """Scale."""
        return update.mul_(self.lr)
