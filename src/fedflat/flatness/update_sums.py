"""What a round's uploads say about flatness, from sums that are kept as they come."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.flat import SMALLEST_NORM
from ..errors import FedflatError


@dataclass(frozen=True)
class Drift:
    """How far clients pull in different directions; None where there is no direction to speak of."""

    diversity: float | None
    """`Σ‖Δ_i‖² / ‖ΣΔ_i‖²`: 1/S if all are alike, 1 if they are orthogonal, more if they cancel"""
    cosine: float | None
    """the mean over all pairs of clients of `cos(Δ_i, Δ_j)`"""
    cosine_to_mean: float | None
    """the mean over clients of `cos(Δ_i, ΣΔ_j)`"""
    norm: float
    """the root mean square of `‖Δ_i‖`"""
    clients: int


class UpdateSums:
    """Sums over clients' updates (or gradients): `ΣΔ_i`, `Σ n(Δ_i)` and `Σ‖Δ_i‖²`.

    They are all that flatness distance and drift need, so that a round gives both with two additions and one
    product of vectors per upload, no pass over data, and no upload kept. Clients count alike.
    """

    def __init__(self) -> None:
        self.count = self.directed = 0
        self.squares = 0.0
        self._sums: tuple[Tensor, Tensor] | None = None

    def add(self, update: Tensor) -> None:
        """Count in one client's `Δ_i`; it is not kept."""
        if self._sums is None:
            self._sums = torch.zeros_like(update), torch.zeros_like(update)
        whole, units = self._sums
        norm = torch.linalg.vector_norm(update).item()
        self.count += 1
        self.squares += norm**2
        whole.add_(update)
        if norm > SMALLEST_NORM:
            self.directed += 1
            units.add_(update, alpha=1 / norm)

    def distance(self) -> float:
        """`(1/S) Σ ‖Δ_i − Δ̄‖²`, Δ̄ the plain mean: FedNSAM's flatness distance, of local models from their average."""
        mean = self._known()[0] / self.count
        return max(0.0, self.squares / self.count - _square(mean))

    def distance_to(self, start: Tensor, w: Tensor) -> float:
        """`(1/S) Σ ‖start + Δ_i − w‖²`: of local models from any model w."""
        mean = self._known()[0] / self.count
        return self.distance() + _square(mean.add_(start).sub_(w))

    def drift(self) -> Drift:
        """Gradient diversity and cosines."""
        whole, units = self._known()
        total, number = _square(whole), self.directed
        pairs, somewhere = number * (number - 1), total > SMALLEST_NORM**2
        along = torch.sum(units * whole).item()
        return Drift(
            diversity=self.squares / total if somewhere else None,
            cosine=(_square(units) - number) / pairs if pairs else None,
            cosine_to_mean=along / (number * total**0.5) if somewhere else None,
            norm=(self.squares / self.count) ** 0.5,
            clients=self.count,
        )

    def _known(self) -> tuple[Tensor, Tensor]:
        if self._sums is None:
            raise FedflatError(
                "No update has been added: a round without uploads has no distance and no drift."
            )
        return self._sums


def _square(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector).item()) ** 2
