"""Clients that agree on one perturbation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.flat import Scalar, axpy, axpy_, inverse_norm
from ...core.parameters import number
from ..mechanism import Contract, Mechanism

if TYPE_CHECKING:
    from ...client.local import Local
    from ...client.step import Step
    from ...core.messages import Upload
    from ...server.server import Server


@dataclass
class _Steps:
    """What a client's steps change."""

    offset: Tensor
    """`μ_i + s`"""
    own: Tensor
    """ŝ before it is scaled to length"""
    length: Scalar = 0.0
    """what ŝ is scaled by"""


class SharedPerturbation(Mechanism):
    """Every step `ŝ = ρ n(∇ℓ(w_k) − μ_i − s)`, `μ_i ← μ_i + ŝ − s`, gradient at `w_k + ŝ`.

    FedSMOO (Sun et al. 2023): the client uploads `s̃_i = μ_i − ŝ` of its last step, and the server sends
    `s ← ρ n(mean s̃_i)` in the next round. μ_i stays with the client.
    """

    rho: float = number(default=0.1, at_least=0)

    def contract(self) -> Contract:
        """`s` down, `s̃_i` up, `μ_i` kept; one more pass."""
        return Contract(
            client=("multiplier",),
            down=("perturbation",),
            up=("perturbation",),
            forward=1,
            backward=1,
            stage={"shift": "ascend"},
        )

    def server_state(self, w: Tensor) -> Mapping[str, Tensor]:
        """`s = 0`."""
        return {"perturbation": torch.zeros_like(w)}

    def begin(self, local: Local) -> None:
        """Only `μ_i + s` is needed in the steps."""
        offset = local.kept("multiplier") + local.received["perturbation"]
        local.memo[self] = _Steps(offset, local.scratch("own perturbation"))

    def shift(self, step: Step) -> None:
        """The client's best perturbation, given what the others agreed on."""
        steps: _Steps = step.local.memo[self]
        torch.sub(step.gradient(), steps.offset, out=steps.own)
        steps.length = self.rho * inverse_norm(steps.own)
        axpy_(steps.offset, steps.own, steps.length).sub_(step.local.received["perturbation"])
        step.move(steps.own, steps.length)

    def end(self, local: Local) -> Mapping[str, Tensor]:
        """`s̃_i = μ_i − ŝ` of the last step."""
        steps: _Steps = local.memo[self]
        multiplier = steps.offset - local.received["perturbation"]
        local.state["multiplier"] = multiplier
        return {"perturbation": axpy(multiplier, steps.own, -steps.length)}

    def receive(self, server: Server, upload: Upload) -> None:
        """Sum without weights; only the direction of the mean matters."""
        server.add("perturbation", upload.vectors["perturbation"])

    def finish(self, server: Server) -> None:
        """`s ← ρ n(mean s̃_i)`."""
        total = server.total("perturbation")
        scale = self.rho * inverse_norm(total.div_(server.accepted))
        torch.mul(total, scale, out=server.vector("perturbation"))
