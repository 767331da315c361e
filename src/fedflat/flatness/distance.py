"""How far apart the local models end up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from ..client.optimisers import LocalOptimiser
from ..core.evaluation import LossFunction
from ..core.flat import FlatModel
from ..data.federation import Federation
from ..methods.text import MethodLike
from .local_round import RunState, local_round
from .update_sums import UpdateSums


@dataclass(frozen=True)
class FlatnessDistance:
    """The mean squared distance of local models."""

    distance: float
    """from their plain average: FedNSAM's Definition 1"""
    to_server: float
    """from the server's next model, which weights, momentum or duals lead elsewhere"""


def flatness_distance(
    model: nn.Module | FlatModel,
    federation: Federation,
    local: LocalOptimiser | None = None,
    method: MethodLike | None = None,
    clients: Sequence[int] | None = None,
    weighting: str = "samples",
    seed: int = 0,
    loss: LossFunction = F.cross_entropy,
    after: RunState | None = None,
) -> FlatnessDistance:
    """`(1/S) Σ ‖w_{i,K} − w̄‖²`, w̄ the plain average of the `w_{i,K}`, over the clients of one round.

    FedNSAM (Liu et al. 2025), Definition 1. The round starts at the model and is trained with `local` and `method`,
    FedAvg by default, whose state has its initial value; or it is the next one `after` what a run has done. During
    training `UpdateSums` gives the same for a round that happens anyway, at no pass at all.
    """
    server, uploads = local_round(model, federation, local, method, clients, weighting, seed, loss, after)
    start, sums = server.start, UpdateSums()
    for upload in uploads:
        sums.add(upload.local_update)
    server.close()
    return FlatnessDistance(sums.distance(), sums.distance_to(start, server.w))
