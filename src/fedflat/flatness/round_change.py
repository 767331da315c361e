"""How much a round lowered the loss of the clients that took part."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.evaluation import LossFunction
from ..core.flat import FlatModel
from ..data.federation import Federation
from .clients import choose, fitting
from .surface import Surface


def round_loss_change(
    model: nn.Module | FlatModel,
    federation: Federation,
    before: Tensor,
    after: Tensor,
    clients: Sequence[int],
    loss: LossFunction = F.cross_entropy,
) -> float:
    """`L_N(w^t) − L_N(w^{t+1})`, L_N the mean loss on all training data of the active clients N.

    What FedGMT's released code records in place of its sharpness (and without a sign for FedAvg and FedSAM). Two
    forward passes over those clients' data.
    """
    flat = FlatModel.of(model)
    federation = fitting(federation, flat)
    change, samples = 0.0, 0
    for client in choose(federation, clients):
        surface = Surface(flat, federation.client(client), loss)
        change += federation.size(client) * (surface.value(before) - surface.value(after))
        samples += federation.size(client)
    return change / samples
