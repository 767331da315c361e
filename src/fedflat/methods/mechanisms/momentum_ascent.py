"""Ascent along the server's momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.flat import inverse_norm
from ...core.parameters import number
from ..mechanism import Contract, Mechanism, Move

if TYPE_CHECKING:
    from ...client.local import Local


class MomentumAscent(Mechanism):
    """`δ = −ρ n(m)`: m leads downhill, so −m leads uphill. No extra pass.

    FedNSAM (Liu et al. 2025), the perturbation of Algorithm 1.
    """

    rho: float = number(default=0.1, at_least=0)

    def contract(self) -> Contract:
        """Needs the server's momentum at the clients."""
        return Contract(down=("momentum",))

    def steady_shift(self, local: Local) -> Move:
        """Move against the momentum."""
        momentum = local.received["momentum"]
        return momentum, -self.rho * inverse_norm(momentum)
