"""`train()`: one call from a federation to a trained model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from ..client.optimisers import LocalOptimiser, LocalSGD
from ..core.allocator import give_back, keep_memory
from ..core.finite import check_lr
from ..core.flat import FlatModel
from ..core.monitor import Monitor
from ..core.tasks import LossFunction
from ..core.threads import computing_with
from ..data.federation import Federation
from ..data.fingerprint import fingerprint
from ..engines.base import Engine, Job, make_engine, taken
from ..engines.workers.spawning import leave_if_imported
from ..errors import Diverged, FedflatError
from ..methods.method import Method
from ..methods.text import MethodLike, as_method
from ..models import build_model
from ..models.conv.conv2d import PLAIN, count_ways, set_column, set_recorded
from ..server.buffer_rules import BufferRules
from ..server.participation import Participation, as_participation
from ..server.server import Server
from ..storage.client_store import ClientStore, parse_size
from ..storage.environment import check_device
from ..storage.run_directory import RunDirectory
from ..storage.run_files import is_begun, read_settings
from .callbacks import Callback, Callbacks, OnRound, RoundsOnDisk
from .client_scores import ClientScores
from .evaluation import check_method, plan_evaluation
from .loop import TrainingLoop
from .losses import make_loss
from .record import RoundRecord
from .sameness import of_loss, of_mechanisms, of_module
from .settings import TrainingSettings, takes_settings

if TYPE_CHECKING:
    from .progress import RunProgress


@dataclass
class Run:
    """A training: one row per round, the trained module, and the server as it ended."""

    method: Method
    history: list[dict[str, Any]]
    model: nn.Module
    server: Server
    clients: ClientStore
    """what the clients kept, in a simulation"""
    settings: TrainingSettings = field(default_factory=TrainingSettings)
    monitor: Monitor = field(default_factory=Monitor)
    """the metric that the run is compared by"""
    loss: LossFunction = F.cross_entropy
    """what was minimised"""

    @property
    def accuracy(self) -> float | None:
        """Test accuracy after the last evaluated round."""
        evaluated = [row["accuracy"] for row in self.history if row["accuracy"] is not None]
        return evaluated[-1] if evaluated else None

    @property
    def monitored(self) -> list[float]:
        """The monitored metric in every test, in order."""
        return [value for row in self.history if (value := self.monitor.of(row)) is not None]

    def total(self, column: str) -> float:
        """The sum of a column over all rounds, such as `bytes_up` or `forward`."""
        return float(sum(row[column] for row in self.history))


@takes_settings
def train(
    federation: Federation,
    model: str | nn.Module = "mlp",
    method: MethodLike = "fedavg",
    local: LocalOptimiser | None = None,
    participation: Participation | int | None = None,
    *,
    engine: str | Engine = "inprocess",
    out: str | Path | None = None,
    resume: bool = False,
    keep_states: bool = True,
    progress: bool = False,
    on_round: Callable[[RoundRecord], None] | None = None,
    stop: Callable[[], bool] | None = None,
    callbacks: Sequence[Callback] = (),
    overlap: bool | None = None,
    on_measure: Callable[[str], None] | None = None,
    experiment: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    **settings: Any,
) -> Run:
    """Train one model across the clients of a federation.

    Args:
        federation: the clients' data and the test set.
        model: a name (see `fedflat.models`), or any module: its current weights are the start, unchanged.
        method: a method, its name, a composition such as `"local-ascent(rho=0.05) + control-variates"`, a mechanism,
            or a list of these.
        local: the clients' optimiser: `LocalSGD`, which is the default, `LocalAdam` or `LocalAdamW`.
        participation: who takes part; a number n is `Uniform(n)`, None is `Everyone()`.
        engine: where clients run: `"inprocess"`, `"workers"`, or for example `Workers(4)`.
        out: a directory to write metrics, checkpoints and the trained model to.
        resume: resume the run that `out` holds, if there is one, after its last checkpoint. The result has the same
            bits as without the interruption.
        keep_states: whether a finished run in `out` keeps what training it longer takes: checkpoints and what is kept
            per client, which can be large.
        progress: show the command line's progress bar, in a terminal and in notebooks; elsewhere a few plain lines.
        on_round: called after every round with its `RoundRecord`: the short form of a callback.
        stop: asked after every round; if it says True, the run ends there with a checkpoint, and can be resumed.
        callbacks: objects that look on, each a `Callback` with `begin(run)`, `round(record)` and `end(run)`; where
            `round` returns True, the run ends as with `stop`.
        overlap: whether workers without a client may test a round's model while the next round trains. The numbers
            are the same, but callbacks are told a round later, when `record.server` has moved on. By default only
            where none of them could tell.
        on_measure: told the name of a measure that is being taken, and `""` when it is done.
        experiment: the experiment that this run is, as in its file: kept in `out`, for `fedflat resume`.
        notes: sentences to keep in `out`, in run.json, with those that the federation has as `caveats`.
        **settings: every field of `TrainingSettings`:
    """
    chosen = TrainingSettings.of(settings)
    _check_kinds(federation, model, local)
    check_device(chosen.device)
    leave_if_imported()
    method, participation, sgd = as_method(method), as_participation(participation), local or LocalSGD()
    dtype, device = getattr(torch, chosen.dtype), chosen.device
    if resume and out is None:
        raise FedflatError("resume=True: name the directory of the run to resume, out=....")
    participation.check(len(federation), chosen.rounds)
    check_lr(sgd.lr_in(chosen.rounds - 1), sgd.lr_in(0), dtype)
    if not chosen.test:
        federation = federation.without_test()
    watching = [*callbacks]
    if on_round is not None:
        watching.append(OnRound(on_round))
    if progress:
        bar = _progress()
        watching.append(bar)
        on_measure = on_measure or bar.measuring

    with ExitStack() as cleanup:
        cleanup.callback(give_back)
        cleanup.enter_context(computing_with(chosen.threads))
        keep_memory()
        print_of_data = "" if out is None else fingerprint(federation)  # as given, whatever the dtype
        federation = federation.to(dtype, device)
        whole = federation
        if chosen.validation is not None:
            _check_data_is_sent(engine)
            federation = federation.with_validation(chosen.validation, chosen.seed)
        loss, found = make_loss(chosen.loss, chosen.task, federation)
        if found:
            warnings.warn(found, stacklevel=2)
        metrics, monitor = plan_evaluation(chosen, federation, loss)
        module = (
            build_model(model, federation, chosen.seed) if isinstance(model, str) else copy.deepcopy(model)
        )
        if not chosen.fast:
            set_column(module, PLAIN)
        elif resume and out is not None and is_begun(out):
            set_recorded(module, read_settings(out, to_resume=True))
        flat = FlatModel(module, dtype, device)
        check_method(method, flat, federation, loss)
        server, budget = _make_server(flat, method, len(federation), chosen)
        recording = None
        if chosen.measure:
            from ..flatness.recording import Recording

            measured_on = federation if chosen.validation is None else federation.without_test()
            recording = Recording(chosen.measure, flat, measured_on, loss, sgd, on_measure)
            watching.insert(0, recording)
        where = make_engine(engine)
        cleanup.enter_context(taken(where))

        directory, store = None, ClientStore(budget=budget, device=device)
        history: list[dict[str, Any]] = []
        if out is not None:
            said = chosen.to_dict()
            about = {
                "method": method.name,
                "mechanisms": str(method),
                "mechanism_code": of_mechanisms(method.mechanisms),
                "federation": {**federation.about(), "fingerprint": print_of_data},
                "model": model if isinstance(model, str) else type(module).__name__,
                **({} if isinstance(model, str) else {"module": of_module(model)}),
                "parameters": flat.size,
                "local": sgd.to_dict(),
                "participation": str(participation),
                **said,
                "loss": of_loss(chosen.loss if callable(chosen.loss) else loss),
                "monitored": monitor.to_dict(),
                "norm_bound": chosen.norm_bound and server.norm_bounds.to_dict(),  # however it was written
                "convolutions": _convolutions(flat, federation, sgd),
                "notes": [*federation.caveats, *notes],
                "how": {"engine": _engine_name(engine), **said["how"]},
            }
            directory = RunDirectory(
                out, about, resume, chosen.checkpoint_every, experiment, keep_states, federation.preprocessing
            )
            cleanup.callback(directory.close)
            store, history = directory.open_state(server, budget, device)
            held = flat.read_buffers()
            if server.buffers is not None and held is not None and held.shape != server.buffers.shape:
                flat.write_buffers(server.buffers)  # of a run of an earlier version
                server.buffers = flat.read_buffers()
            for notice in directory.notices:
                warnings.warn(notice, stacklevel=2)
            watching.insert(0, RoundsOnDisk(directory))

        measured = recording is not None and recording.from_uploads
        job = Job(
            *(federation, flat, method, sgd, loss, chosen.seed, chosen.buffers, measured),
            oracle=chosen.oracle,
            metrics=metrics,
        )
        if chosen.clients_every is not None:
            on = "test" if chosen.validation is None else "validation"
            own = getattr(where, "model_of", None)
            place = None if out is None else Path(out)
            watching.insert(0, ClientScores(place, chosen.clients_every, job, on, own))
        told = Callbacks(watching)
        loop = TrainingLoop(
            job, server, store, where, participation, chosen, told, history, directory, stop, overlap, whole
        )
        run = Run(method, history, module, server, store, chosen, monitor, loss)
        with told.looking_on(run):
            diverged = None
            try:
                loop.run()
            except Diverged as problem:
                diverged = problem
            flat.vector.copy_(server.delivered)
            flat.write_buffers(server.buffers)
            run.model = flat.release().eval()
            if diverged is not None:
                raise _ended(diverged, run, directory) from diverged
            if directory is not None and len(history) >= chosen.rounds:
                told.working("writing the model")
                directory.finish(run.model)
        return run


def _progress() -> RunProgress:
    from .progress import RunProgress

    return RunProgress()


def _make_server(
    flat: FlatModel, method: Method, clients: int, settings: TrainingSettings
) -> tuple[Server, int | None]:
    """The server before the first round, and how many bytes what is kept per client may take."""
    given = settings.state_memory
    budget = None if given is None else parse_size(given) if isinstance(given, str) else int(given)
    if budget is not None and method.cost.client and method.cost.server_per_client:
        budget //= 2  # two stores share it
    server = Server(flat.vector.clone(), method, clients, settings.weighting, flat.read_buffers(), budget)
    server.rules = BufferRules.of(flat)
    server.bound(settings.norm_bound, settings.over_bound == "clip")
    server.limit(settings.max_share, settings.aggregate)
    return server, budget


def _ended(problem: Diverged, run: Run, directory: RunDirectory | None) -> Diverged:
    """The end of a run whose model is no longer finite, with where the last finite one is."""
    place = "this error's `run.model`" if directory is None else directory.diverge(run.model, str(problem))
    ended = Diverged(f"{problem} The last finite model, after {len(run.history)} rounds, is {place}.")
    ended.run = run
    return ended


def _check_kinds(federation: object, model: object, local: object) -> None:
    """What is easily mixed up; the rest speaks for itself."""
    if not isinstance(federation, Federation):
        raise FedflatError(
            f"train() begins with a federation, not with a {type(federation).__name__}: make one with "
            "federate('digits', Dirichlet(0.1), clients=20) or Federation(clients=[(x, y), ...])."
        )
    if isinstance(model, type):
        raise FedflatError(
            f"model is the class {model.__name__}; give one that is made: {model.__name__}(...)."
        )
    if not isinstance(model, str | nn.Module):
        raise FedflatError(f"model must be a name or an nn.Module, not {model!r}.")
    if local is not None and not isinstance(local, LocalOptimiser):
        raise FedflatError(f"local must be LocalSGD(lr=..., epochs=...), not {local!r}.")


def _check_data_is_sent(engine: str | Engine) -> None:
    """Whether clients train on what is here: data that nodes load themselves has no validation part."""
    if getattr(engine, "data", None) is not None:
        raise FedflatError(
            "validation: the nodes load their data themselves, so nothing is held out of it here. Leave validation "
            "out, or have the data sent (ray.data: sent)."
        )


def _convolutions(model: FlatModel, federation: Federation, sgd: LocalOptimiser) -> dict[str, Any] | None:
    """How the model's convolutions are computed in a full batch."""
    sample = model.vector.new_zeros(1, *federation.sample_shape)
    with model.evaluating() as module:
        return count_ways(module, sample, sgd.batch_size or max(federation.sizes))


def _engine_name(engine: str | Engine) -> str:
    return engine if isinstance(engine, str) else type(engine).__name__.lower()
