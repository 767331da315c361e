"""SAM's sharpness of a model on given data."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..data.federation import Shard
from ..evaluation import BATCH, evaluate
from ..flat import FlatModel, inverse_norm
from ..local import LossFunction


def sharpness(
    model: nn.Module | FlatModel,
    data: Shard,
    rho: float = 0.05,
    at: Tensor | None = None,
    loss: LossFunction = F.cross_entropy,
) -> float:
    """`S_ρ(w) = L(w + ρ n(∇L(w))) − L(w)`, L the mean loss on all of `data`, in evaluation mode.

    FedGMT (Li et al. 2025), Eq. 4, when `data` is `federation.union()`, all clients' training data.
    """
    model = FlatModel.of(model)
    w = (model.vector if at is None else at).clone()
    gradient, part = w.new_zeros(w.shape), w.new_empty(w.shape)
    with model.at(w), model.evaluating() as module:
        for inputs, targets in data.batches(BATCH):
            model.differentiate(loss(module(inputs), targets), model.split(part))
            gradient.add_(part, alpha=len(targets) / len(data))
    uphill = w.add(gradient, alpha=rho * inverse_norm(gradient))
    return evaluate(model, uphill, data, loss).loss - evaluate(model, w, data, loss).loss
