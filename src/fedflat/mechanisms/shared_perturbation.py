"""Clients that agree on one perturbation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..flat import inverse_norm
from ..mechanism import Contract, Mechanism
from ..parameters import number

if TYPE_CHECKING:
    from ..local import Local, Step
    from ..messages import Upload
    from ..server import Server


class SharedPerturbation(Mechanism):
    """Every step `ŝ = ρ n(∇ℓ(w_k) − μ_i − s)`, `μ_i ← μ_i + ŝ − s`, gradient at `w_k + ŝ`.

    FedSMOO (Sun et al. 2023): the client uploads `s̃_i = μ_i − ŝ` of its last step, and the server sends
    `s ← ρ n(mean s̃_i)` in the next round. μ_i stays with the client.
    """

    rho: float = number(default=0.1, at_least=0)

    def contract(self) -> Contract:
        """S down, s̃_i up, μ_i kept; one more pass."""
        return Contract(
            client=("multiplier",),
            down=("perturbation",),
            up=("perturbation",),
            forward=1,
            backward=1,
            after=("nesterov-momentum",),
        )

    def server_state(self, w: Tensor) -> Mapping[str, Tensor]:
        """`s = 0`."""
        return {"perturbation": torch.zeros_like(w)}

    def begin(self, local: Local) -> None:
        """μ_i changes in every step: work on a copy."""
        local.state["multiplier"] = local.kept("multiplier").clone()

    def shift(self, step: Step) -> None:
        """The client's best perturbation, given what the others agreed on."""
        local = step.local
        multiplier, shared = local.state["multiplier"], local.received["perturbation"]
        own = torch.sub(step.gradient(), multiplier, out=local.scratch("own perturbation"))
        own.sub_(shared)
        own.mul_(self.rho * inverse_norm(own))
        multiplier.add_(own).sub_(shared)
        step.move(own)

    def end(self, local: Local) -> Mapping[str, Tensor]:
        """`s̃_i = μ_i − ŝ` of the last step."""
        return {"perturbation": local.state["multiplier"] - local.scratch("own perturbation")}

    def receive(self, server: Server, upload: Upload) -> None:
        """Sum without weights; only the direction of the mean matters."""
        server.add("perturbation", upload.vectors["perturbation"])

    def finish(self, server: Server) -> None:
        """`s ← ρ n(mean s̃_i)`."""
        total = server.total("perturbation")
        scale = self.rho * inverse_norm(total.div_(server.accepted))
        torch.mul(total, scale, out=server.vector("perturbation"))
