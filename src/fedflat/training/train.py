"""`train()`: one call from a federation to a trained model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..client.optimisers import LocalSGD
from ..core.allocator import give_back, keep_memory
from ..core.evaluation import LossFunction
from ..core.finite import check_lr
from ..core.flat import FlatModel
from ..core.threads import computing_with
from ..data.federation import Federation
from ..data.fingerprint import fingerprint
from ..engines.base import Engine, Job, make_engine, taken
from ..engines.workers.spawning import leave_if_imported
from ..errors import Diverged, FedflatError, nearest
from ..methods.method import Method
from ..methods.text import MethodLike, as_method
from ..models import build_model
from ..models.conv.conv2d import PLAIN, count_ways, set_column, set_recorded
from ..server.buffer_rules import BufferRules
from ..server.norm_bounds import Bound
from ..server.participation import Participation, as_participation
from ..server.server import Server
from ..storage.client_store import ClientStore, parse_size
from ..storage.environment import check_device
from ..storage.run_directory import RunDirectory, is_begun, read_settings
from .loop import TrainingLoop
from .record import RoundRecord
from .sameness import of_loss, of_mechanisms, of_module

BUFFER_POLICIES = ("average", "local", "server", "reset")


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
    overlap: bool | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    fast: bool = True,
    device: torch.device | str = "cpu",
    engine: str | Engine = "inprocess",
    buffers: str = "average",
    on_bad_upload: str = "skip",
    on_divergence: str = "stop",
    norm_bound: Bound | Mapping[str, Bound] | None = None,
    over_bound: str = "skip",
    max_share: float | None = None,
    aggregate: str = "mean",
    loss: LossFunction = F.cross_entropy,
    out: str | Path | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    threads: int = 1,
    state_memory: int | str | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    keep_states: bool = True,
    stop: Callable[[], bool] | None = None,
    experiment: Mapping[str, Any] | None = None,
    measure: Sequence[str | Mapping[str, Any]] = (),
    on_measure: Callable[[str], None] | None = None,
    notes: Sequence[str] = (),
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
        overlap: whether workers without a client may test a round's model while the next round trains. The numbers
            are the same, but `on_round` comes a round later then, and its `round.server` has gone on. By default so
            where nobody looks on, without `on_round` and `stop`.
        seed: of everything random: participation, batches, dropout, and the weights of a named model.
        dtype: `torch.float32` or `torch.float64`.
        fast: let the named models convolve in the way that is quickest on this processor, the same on every engine;
            a resumed run keeps the way that it began with. With False they have PyTorch's own layers.
        device: where to compute.
        engine: where clients run: `"inprocess"`, `"workers"`, or for example `Workers(4)`.
        buffers: of the model (BatchNorm statistics): `"average"` them at the server, keep them `"local"` at
            each client, leave the `"server"`'s unchanged, or `"reset"` them before a local round and average.
            With `"local"` and `"server"` the global model is evaluated with the statistics it began with.
        on_bad_upload: `"skip"` an upload with NaN, a wrong shape or a missing vector, or `"stop"`.
        on_divergence: what becomes of a round after which the model, or what the server keeps beside it, would not be
            finite: `"stop"` there with the last finite model and the error `Diverged`, or undo the round, `"restore"`
            the server and what clients keep, and go on. Both end when 3 rounds in a row, or 10 with `"restore"`,
            came to nothing.
        norm_bound: how long an uploaded vector may be: a number for all, or one by name, such as `{"update": 5}`;
            `"median:5"` is five times the median length of what was accepted in earlier rounds. `"buffers"` is how
            far the model's statistics may go in a round.
        over_bound: `"skip"` an upload with a longer one, as a bad one, or `"clip"` the vector.
        max_share: of the weight of a round, at most so much for one client; the excess is cut off. Where there are
            too few clients for that, all weigh alike.
        aggregate: the `"mean"` of the updates, or what a few clients cannot move: the `"median"` of every coordinate,
            or `"trimmed:0.1"`, the mean without the largest and smallest tenth. These count every client once, and
            hold all uploads of a round in memory.
        loss: from outputs and targets to the mean loss of a batch. A single output is the logit of class 1, which is
            predicted above 0.
        out: a directory to write metrics, checkpoints and the trained model to.
        on_round: called after every round with its `RoundRecord`.
        threads: of torch in this process. With 1 the result does not depend on the machine; to use more cores,
            take the engine `"workers"`, which is faster and has the same bits.
        state_memory: how much memory what is kept per client may take, such as `"2GiB"`; the rest is on
            disk, in `out` or where the environment's TMPDIR says.
        resume: go on with the run that `out` holds, if there is one, after its last checkpoint. The result has the
            same bits as without the interruption.
        checkpoint_every: rounds between checkpoints in `out`; by default as often as costs less than 2 % of the time.
        keep_states: whether a finished run in `out` keeps what training it longer takes: checkpoints and what is kept
            per client, which can be large.
        experiment: the experiment that this run is, as in its file: kept in `out`, for `fedflat resume`.
        stop: asked after every round; if it says True, the run ends there with a checkpoint, and can be gone on with.
        measure: what of flatness to record, by name or as `{"sharpness": {"every": 10, "rho": 0.1}}`; `MEASURES` has
            all. Distance and drift come from the uploads, at next to no cost.
        on_measure: told the name of a measure that is being taken, and `""` when it is done.
        notes: sentences to keep in `out`, in run.json, with those that the federation has as `caveats`.
    """
    _check_kinds(federation, model, local)
    check_device(device)
    leave_if_imported()
    method = as_method(method)
    sgd = local or LocalSGD()
    if resume and out is None:
        raise FedflatError("resume=True: name the directory of the run to go on with, out=....")
    participation = as_participation(participation)
    _one_of("weighting", weighting, ("samples", "uniform"))
    _one_of("evaluate", evaluate, ("server", "average"))
    _one_of("buffers", buffers, BUFFER_POLICIES)
    _one_of("on_bad_upload", on_bad_upload, ("skip", "stop"))
    _one_of("on_divergence", on_divergence, ("stop", "restore"))
    _one_of("over_bound", over_bound, ("skip", "clip"))
    _at_least_1(rounds=rounds, eval_every=eval_every, checkpoint_every=checkpoint_every, threads=threads)
    participation.check(len(federation), rounds)
    check_lr(sgd.lr_in(rounds - 1), sgd.lr_in(0), dtype)
    if loss is F.cross_entropy:
        federation.check_classes()

    with ExitStack() as cleanup:
        cleanup.callback(give_back)
        cleanup.enter_context(computing_with(threads))
        keep_memory()
        print_of_data = "" if out is None else fingerprint(federation)  # as given, whatever the dtype
        federation = federation.to(dtype, device)
        module = build_model(model, federation, seed) if isinstance(model, str) else copy.deepcopy(model)
        if not fast:
            set_column(module, PLAIN)
        elif resume and out is not None and is_begun(out):
            set_recorded(module, read_settings(out, to_go_on=True))
        flat = FlatModel(module, dtype, device)
        budget = parse_size(state_memory) if isinstance(state_memory, str) else state_memory
        if budget is not None and method.cost.client and method.cost.server_per_client:
            budget //= 2  # two stores share it
        server = Server(flat.vector.clone(), method, len(federation), weighting, flat.read_buffers(), budget)
        server.rules = BufferRules.of(flat)
        server.bound(norm_bound, over_bound == "clip")
        server.limit(max_share, aggregate)
        recording = None
        if measure:
            from ..flatness.recording import Recording

            recording = Recording(measure, flat, federation, loss, on_measure)
        where = make_engine(engine)
        cleanup.enter_context(taken(where))

        directory, store = None, ClientStore(budget=budget, device=device)
        history: list[dict[str, Any]] = []
        if out is not None:
            settings = {
                "method": method.name,
                "mechanisms": str(method),
                "mechanism_code": of_mechanisms(method.mechanisms),
                "federation": {**federation.about(), "fingerprint": print_of_data},
                "model": model if isinstance(model, str) else type(module).__name__,
                **({} if isinstance(model, str) else {"module": of_module(model)}),
                "loss": of_loss(loss),
                "parameters": flat.size,
                "local": asdict(sgd),
                "participation": str(participation),
                "weighting": weighting,
                "evaluate": evaluate,
                "eval_every": eval_every,
                "buffers": buffers,
                "on_divergence": on_divergence,
                "norm_bound": norm_bound
                if norm_bound is None
                else [server.norm_bounds.to_dict(), over_bound],
                "max_share": max_share,
                "aggregate": aggregate,
                "dtype": str(dtype).removeprefix("torch."),
                "fast": fast,
                "convolutions": _convolutions(flat, federation, sgd),
                "seed": seed,
                "rounds": rounds,
                "notes": [*federation.caveats, *notes],
                "how": {"engine": _engine_name(engine), "threads": threads, "device": str(device)},
            }
            directory = RunDirectory(
                out, settings, resume, checkpoint_every, experiment, keep_states, federation.preprocessing
            )
            cleanup.callback(directory.close)
            store, history = directory.open_state(server, budget, device)
            held = flat.read_buffers()
            if server.buffers is not None and held is not None and held.shape != server.buffers.shape:
                flat.write_buffers(server.buffers)  # of a run of an earlier version
                server.buffers = flat.read_buffers()
            for notice in directory.notices:
                warnings.warn(notice, stacklevel=2)

        loop = TrainingLoop(
            Job(
                federation,
                flat,
                method,
                sgd,
                loss,
                seed,
                buffers,
                recording is not None and recording.from_uploads,
            ),
            server,
            store,
            where,
            participation,
            rounds,
            evaluate,
            eval_every,
            overlap,
            on_bad_upload,
            on_divergence,
            on_round,
            stop,
            recording,
            directory,
            history,
        )
        diverged = None
        try:
            loop.run()
        except Diverged as problem:
            diverged = problem
        flat.vector.copy_(server.w)
        flat.write_buffers(server.buffers)
        trained = flat.release().eval()
        run = Run(method, history, trained, server, store)
        if diverged is not None:
            place = (
                "this error's `run.model`" if directory is None else directory.diverge(trained, str(diverged))
            )
            ended = Diverged(f"{diverged} The last finite model, after {len(history)} rounds, is {place}.")
            ended.run = run
            raise ended from diverged
        if directory is not None and len(history) >= rounds:
            directory.finish(trained)
        return run


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
    if local is not None and not isinstance(local, LocalSGD):
        raise FedflatError(f"local must be LocalSGD(lr=..., epochs=...), not {local!r}.")


def _convolutions(model: FlatModel, federation: Federation, sgd: LocalSGD) -> dict[str, Any] | None:
    """How the model's convolutions are computed in a full batch."""
    sample = model.vector.new_zeros(1, *federation.sample_shape)
    with model.evaluating() as module:
        return count_ways(module, sample, sgd.batch_size or max(federation.sizes))


def _engine_name(engine: str | Engine) -> str:
    return engine if isinstance(engine, str) else type(engine).__name__.lower()


def _one_of(argument: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise FedflatError(f"{argument}='{value}' is not possible.{nearest(str(value), allowed)}")


def _at_least_1(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or count < 1):
            raise FedflatError(f"{name}={count}: give a whole number, at least 1.")
