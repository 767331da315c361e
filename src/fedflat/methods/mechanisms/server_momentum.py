"""Momentum at the server: heavy-ball, with Nesterov's extrapolation, or sent as a look-ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.parameters import number
from ..mechanism import Contract, Mechanism, Move

if TYPE_CHECKING:
    from ...client.local import Local
    from ...server.server import Server


class ServerMomentum(Mechanism):
    """`m ← λm + Δ̄`, and the server steps by m: FedAvgM (Hsu et al. 2019), no dampening.

    With `apply=False` m is only kept as a direction and the server steps by Δ̄.
    """

    momentum: float = number(default=0.9, at_least=0, below=1)
    apply: bool = True

    def contract(self) -> Contract:
        """Nothing travels: m stays at the server."""
        return Contract(stage={"combine": "momentum"})

    def server_state(self, w: Tensor) -> Mapping[str, Tensor]:
        """`m = 0`, descent-signed."""
        return {"momentum": torch.zeros_like(w)}

    def combine(self, server: Server, update: Tensor) -> Tensor:
        """Accumulate."""
        momentum = server.vector("momentum").mul_(self.momentum).add_(update)
        return update.copy_(momentum) if self.apply else update


class NesterovMomentum(ServerMomentum):
    """Server momentum whose clients take their gradients at `w_k + λm`.

    FedNSAM (Liu et al. 2025), the extrapolation of Algorithm 1.
    """

    momentum: float = number(default=0.85, at_least=0, below=1)

    def contract(self) -> Contract:
        """`m` travels down."""
        return Contract(down=("momentum",), stage={"shift": "extrapolate", "combine": "momentum"})

    def steady_shift(self, local: Local) -> Move:
        """Look where the momentum leads."""
        return local.received["momentum"], self.momentum


class LookAheadMomentum(ServerMomentum):
    """Server momentum whose clients start at the look-ahead `a = w + λm`: FedACG (Kim et al. 2024).

    Updates are then relative to a, the server's step to w.
    """

    momentum: float = number(default=0.85, at_least=0, below=1)

    def start(self, server: Server, w: Tensor) -> Tensor:
        """The look-ahead is sent instead of the model, so one vector travels."""
        return torch.add(w, server.vector("momentum"), alpha=self.momentum)
