"""`train()`: rounds of participate, send, train locally, validate, combine, finish, evaluate, record."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from .allocator import give_back, keep_memory
from .composition import MethodLike, as_method
from .data.federation import Federation
from .engines import Engine, Job, make_engine
from .errors import FedflatError, nearest
from .evaluation import ClassMix
from .flat import FlatModel
from .local import LocalSGD, LossFunction
from .messages import Missing, Upload
from .method import Method
from .models import build_model
from .participation import Everyone, Participation, Uniform
from .rundirectory import RunDirectory
from .server import RejectedUpload, Server
from .store import ClientStore, parse_size

if TYPE_CHECKING:
    from .flatness.recording import Recording

BUFFER_POLICIES = ("average", "local", "server", "reset")


@dataclass
class Round:
    """What happened in one round. `server` is live: read `server.w` during `on_round`, copy what you keep."""

    index: int
    clients: list[int]
    """the active clients whose uploads were accepted"""
    server: Server = field(repr=False)
    accuracy: float | None = None
    loss: float | None = None
    """test loss"""
    train_loss: float | None = None
    train_loss_std: float | None = None
    """deviation of the active clients' training losses from their mean"""
    client_accuracy: dict[str, float] | None = None
    """mean, std and worst_decile over all clients, each tested on its own mix of classes; see `ClassMix`"""
    reported: dict[str, Any] | None = None
    """what clients found of the model they received, before the round: accuracy and loss over all their samples, the
    worst accuracy, and what each said; in a real federation"""
    rejected: list[str] = field(default_factory=list)
    """a sentence for every upload that was refused or did not come"""
    clipped: list[str] = field(default_factory=list)
    """a sentence for every vector that was longer than allowed and was shortened"""
    steps: int = 0
    forward: int = 0
    backward: int = 0
    """passes over a batch that the method makes, all clients together"""
    spared_forward: int = 0
    spared_backward: int = 0
    """those of them that did not have to be computed, since their result was known"""
    vectors_down: int = 0
    vectors_up: int = 0
    """model-sized vectors sent and received, all clients together"""
    bytes_down: int = 0
    bytes_up: int = 0
    lr: float = 0.0
    seconds: float = 0.0
    """sending, local training and aggregation, without evaluation"""
    scalars: dict[str, float] = field(default_factory=dict)
    """the method's own numbers after the round, such as c or alpha"""
    measures: dict[str, float | None] = field(default_factory=dict)
    """flatness by name, in rounds in which it was measured"""

    def row(self) -> dict[str, Any]:
        """As plain values, for a table or a file."""
        shown = {k: v for k, v in self.__dict__.items() if k != "server"}
        return {**shown, "clients": list(self.clients), "scalars": dict(self.scalars)}


@dataclass
class Run:
    """A finished training: one row per round, the trained module, and the server as it ended."""

    method: Method
    history: list[dict[str, Any]]
    model: nn.Module
    server: Server
    clients: ClientStore
    """what the clients kept, in a simulation"""

    @property
    def accuracy(self) -> float | None:
        """Test accuracy after the last evaluated round."""
        evaluated = [row["accuracy"] for row in self.history if row["accuracy"] is not None]
        return evaluated[-1] if evaluated else None

    def total(self, column: str) -> float:
        """The sum of a column over all rounds, such as `bytes_up` or `forward`."""
        return float(sum(row[column] for row in self.history))


def train(
    federation: Federation,
    model: str | nn.Module = "mlp",
    method: MethodLike = "fedavg",
    local: LocalSGD | None = None,
    participation: Participation | int | None = None,
    rounds: int = 100,
    weighting: str = "samples",
    evaluate: str = "server",
    eval_every: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    engine: str | Engine = "inprocess",
    buffers: str = "average",
    on_bad_upload: str = "skip",
    norm_bound: float | Mapping[str, float] | None = None,
    over_bound: str = "skip",
    loss: LossFunction = F.cross_entropy,
    out: str | Path | None = None,
    on_round: Callable[[Round], None] | None = None,
    threads: int = 1,
    state_memory: int | str | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    stop: Callable[[], bool] | None = None,
    experiment: Mapping[str, Any] | None = None,
    measure: Sequence[str | Mapping[str, Any]] = (),
    on_measure: Callable[[str], None] | None = None,
) -> Run:
    """Train one model across the clients of a federation.

    Args:
        federation: the clients' data and the test set.
        model: a name (see `fedflat.models`), or any module: its current weights are the start, unchanged.
        method: a method, its name, a composition such as `"local-ascent(rho=0.05) + control-variates"`, a mechanism,
            or a list of these.
        local: the clients' optimiser, `LocalSGD()` by default.
        participation: who takes part; a number n is `Uniform(n)`, None is `Everyone()`.
        rounds: communication rounds.
        weighting: average client updates by `"samples"` or `"uniform"`.
        evaluate: test what would be broadcast next, `"server"`, or the plain `"average"` of the clients.
        eval_every: test after every so many rounds, and after the last.
        seed: of everything random: participation, batches, dropout, and the weights of a named model.
        dtype: `torch.float32` or `torch.float64`.
        device: where to compute.
        engine: where clients run: `"inprocess"`, `"workers"`, or for example `Workers(4)`.
        buffers: of the model (BatchNorm statistics): `"average"` them at the server, keep them `"local"` at
            each client, leave the `"server"`'s unchanged, or `"reset"` them before a local round and average.
        on_bad_upload: `"skip"` an upload with NaN, a wrong shape or a missing vector, or `"stop"`.
        norm_bound: how long an uploaded vector may be: a number for all, or one by name, such as `{"update": 5}`.
        over_bound: `"skip"` an upload with a longer one, as a bad one, or `"clip"` the vector.
        loss: from outputs and targets to the mean loss of a batch.
        out: a directory to write metrics, checkpoints and the trained model to.
        on_round: called after every round with its `Round`.
        threads: of torch in this process. With 1 the result does not depend on the machine; to use more cores,
            take the engine `"workers"`, which is faster and has the same bits.
        state_memory: how much memory what is kept per client may take, such as `"2GiB"`; the rest is on
            disk, in `out` or where the environment's TMPDIR says.
        resume: go on with the run that `out` holds, if there is one, after its last checkpoint. The result has the
            same bits as without the interruption.
        checkpoint_every: rounds between checkpoints in `out`; by default as often as costs less than 2 % of the time.
        experiment: the experiment that this run is, as in its file: kept in `out`, for `fedflat resume`.
        stop: asked after every round; if it says True, the run ends there with a checkpoint, and can be gone on with.
        measure: what of flatness to record, by name or as `{"sharpness": {"every": 10, "rho": 0.1}}`; `MEASURES` has
            all. Distance and drift come from the uploads, at next to no cost.
        on_measure: told the name of a measure that is being taken, and `""` when it is done.
    """
    method = as_method(method)
    sgd = local or LocalSGD()
    if not isinstance(sgd, LocalSGD):
        raise FedflatError(f"local must be the clients' optimiser, such as LocalSGD(lr=0.1), not {local!r}.")
    if not isinstance(model, str | nn.Module):
        made = f" Make one of it: {model.__name__}()." if isinstance(model, type) else ""
        raise FedflatError(f"model must be a name or a module, not {model!r}.{made}")
    if resume and out is None:
        raise FedflatError("resume=True: name the directory of the run to go on with, out=....")
    if isinstance(participation, bool | float):
        raise FedflatError(f"participation={participation}: give a number of clients, or Bernoulli(0.1).")
    if participation is None or isinstance(participation, int):
        participation = Everyone() if participation is None else Uniform(participation)
    if not hasattr(participation, "choose"):
        raise FedflatError(
            f"participation must be a number of clients, Bernoulli(0.1) or the like, not {participation!r}."
        )
    _one_of("weighting", weighting, ("samples", "uniform"))
    _one_of("evaluate", evaluate, ("server", "average"))
    _one_of("buffers", buffers, BUFFER_POLICIES)
    _one_of("on_bad_upload", on_bad_upload, ("skip", "stop"))
    _one_of("over_bound", over_bound, ("skip", "clip"))
    if rounds < 1 or eval_every < 1:
        raise FedflatError(f"rounds={rounds}, eval_every={eval_every}: both must be at least 1.")
    if checkpoint_every is not None and checkpoint_every < 1:
        raise FedflatError(f"checkpoint_every={checkpoint_every}: give at least 1.")
    participation.check(len(federation), rounds)

    if threads < 1:
        raise FedflatError(f"threads={threads}: give at least 1.")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    keep_memory()
    try:
        federation = federation.to(dtype, device)
        module = build_model(model, federation, seed) if isinstance(model, str) else copy.deepcopy(model)
        flat = FlatModel(module, dtype, device)
        budget = parse_size(state_memory) if isinstance(state_memory, str) else state_memory
        if budget is not None and method.cost.client and method.cost.server_per_client:
            budget //= 2  # two stores share it
        server = Server(flat.vector.clone(), method, len(federation), weighting, flat.read_buffers(), budget)
        server.bound(norm_bound, over_bound == "clip")
        directory = None
        store = ClientStore(budget=budget, device=device)
        history: list[dict[str, Any]] = []
        if out is not None:
            settings = {
                "method": method.name,
                "mechanisms": str(method),
                "federation": federation.about(),
                "model": model if isinstance(model, str) else type(module).__name__,
                "parameters": flat.size,
                "local": asdict(sgd),
                "participation": str(participation),
                "weighting": weighting,
                "evaluate": evaluate,
                "eval_every": eval_every,
                "buffers": buffers,
                "norm_bound": norm_bound if norm_bound is None else [server.bounds, over_bound],
                "dtype": str(dtype).removeprefix("torch."),
                "seed": seed,
                "rounds": rounds,
                "how": {"engine": _engine_name(engine), "threads": threads, "device": str(device)},
            }
            directory = RunDirectory(out, settings, resume, checkpoint_every, experiment)
        try:
            if directory is not None:
                store, history = directory.open_state(server, budget, device)
                for notice in directory.notices:
                    warnings.warn(notice, stacklevel=2)
            job = Job(federation, flat, method, sgd, loss, seed, buffers)
            recording = None
            if measure:
                from .flatness.recording import Recording

                recording = Recording(measure, flat, federation, loss, on_measure)
            plan = _Plan(
                participation, rounds, evaluate, eval_every, on_bad_upload, on_round, stop, recording
            )
            _run_rounds(job, plan, server, store, make_engine(engine), directory, history)
            flat.vector.copy_(server.w)
            flat.write_buffers(server.buffers)
            trained = flat.release().eval()
            if directory is not None and len(history) >= rounds:
                directory.finish(trained)
        finally:
            if directory is not None:
                directory.close()
        return Run(method, history, trained, server, store)
    finally:
        torch.set_num_threads(before)
        give_back()


def _engine_name(engine: str | Engine) -> str:
    return engine if isinstance(engine, str) else type(engine).__name__.lower()


@dataclass(frozen=True)
class _Plan:
    """How the rounds go."""

    participation: Participation
    rounds: int
    evaluate: str
    eval_every: int
    on_bad_upload: str
    on_round: Callable[[Round], None] | None
    stop: Callable[[], bool] | None
    recording: Recording | None


def _run_rounds(
    job: Job,
    plan: _Plan,
    server: Server,
    store: ClientStore,
    engine: Engine,
    directory: RunDirectory | None,
    history: list[dict[str, Any]],
) -> None:
    """The rounds that are left, each added to the history."""
    federation, seed = job.federation, job.seed
    mix = ClassMix.of(federation)
    if len(history) >= plan.rounds:
        return
    try:
        engine.open(job)
        for index in range(len(history), plan.rounds):
            active = plan.participation.choose(index, len(federation), seed)
            last = index == plan.rounds - 1
            record = _run_round(server, engine, store, active, index, last, job.sgd, plan)
            if federation.test is not None and (last or (index + 1) % plan.eval_every == 0):
                w = server.w if plan.evaluate == "server" else server.average
                score = engine.evaluate(w, server.buffers)
                record.accuracy, record.loss = score.accuracy, score.loss
                record.client_accuracy = mix.spread(score.by_class) if mix and score.by_class else None
            if plan.recording is not None:
                record.measures = plan.recording.finish(server)
            history.append(record.row())
            if directory is not None:
                directory.round(history[-1])
            if plan.on_round is not None:
                plan.on_round(record)
            stopping = plan.stop is not None and plan.stop()
            if directory is not None and (last or stopping or directory.due(index + 1)):
                directory.checkpoint(server, store, index + 1)
            if stopping:
                return
    finally:
        engine.close()


def _run_round(
    server: Server,
    engine: Engine,
    store: ClientStore,
    active: list[int],
    index: int,
    last: bool,
    sgd: LocalSGD,
    plan: _Plan,
) -> Round:
    began = time.perf_counter()
    record = Round(index, [], server, lr=sgd.lr_in(index))
    server.open(index, record.lr)
    recording = plan.recording
    if recording is not None:
        recording.open(server, index, last)
    losses = squares = 0.0
    reports: dict[int, dict[str, float]] = {}

    def download(client: int) -> Any:
        message = server.download(client)
        record.vectors_down += message.vectors
        record.bytes_down += message.bytes
        return message

    for upload in engine.uploads(active, download, store.get):
        if isinstance(upload, Missing):
            record.rejected.append(f"client {upload.client}, round {index}: {upload.reason}")
            continue
        _count(record, upload)
        try:
            server.receive(upload)
        except RejectedUpload as rejection:
            if plan.on_bad_upload == "stop":
                raise
            record.rejected.append(str(rejection))
            continue
        if recording is not None:
            recording.receive(upload)
        store.put(upload.client, upload.state, copy=upload.borrowed)
        record.clients.append(upload.client)
        if upload.report:
            reports[upload.client] = dict(upload.report)
        losses += upload.loss * server.weight(upload)
        squares += upload.loss**2 * server.weight(upload)
    if server.accepted:
        record.train_loss = losses / server.total_weight
        variance = squares / server.total_weight - record.train_loss**2
        record.train_loss_std = math.sqrt(max(0.0, variance)) if math.isfinite(variance) else None
    server.close()
    record.scalars, record.clipped = server.scalars(), list(server.clipped)
    record.reported = _summed_up(reports) if reports else None
    record.seconds = time.perf_counter() - began - (recording.seconds if recording is not None else 0.0)
    return record


def _summed_up(reports: dict[int, dict[str, float]]) -> dict[str, Any]:
    """What clients found, over all samples they tested on."""
    samples = sum(report["samples"] for report in reports.values())
    summary: dict[str, Any] = {"samples": samples}
    for name in ("accuracy", "loss"):
        told = [(report[name], report["samples"]) for report in reports.values() if name in report]
        if len(told) == len(reports):
            summary[name] = sum(value * weight for value, weight in told) / samples
    if "accuracy" in summary:
        summary["worst_accuracy"] = min(report["accuracy"] for report in reports.values())
    return {**summary, "clients": {str(client): report for client, report in reports.items()}}


def _count(record: Round, upload: Upload) -> None:
    record.steps += upload.steps
    record.forward += upload.forward
    record.backward += upload.backward
    record.spared_forward += upload.spared_forward
    record.spared_backward += upload.spared_backward
    record.vectors_up += 1 + len(upload.vectors)
    record.bytes_up += upload.bytes


def _one_of(argument: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise FedflatError(f"{argument}='{value}' is not possible.{nearest(str(value), allowed)}")
