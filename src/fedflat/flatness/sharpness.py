"""SAM's sharpness of a model on given data."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.evaluation import LossFunction
from ..core.flat import FlatModel, axpy, inverse_norm
from ..data.federation import Federation, Shard
from .surface import Surface


def sharpness(
    model: nn.Module | FlatModel,
    data: Shard | Federation,
    rho: float = 0.05,
    at: Tensor | None = None,
    loss: LossFunction = F.cross_entropy,
) -> float:
    """`S_ρ(w) = L(w + ρ n(∇L(w))) − L(w)`, L the mean loss on all of `data`, in evaluation mode.

    FedGMT (Li et al. 2025), Eq. 4, on a federation: all clients' training data. Of the test data: `federation.test`.
    Two forward passes and a backward one.
    """
    surface = Surface(model, data, loss, at)
    value, gradient = surface.value_and_gradient()
    uphill = axpy(surface.w, gradient, rho * inverse_norm(gradient))
    return surface.value(uphill) - value
