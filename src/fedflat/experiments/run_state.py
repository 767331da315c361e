"""What a run's next round depends on beside the model, again: what its server and its clients keep."""

from __future__ import annotations

from ..core.flat import FlatModel
from ..errors import FedflatError
from ..flatness.local_round import RunState
from ..methods.text import as_method
from ..models import build_model
from ..server.buffer_rules import BufferRules
from ..server.server import Server
from ..storage.checkpoint import read_checkpoint
from ..storage.client_store import ClientStore
from ..storage.run_files import LAST_FINITE
from .load_run import TrainedModel


class NoState(FedflatError):
    """What the next round depends on is not there."""


def run_state(trained: TrainedModel) -> RunState:
    """Where a run stands, from its last checkpoint; an error where that is gone and the method needs it."""
    run, model, experiment = trained.run, trained.model, trained.experiment.with_defaults()
    method = as_method(experiment.method)
    server = Server(
        model.vector.clone(), method, len(trained.federation), experiment.weighting, model.read_buffers()
    )
    server.rules = BufferRules.of(model)
    server.bound(experiment.norm_bound, experiment.over_bound == "clip")
    server.limit(experiment.max_share, experiment.aggregate)
    initial = None
    if experiment.buffers == "reset":
        assert isinstance(experiment.seed, int)
        built = build_model(experiment.model or "mlp", trained.federation, experiment.seed)
        initial = FlatModel(built, model.vector.dtype).read_buffers()
    if (run / "federation.json").exists():
        raise NoState(
            f"{run} is a real federation's, whose clients' data and states are on their own nodes: no further round "
            "can be trained here. Measure in a simulation."
        )
    diverged = (run / LAST_FINITE).exists()  # checkpoints are older than that model
    checkpoints = [] if diverged else sorted((run / "checkpoints").glob("round-*.safetensors"))
    if not checkpoints:
        cost = method.cost
        if server.state or cost.client or cost.server_per_client or experiment.buffers == "local":
            raise NoState(
                f"{method.name}'s next round depends on states, and those of {run} "
                f"{'were not kept when it diverged' if diverged else 'were removed when it was done'}. "
                "Measure while it trains (`measure` in the experiment), or train with the states kept (`fedflat "
                "sweep` and `reproduce`: --keep-states)."
            )
        return RunState(server, ClientStore(), trained.round, experiment.buffers, initial)
    vectors, numbers = read_checkpoint(checkpoints[-1])
    if numbers.pop("rounds done") != trained.round:
        raise FedflatError(f"{run} has gone on meanwhile. Measure it again, best when it is done.")
    server.restore(vectors, numbers)
    clients, server.per_client = (
        ClientStore.restore(
            run / "state" / side, checkpoints[-1].stem, budget=0
        )  # read when needed, never held
        for side in ("clients", "server")
    )
    return RunState(server, clients, trained.round, experiment.buffers, initial)
