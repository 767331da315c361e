"""The way of a client's local training through the weights, step by step (FedGMT, Figure 6)."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from ..client.optimisers import LocalOptimiser
from ..client.round import ClientRound
from ..core.evaluation import LossFunction
from ..core.flat import FlatModel
from ..core.messages import Download
from ..data.federation import Shard
from ..methods.mechanism import Value
from ..methods.text import MethodLike, as_method


def local_trajectory(
    model: nn.Module | FlatModel,
    client: int,
    data: Shard,
    method: MethodLike,
    local: LocalOptimiser,
    received: Mapping[str, Value] | None = None,
    state: Mapping[str, Tensor] | None = None,
    round: int = 0,
    seed: int = 0,
    loss: LossFunction = F.cross_entropy,
) -> list[Tensor]:
    """Where a client is after every local step of a round that starts at the model, the start first.

    `received` are the vectors and numbers that the method's server sends beside the model, such as `r.server.state`
    in `on_round`; `state` is what the client keeps, such as `run.clients.get(client)`.
    """
    flat = FlatModel.of(model)
    start = flat.vector.clone()
    training, path = ClientRound(flat, as_method(method), local, loss, seed), [start]
    download = Download(round, local.lr_in(round), start, dict(received or {}), flat.read_buffers())
    buffers = flat.read_buffers()
    try:
        training.run(client, data, download, dict(state or {}), lambda step: path.append(step.w.clone()))
    finally:
        flat.vector.copy_(start)
        flat.write_buffers(buffers)
    return path
