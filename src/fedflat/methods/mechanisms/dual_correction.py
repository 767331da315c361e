"""Dual variables: FedGMT's correction, and the dynamic regulariser of FedDyn built on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.flat import axpy_, inverse_norm
from ...core.parameters import choice, number
from ..mechanism import Contract, Correction, Mechanism

if TYPE_CHECKING:
    from ...client.local import Local
    from ...client.step import Step
    from ...core.messages import Upload
    from ...server.server import Server


class DualCorrection(Mechanism):
    """`d ← d − u_i`; then `u_i ← u_i − Δ_i/β`, `u ← u − Σ Δ_i/(βM)` and the server steps by `Δ̄ − βu`.

    FedGMT (Li et al. 2025), Algorithm 1 lines 13, 16 and 17. `u` is the mean of `u_i` over all M clients.
    With `mean="active"` the server averages `w_{i,K} − βu_i` over the clients that took part (Eq. 13):
    they upload that instead, and there is no server dual.
    """

    beta: float = number(default=10.0, above=0)
    mean: str = choice("all", "active", default="all")

    def contract(self) -> Contract:
        """`u_i` kept by the client; nothing more travels."""
        return Contract(client=("dual",), stage={"direction": "correct", "combine": "correct"})

    def server_state(self, w: Tensor) -> Mapping[str, Tensor]:
        """`u = 0`."""
        return {"dual": torch.zeros_like(w)} if self.mean == "all" else {}

    def correction(self, local: Local) -> Correction | None:
        """Subtract the dual."""
        dual = local.state.get("dual")
        return Correction(vectors=() if dual is None else ((dual, -1.0),))

    def end(self, local: Local) -> Mapping[str, Tensor]:
        """`u_i ← u_i − Δ_i/β`."""
        dual = torch.sub(local.kept("dual"), local.update, alpha=1.0 / self.beta)
        local.state["dual"] = dual
        if self.mean == "active":
            local.update.sub_(dual, alpha=self.beta)
        return {}

    def receive(self, server: Server, upload: Upload) -> None:
        """Sum the updates without weights."""
        if self.mean == "all":
            server.add("dual", upload.update)

    def combine(self, server: Server, update: Tensor) -> Tensor:
        """`Δ̄ − βu` with the new u."""
        if self.mean == "all":
            dual = server.vector("dual")
            dual.sub_(server.total("dual"), alpha=1.0 / (self.beta * server.clients))
            update.sub_(dual, alpha=self.beta)
        return update


class DynamicRegulariser(DualCorrection):
    """The dual correction with the proximal pull `d ← d + (w_k − w^t)/β`.

    FedDyn (Acar et al. 2021), where 1/β is called α. `prox="norm"` pulls with the constant length
    `1/(2β)` along `w_k − w^t`, as some released codes do.
    """

    prox: str = choice("square", "norm", default="square")

    def correction(self, local: Local) -> Correction | None:
        """Subtract the dual, pull back to the received model."""
        dual = super().correction(local)
        assert dual is not None
        pull = Correction(pull=1.0 / self.beta, vectors=((local.start, -1.0 / self.beta),))
        return dual.then(pull) if self.prox == "square" else None

    def direction(self, step: Step, d: Tensor) -> None:
        """The same with a pull that does not grow with the distance, `prox="norm"`."""
        dual = super().correction(step.local)
        assert dual is not None
        dual.apply(d, step.w)
        offset = torch.sub(step.w, step.local.start, out=step.local.scratch("w − start"))
        axpy_(d, offset, 0.5 / self.beta * inverse_norm(offset))
