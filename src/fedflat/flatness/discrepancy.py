"""How much the global loss differs in sharpness from the local ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from ..client.optimisers import LocalOptimiser
from ..core.evaluation import LossFunction
from ..core.flat import FlatModel
from ..data.federation import Federation
from ..methods.text import MethodLike
from .client_sharpness import ClientSharpness
from .clients import choose, fitting
from .local_round import RunState, local_round
from .sharpness import sharpness


@dataclass(frozen=True)
class LocalModel:
    """What a client's local training led to: `start + update` of its upload, and the upload's buffers."""

    client: int
    w: Tensor
    buffers: Tensor | None = None


@dataclass(frozen=True)
class Discrepancy:
    """The flatness discrepancy, and what it is the difference of."""

    discrepancy: float
    global_sharpness: float
    local_sharpness: ClientSharpness


def flatness_discrepancy(
    model: nn.Module | FlatModel,
    federation: Federation,
    rho: float = 0.05,
    local: LocalOptimiser | None = None,
    method: MethodLike | None = None,
    clients: Sequence[int] | None = None,
    seed: int = 0,
    local_models: Iterable[LocalModel] | None = None,
    loss: LossFunction = F.cross_entropy,
    after: RunState | None = None,
) -> Discrepancy:
    """`| S_ρ(F; w) − Σ (m_i/m) S_ρ(F_i; w_i) |`, S_ρ the sharpness, F over all clients and F_i over client i.

    FedGF (Lee & Yoon 2024), Eq. 7, each maximum by one normalised ascent step on all of the data. The local models
    w_i are trained from w in one round of `method`, FedAvg by default, with `local`, or in the next one `after` what
    a run has done; or give those of a round that happened, as `local_models`: then it costs two forward passes and a
    backward one over the union, and over each client. Eq. 7 has all clients; `clients` names some.
    """
    flat = FlatModel.of(model)
    if after is not None:
        flat = flat.copy(flat.vector.device)
        flat.vector.copy_(after.server.w)
        flat.write_buffers(after.server.buffers)
    federation = fitting(federation, flat)
    whole = sharpness(flat, federation, rho, loss=loss)
    if local_models is None:
        local_models = _train(flat, federation, local, method, choose(federation, clients), seed, loss, after)
    own = flat.copy(flat.vector.device)  # buffers of the local models go here
    names, values = [], []
    for one in local_models:
        own.write_buffers(one.buffers if one.buffers is not None else flat.read_buffers())
        names.append(one.client)
        values.append(sharpness(own, federation.client(one.client), rho, one.w, loss))
    each = ClientSharpness.of(names, values, [federation.size(name) for name in names])
    return Discrepancy(abs(whole - each.mean), whole, each)


def _train(
    model: FlatModel,
    federation: Federation,
    local: LocalOptimiser | None,
    method: MethodLike | None,
    clients: Sequence[int],
    seed: int,
    loss: LossFunction,
    after: RunState | None,
) -> Iterator[LocalModel]:
    server, uploads = local_round(
        model, federation, local, method, clients, seed=seed, loss=loss, after=after
    )
    for upload in uploads:
        yield LocalModel(upload.client, server.start + upload.local_update, upload.buffers)
