"""SCAFFOLD's control variates: what a client's gradient lacks to be everybody's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..mechanism import Contract, Correction, Mechanism

if TYPE_CHECKING:
    from ...client.local import Local
    from ...core.messages import Upload
    from ...server.server import Server


STAGE = {"direction": "correct", "combine": "correct"}


class ControlVariates(Mechanism):
    """`d ← d − c_i + c`; then `c_i⁺ = c_i − c + G_i` and `c ← c + (1/M) Σ (c_i⁺ − c_i)`.

    SCAFFOLD, option II (Karimireddy et al. 2020). `c` is the mean of `c_i` over all M clients, always.
    """

    def contract(self) -> Contract:
        """`c` down, `c_i⁺ − c_i` up, `c_i` kept by the client."""
        return Contract(
            client=("control",), down=("control",), up=("control",), mean_gradient=True, stage=STAGE
        )

    def server_state(self, w: Tensor) -> Mapping[str, Tensor]:
        """`c = 0`."""
        return {"control": torch.zeros_like(w)}

    def begin(self, local: Local) -> None:
        """`c − c_i` does not change during the round."""
        local.memo[self] = torch.sub(
            local.received["control"], local.kept("control"), out=local.scratch("c − c_i")
        )

    def correction(self, local: Local) -> Correction:
        """Add what the client's gradient lacks."""
        return Correction(vectors=((local.memo[self], 1.0),))

    def end(self, local: Local) -> Mapping[str, Tensor]:
        """Option II: the pseudo-gradient of the round becomes the client's control variate."""
        change = local.pseudo_gradient().sub_(local.received["control"])
        local.state["control"] = local.kept("control") + change
        return {"control": change}

    def receive(self, server: Server, upload: Upload) -> None:
        """Sum the changes."""
        server.add("control", upload.vectors["control"])

    def combine(self, server: Server, update: Tensor) -> Tensor:
        """Clients that did not take part count with a change of zero."""
        server.vector("control").add_(server.total("control"), alpha=1.0 / server.clients)
        return update
