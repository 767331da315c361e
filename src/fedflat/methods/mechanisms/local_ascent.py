"""Ascent along the client's own gradient: the SAM step of FedSAM, and FedASAM's adaptive one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ...core.flat import inverse_norm
from ...core.parameters import number
from ..mechanism import Contract, Correction, Mechanism

if TYPE_CHECKING:
    from ...client.local import Local
    from ...client.step import Step


class LocalAscent(Mechanism):
    """`δ = ρ n(∇ℓ(w_k))`, then `d = (1−a) ∇ℓ(w_k) + a ∇ℓ(w_k+δ)` with `a = mix`.

    FedSAM (Qu et al. 2022; Caldarola et al. 2022) has a = 1. FedSpeed's text (Sun et al. 2023) has
    `normalize=False`, `δ = ρ ∇ℓ(w_k)`, and a free mixing weight.
    """

    rho: float = number(default=0.05, at_least=0)
    normalize: bool = True
    mix: float = number(default=1.0, at_least=0, at_most=1)

    def contract(self) -> Contract:
        """One more forward and backward pass per step; mixing comes before any correction."""
        stage = {"shift": "ascend"} | ({} if self.mix == 1.0 else {"direction": "mix"})
        return Contract(forward=1, backward=1, stage=stage)

    def shift(self, step: Step) -> None:
        """Move the point uphill."""
        if self.mix == 1.0:
            step.ascend(self.rho, self.normalize)
            return
        gradient = step.local.scratch(f"{self.name}: the first gradient").copy_(step.gradient())
        step.local.memo[self] = gradient
        step.move(gradient, self.rho * (inverse_norm(gradient) if self.normalize else 1.0))

    def correction(self, local: Local) -> Correction | None:
        """Nothing, where the second gradient alone counts."""
        return Correction() if self.mix == 1.0 else None

    def direction(self, step: Step, d: Tensor) -> None:
        """Mix the two gradients."""
        d.lerp_(step.local.memo[self], 1.0 - self.mix)


class AdaptiveAscent(Mechanism):
    """`δ = ρ T² g / ‖T g‖` with `T = |w_k| + η` on tensors named weight and 1 on all others.

    FedASAM (Caldarola et al. 2022), after ASAM; invariant to rescaling of the weights.
    """

    rho: float = number(default=0.7, at_least=0)
    eta: float = number(default=0.2, at_least=0)

    def contract(self) -> Contract:
        """One more forward and backward pass per step."""
        return Contract(forward=1, backward=1, stage={"shift": "ascend"})

    def begin(self, local: Local) -> None:
        """Mark the entries of weights."""
        local.memo[self] = local.layout.mask(is_weight)

    def shift(self, step: Step) -> None:
        """Move the point uphill, far where weights are large."""
        scale = 1.0 + step.local.memo[self] * (step.w.abs() + (self.eta - 1.0))
        gradient = step.gradient().mul_(scale)
        step.move(gradient * scale, self.rho * inverse_norm(gradient))


def is_weight(name: str) -> bool:
    """Whether a parameter's own name says that it is a weight."""
    return "weight" in name.split(".")[-1]
