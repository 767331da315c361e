"""One round of local training from a model, for measures that are about the local models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ..composition import MethodLike, as_method
from ..data.federation import Federation
from ..evaluation import LossFunction
from ..flat import FlatModel
from ..local_sgd import LocalSGD
from ..local_training import LocalTraining
from ..messages import Upload
from ..server import Server
from .clients import choose, fitting


def local_round(
    model: nn.Module | FlatModel,
    federation: Federation,
    local: LocalSGD | None = None,
    method: MethodLike = "fedavg",
    clients: Sequence[int] | None = None,
    weighting: str = "samples",
    seed: int = 0,
    loss: LossFunction = F.cross_entropy,
) -> tuple[Server, Iterator[Upload]]:
    """A server at the model, and the uploads of clients that train from there, each already received.

    The round is the first of a run that starts at this model: what the method keeps has its initial value. Close
    the server when the uploads are through. The model itself is not touched.
    """
    flat = FlatModel.of(model)
    flat = flat.copy(flat.vector.device)
    federation, chosen = fitting(federation, flat), choose(federation, clients)
    method, sgd = as_method(method), local or LocalSGD()
    server = Server(flat.vector.clone(), method, len(federation), weighting, flat.read_buffers())
    server.open(0, sgd.lr_in(0))
    training = LocalTraining(flat, method, sgd, loss, seed)

    def uploads() -> Iterator[Upload]:
        for client in chosen:
            with torch.enable_grad():
                upload = training.run(client, federation.client(client), server.download(client), {})
            server.receive(upload)
            yield upload

    return server, uploads()
