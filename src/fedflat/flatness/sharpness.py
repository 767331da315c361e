"""SAM's sharpness of a model on given data."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..evaluation import BATCH, evaluate
from ..flat import FlatModel, inverse_norm
from ..local import LossFunction


def sharpness(
    model: nn.Module | FlatModel,
    data: tuple[Tensor, Tensor],
    rho: float = 0.05,
    at: Tensor | None = None,
    loss: LossFunction = F.cross_entropy,
) -> float:
    """`S_ρ(w) = L(w + ρ n(∇L(w))) − L(w)`, L the mean loss on all of `data`, in evaluation mode.

    FedGMT (Li et al. 2025), Eq. 4, when `data` is the union of the clients' training data.
    """
    model = FlatModel.of(model)
    w = (model.vector if at is None else at).clone()
    inputs, targets = data
    gradient = w.new_zeros(w.shape)
    with model.evaluating():
        for first in range(0, len(targets), BATCH):
            x, y = inputs[first : first + BATCH], targets[first : first + BATCH]
            part = model.gradient(lambda module, x=x, y=y: loss(module(x), y), at=w)  # type: ignore[misc]
            gradient.add_(part, alpha=len(y) / len(targets))
    uphill = w.add(gradient, alpha=rho * inverse_norm(gradient))
    return evaluate(model, uphill, data, loss).loss - evaluate(model, w, data, loss).loss
