"""How far the local models end up from the global one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from ..composition import MethodLike
from ..data.federation import Federation
from ..evaluation import LossFunction
from ..flat import FlatModel
from ..local_sgd import LocalSGD
from .clients import choose
from .local_round import local_round
from .update_sums import UpdateSums


@dataclass(frozen=True)
class FlatnessDistance:
    """The mean squared distance of local models."""

    distance: float
    """from the next global model"""
    to_average: float
    """from the clients' weighted average, which is another model if the server adds momentum or duals"""


def flatness_distance(
    model: nn.Module | FlatModel,
    federation: Federation,
    local: LocalSGD | None = None,
    method: MethodLike = "fedavg",
    clients: Sequence[int] | None = None,
    weighting: str = "samples",
    seed: int = 0,
    loss: LossFunction = F.cross_entropy,
) -> FlatnessDistance:
    """`(1/S) Σ ‖w_{i,K} − w^{t+1}‖²` over the clients of one round that starts at the model.

    FedNSAM (Liu et al. 2025), Definition 1. The round is trained with `local` and `method`, whose state has its
    initial value. During training `UpdateSums` gives the same for a round that happens anyway, at no pass at all.
    """
    chosen = choose(federation, clients)
    server, uploads = local_round(model, federation, local, method, chosen, weighting, seed, loss)
    start, sums = server.download(chosen[0]).start, UpdateSums()
    for upload in uploads:
        sums.add(upload.update)
    server.close()
    return FlatnessDistance(sums.distance(start, server.w), sums.distance(start, server.average))
