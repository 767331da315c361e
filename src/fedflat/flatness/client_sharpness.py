"""SAM's sharpness of one model on every client's own data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.evaluation import LossFunction
from ..core.flat import FlatModel
from ..data.federation import Federation
from .clients import choose, fitting
from .sharpness import sharpness


@dataclass(frozen=True)
class ClientSharpness:
    """The sharpness of each client's loss."""

    mean: float
    """weighted by the clients' samples: `Σ (m_i/m) S_i`"""
    std: float
    """deviation of the clients' values from it, with the same weights"""
    largest: float
    clients: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, clients: Sequence[int], values: Sequence[float], samples: Sequence[int]) -> ClientSharpness:
        """From values that are known."""
        shares = [size / sum(samples) for size in samples]
        mean = math.fsum(share * value for share, value in zip(shares, values, strict=True))
        variance = math.fsum(share * (value - mean) ** 2 for share, value in zip(shares, values, strict=True))
        return cls(mean, math.sqrt(variance), max(values), tuple(clients), tuple(values))


def client_sharpness(
    model: nn.Module | FlatModel,
    federation: Federation,
    rho: float = 0.05,
    clients: Sequence[int] | None = None,
    at: Tensor | None = None,
    loss: LossFunction = F.cross_entropy,
) -> ClientSharpness:
    """`F_i(w + ρ n(∇F_i(w))) − F_i(w)` for every client i, F_i the mean loss on its training data.

    FedGMT (Li et al. 2025), Eq. 4, on one client's data at a time, at the same global w. All clients unless some
    are named. Two forward passes and a backward one over their data.
    """
    flat = FlatModel.of(model)
    federation, chosen = fitting(federation, flat), choose(federation, clients)
    values = [sharpness(flat, federation.client(client), rho, at, loss) for client in chosen]
    return ClientSharpness.of(chosen, values, [federation.size(client) for client in chosen])
