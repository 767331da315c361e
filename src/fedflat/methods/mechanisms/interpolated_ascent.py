"""Ascent between the client's own perturbed model and the global one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.flat import axpy, inverse_norm
from ...core.parameters import number
from ..mechanism import Contract, Mechanism

if TYPE_CHECKING:
    from ...client.step import Step
    from ...core.messages import Upload
    from ...server.server import Server


PATIENCE = 10
"""Rounds after which a controller that has never let go of c = 1 is spoken of."""


class InterpolatedAscent(Mechanism):
    """The gradient is taken at `c w̃ + (1−c)(w_k + ρ n(∇ℓ(w_k)))`: FedGF (Lee and Yoon 2024).

    After every round the server sets `w̃ = w^{r+1} + ρ_g n(w^r − w^{r+1})` and c to the fraction of the last
    `window` rounds in which the clients diverged, `mean ‖Δ_i‖ > threshold`. Round 0 is FedSAM. A given `c` is
    constant, from round 1 on.
    """

    rho: float = number(default=0.05, at_least=0)
    threshold: float = number(default=0.2, at_least=0)
    window: int = number(default=30, at_least=1, whole=True)
    rho_global: float | None = number(default=None, at_least=0, optional=True)
    c: float | None = number(default=None, at_least=0, at_most=1, optional=True)

    def contract(self) -> Contract:
        """w̃ and c travel down; one more pass."""
        return Contract(down=("perturbed", "c"), forward=1, backward=1, stage={"shift": "ascend"})

    def server_state(self, w: Tensor) -> Mapping[str, Tensor | float | None]:
        """No perturbed model and no history yet; `divergence` is D, there to choose a threshold by."""
        return {"perturbed": None, "c": 0.0, "divergence": 0.0, "diverged": None}

    def shift(self, step: Step) -> None:
        """Interpolate two models: all displacements are from the point before this mechanism."""
        c, perturbed = step.local.received["c"], step.local.received.get("perturbed")
        if c == 1.0 and perturbed is not None:  # the fixed point w̃, wherever the client's own ascent leads
            step.move(torch.sub(perturbed, step.point, out=step.local.scratch("w̃ − w")))
            step.skip(forward=1, backward=1)
            return
        gradient = step.gradient()
        if perturbed is not None and c:
            step.move(torch.sub(perturbed, step.point, out=step.local.scratch("w̃ − w")), c)
        step.move(gradient, (1.0 - c) * self.rho * inverse_norm(gradient))

    def receive(self, server: Server, upload: Upload) -> None:
        """How far this client went."""
        server.count("distance", torch.linalg.vector_norm(upload.update).item())

    def finish(self, server: Server) -> None:
        """The controller, and the global perturbation for the next round."""
        divergence = server.counted("distance") / server.accepted
        diverged = float(divergence > self.threshold)
        history = server.get("diverged")
        past = history.tolist() if isinstance(history, Tensor) else []
        recent = torch.tensor([*past, diverged][-self.window :], dtype=torch.float64)
        server["diverged"], server["divergence"] = recent, divergence
        server["c"] = recent.mean().item() if self.c is None else self.c
        rho = self.rho if self.rho_global is None else self.rho_global
        if self.c is None and server.round + 1 == PATIENCE and bool(recent.all()):
            server.notice(
                f"interpolated-ascent: after {PATIENCE} rounds c is 1. The updates were longer than the threshold of "
                f"{self.threshold:g} in each of the last {len(recent)} rounds (their mean length D is now "
                f"{divergence:.3g}), so every local step takes its gradient at one and the same point, and training "
                "may fail. Choose a threshold near D, which is recorded as 'divergence', or train in fewer and "
                "smaller local steps."
            )
        server["perturbed"] = axpy(server.w, server.step, -rho * inverse_norm(server.step))
