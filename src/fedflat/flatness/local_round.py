"""One round of local training from a model, for measures that are about the local models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..client.optimisers import LocalOptimiser, LocalSGD
from ..client.round import ClientRound
from ..core.evaluation import LossFunction
from ..core.flat import FlatModel
from ..core.messages import Upload
from ..data.federation import Federation
from ..errors import FedflatError
from ..methods.text import MethodLike, as_method
from ..server.server import Server
from ..server.uploads import RejectedUpload
from ..storage.client_store import ClientStore
from .clients import choose, fitting


@dataclass(frozen=True)
class RunState:
    """Where a run stands: all that its next round depends on, beside data and local training.

    Of a run in this process, `RunState(run.server, run.clients, len(run.history))`; none of it is changed.
    """

    server: Server
    clients: ClientStore
    """what the clients keep"""
    round: int
    """how many rounds are behind it"""
    buffers: str = "average"
    """what becomes of the model's, as `train` says"""
    initial_buffers: Tensor | None = None
    """what they are reset to, if `buffers` is "reset" """


def local_round(
    model: nn.Module | FlatModel,
    federation: Federation,
    local: LocalOptimiser | None = None,
    method: MethodLike | None = None,
    clients: Sequence[int] | None = None,
    weighting: str = "samples",
    seed: int = 0,
    loss: LossFunction = F.cross_entropy,
    after: RunState | None = None,
) -> tuple[Server, Iterator[Upload]]:
    """A server at the model, and the uploads of clients that train from there, each already received.

    The round is the first of a run of `method`, by default FedAvg, that starts at this model: what the method keeps
    has its initial value. With `after` it is the next one of the run that stands there, with that run's method,
    weighting, state and learning rate, from its server's model; what its server refuses is left out. Close the server
    when the uploads are through. Neither the model nor the state is touched.
    """
    flat = FlatModel.of(model)
    flat = flat.copy(flat.vector.device)
    federation, chosen = fitting(federation, flat), choose(federation, clients)
    sgd = local or LocalSGD()
    if after is None:
        made = as_method("fedavg" if method is None else method)
        server = Server(flat.vector.clone(), made, len(federation), weighting, flat.read_buffers())
        round, buffers = 0, "average"
    else:
        if method is not None:
            raise FedflatError(
                f"method={method}: the round after a run is one of its own method, {after.server.method.name}. "
                "Leave out the one or the other."
            )
        server, round, buffers = after.server.copy(), after.round, after.buffers
        flat.write_buffers(after.initial_buffers)
    server.open(round, sgd.lr_in(round), sgd.rate_sum)
    training = ClientRound(flat, server.method, sgd, loss, seed, buffers, measured=True)

    def state(client: int) -> dict[str, Tensor]:
        return {} if after is None else after.clients.get(client)

    def uploads() -> Iterator[Upload]:
        for client in chosen:
            with torch.enable_grad():
                upload = training.run(
                    client, federation.client(client), server.download(client), state(client)
                )
            try:
                server.receive(upload)
            except RejectedUpload:
                if after is None:
                    raise
                continue
            yield upload

    return server, uploads()
