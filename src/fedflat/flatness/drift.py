"""How far clients' updates, or their gradients, point in different directions."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ..client.optimisers import LocalOptimiser
from ..core.evaluation import LossFunction
from ..core.flat import FlatModel
from ..data.federation import Federation
from ..methods.text import MethodLike
from .clients import choose, fitting
from .local_round import RunState, local_round
from .surface import Surface
from .update_sums import Drift, UpdateSums


def update_drift(
    model: nn.Module | FlatModel,
    federation: Federation,
    local: LocalOptimiser | None = None,
    method: MethodLike | None = None,
    clients: Sequence[int] | None = None,
    seed: int = 0,
    loss: LossFunction = F.cross_entropy,
    after: RunState | None = None,
) -> Drift:
    """The diversity of the clients' updates `Δ_i` in one round, and the cosines between them.

    The round starts at the model and is trained with `local` and `method`, FedAvg by default, whose state has its
    initial value; or it is the next one `after` what a run has done. During training `UpdateSums` gives the same for
    a round that happens anyway, at no pass at all.
    """
    sums = UpdateSums()
    for upload in local_round(model, federation, local, method, clients, seed=seed, loss=loss, after=after)[
        1
    ]:
        sums.add(upload.local_update)
    return sums.drift()


def gradient_drift(
    model: nn.Module | FlatModel,
    federation: Federation,
    clients: Sequence[int] | None = None,
    at: Tensor | None = None,
    loss: LossFunction = F.cross_entropy,
) -> Drift:
    """The diversity of `∇F_i(w)`, the clients' gradients on all their training data, and the cosines between them.

    Gradient diversity is Yin et al. (2018), Definition 1: `Σ‖∇F_i‖² / ‖Σ∇F_i‖²`. One forward and one backward pass
    over the data.
    """
    flat = FlatModel.of(model)
    federation, sums = fitting(federation, flat), UpdateSums()
    for client in choose(federation, clients):
        sums.add(Surface(flat, federation.client(client), loss, at).value_and_gradient()[1])
    return sums.drift()
