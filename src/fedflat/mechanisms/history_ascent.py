"""Ascent along what the global model has left behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..flat import inverse_norm
from ..mechanism import Contract, Mechanism
from ..parameters import choice, number

if TYPE_CHECKING:
    from ..local import Local, Step
    from ..server import Server


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

    def begin(self, local: Local) -> None:
        """Find the direction, then remember the model just received."""
        if self.source == "server":
            step = local.received["last_step"]
            local.notes[self] = (step, -self.rho * inverse_norm(step))
            return
        old = local.state.get("last_model")
        if old is not None:
            offset = torch.sub(old, local.start, out=local.scratch("w_old − w"))
            local.notes[self] = (offset, self.rho * inverse_norm(offset))
        local.state["last_model"] = local.start.clone()

    def shift(self, step: Step) -> None:
        """The same move every step."""
        if self in step.local.notes:
            step.move(*step.local.notes[self])

    def finish(self, server: Server) -> None:
        """Remember the step just made."""
        if self.source == "server":
            server.vector("last_step").copy_(server.step)
