"""Ascent along what the global model has left behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.flat import inverse_norm
from ...core.parameters import choice, number
from ..mechanism import Contract, Mechanism, Move

if TYPE_CHECKING:
    from ...client.local import Local
    from ...server.server import Server


class HistoryAscent(Mechanism):
    """`δ = ρ n(w_i^old − w^t)`, constant during the round; no extra pass.

    FedLESAM (Fan et al. 2024): `w_i^old` is the model the client received when it last took part; there is no
    perturbation the first time. With `source="server"` it is the server's last step, `δ = ρ n(w^{t−1} − w^t)`.
    """

    rho: float = number(default=0.05, at_least=0)
    source: str = choice("history", "server", default="history")

    def contract(self) -> Contract:
        """The client remembers a model, or one more vector travels down."""
        if self.source == "history":
            return Contract(client=("last_model",))
        return Contract(down=("last_step",))

    def server_state(self, w: Tensor) -> Mapping[str, Tensor]:
        """The last step is 0 at first."""
        return {} if self.source == "history" else {"last_step": torch.zeros_like(w)}

    def steady_shift(self, local: Local) -> Move | None:
        """The same move in every step."""
        if self.source == "server":
            step = local.received["last_step"]
            return step, -self.rho * inverse_norm(step)
        old = local.state.get("last_model")
        if old is None:
            return None
        offset = torch.sub(old, local.start, out=local.scratch("w_old − w"))
        return offset, self.rho * inverse_norm(offset)

    def end(self, local: Local) -> Mapping[str, Tensor]:
        """Remember the model received."""
        if self.source == "history":
            local.state["last_model"] = local.start.clone()
        return {}

    def finish(self, server: Server) -> None:
        """Remember the step just made."""
        if self.source == "server":
            server.vector("last_step").copy_(server.step)
