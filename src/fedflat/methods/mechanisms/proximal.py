"""FedProx's pull back to the received model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.parameters import number
from ..mechanism import Contract, Correction, Mechanism

if TYPE_CHECKING:
    from ...client.local import Local


class Proximal(Mechanism):
    """`d ← d + μ (w_k − a)`, the gradient of `μ/2 ‖w_k − a‖²`, a the model received (Li et al. 2020)."""

    mu: float = number(default=0.1, at_least=0)

    def contract(self) -> Contract:
        """Nothing travels, nothing is kept."""
        return Contract(stage={"direction": "pull"})

    def correction(self, local: Local) -> Correction:
        """Pull back."""
        return Correction(pull=self.mu, vectors=((local.start, -self.mu),))
