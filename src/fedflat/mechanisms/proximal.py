"""FedProx's pull back to the received model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..mechanism import Contract, Mechanism, number
from .momentum_blend import BLENDS

if TYPE_CHECKING:
    from ..local import Step


class Proximal(Mechanism):
    """`d ← d + μ (w_k − a)`, the gradient of `μ/2 ‖w_k − a‖²`, a the model received (Li et al. 2020)."""

    mu: float = number(default=0.1, at_least=0)

    def contract(self) -> Contract:
        """Nothing travels, nothing is kept."""
        return Contract(after=(*BLENDS, "control-variates"))

    def direction(self, step: Step, d: Tensor) -> None:
        """Pull back."""
        offset = torch.sub(step.w, step.local.start, out=step.local.scratch("w − start"))
        d.add_(offset, alpha=self.mu)
