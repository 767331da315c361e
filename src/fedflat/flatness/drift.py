"""How far clients' gradients point in different directions."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ..data.federation import Federation
from ..evaluation import LossFunction
from ..flat import FlatModel
from .clients import choose, fitting
from .surface import Surface
from .update_sums import Drift, UpdateSums


def gradient_drift(
    model: nn.Module | FlatModel,
    federation: Federation,
    clients: Sequence[int] | None = None,
    at: Tensor | None = None,
    loss: LossFunction = F.cross_entropy,
) -> Drift:
    """The diversity of `∇F_i(w)`, the clients' gradients on all their training data, and the cosines between them.

    Gradient diversity is Yin et al. (2018), Definition 1: `Σ‖∇F_i‖² / ‖Σ∇F_i‖²`. One forward and one backward pass
    over the data. During training `UpdateSums` gives the same of the clients' updates, at no pass at all.
    """
    flat = FlatModel.of(model)
    federation, sums = fitting(federation, flat), UpdateSums()
    for client in choose(federation, clients):
        sums.add(Surface(flat, federation.client(client), loss, at).value_and_gradient()[1])
    return sums.drift()
