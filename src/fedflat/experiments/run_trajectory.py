"""Where a client would go from the end of a run on, with the run's own method or another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ..errors import FedflatError
from ..flatness.trajectory import local_trajectory
from ..methods.text import as_method
from ..server.server import Server
from .build import make_local
from .load_run import TrainedModel, load_run
from .run_state import run_state


def paths_of(
    run: str | Path, client: int, methods: Sequence[str], data: str | None = None
) -> tuple[TrainedModel, dict[str, list[Tensor]]]:
    """The run's model, and a client's steps of the round after the last, by method.

    Every method finds what the run keeps under the names it uses, such as FedGMT's average and the client's dual;
    what the run does not keep has its initial value.
    """
    trained = load_run(run, data=data)
    federation, experiment = trained.federation, trained.experiment
    if client >= len(federation):
        raise FedflatError(f"There is no client {client}: {run} has {len(federation)}, counted from 0.")
    after, sgd = run_state(trained), make_local(experiment.with_defaults(len(federation)).local)
    assert isinstance(experiment.seed, int)  # a run has one
    own, paths = after.clients.get(client), {}
    for text in methods:
        method = as_method(text)
        server = Server(trained.model.vector.clone(), method, len(federation))
        for name in server.state:
            kept = after.server.get(name)
            server.state[name] = server.state[name] if kept is None else kept
        server.per_client = after.server.per_client
        server.open(trained.round, sgd.lr_in(trained.round), sgd.rate_sum)
        paths[text] = local_trajectory(
            trained.model,
            client,
            federation.client(client),
            method,
            sgd,
            server.download(client).values,
            {name: vector for name, vector in own.items() if name in method.cost.client},
            trained.round,
            experiment.seed,
        )
    return trained, paths
