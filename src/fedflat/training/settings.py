"""The settings of a training: each is one field here, with its range, its default and what it means.

Keywords of `train`, keys of experiment files, options of `fedflat run` and entries of run.json all come from these
fields. Importing this does not import torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from ..core.parameters import check_parameters, choice, entries, flag, number, text
from ..errors import FedflatError, nearest

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings of a training, beside its data, model, method, clients' optimiser and engine."""

    rounds: int = number(default=100, at_least=1, whole=True, help="communication rounds")
    task: str = choice(
        "auto",
        "classification",
        "multi-label",
        "regression",
        default="auto",
        help="what is predicted: one class, any number of labels, or numbers; by default what the targets are",
    )
    loss: str = text(
        default="auto",
        help="what is minimised: cross-entropy, focal or bce for classes, bce for labels, mse, mae or huber for "
        "numbers, such as cross-entropy(weights=balanced, label_smoothing=0.1), focal(gamma=2) or huber(delta=1); in "
        "Python any function from outputs and targets to the mean loss of a batch. A single output is the logit of "
        "class 1",
    )
    metrics: Sequence[Any] = entries(
        option="metric",
        help="to compute in every test beside loss and accuracy, such as [auroc, f1, recall-by-class, confusion, "
        "top-5], or mse, mae and r2 of numbers; in Python also functions of all outputs and targets",
    )
    monitor: str = text(
        default="auto",
        help="the metric that runs are compared and tuned by; by default accuracy, f1 for multi-label, r2 for "
        "regression",
    )
    weighting: str = choice(
        "samples",
        "uniform",
        default="samples",
        help="average client updates by their number of samples, or uniformly",
    )
    evaluate: str = choice(
        "server",
        "average",
        default="server",
        help="test the server's next model, or the clients' plain average",
    )
    eval_every: int = number(
        default=1, at_least=1, whole=True, help="rounds from one test to the next; the last round is tested"
    )
    validation: float | None = number(
        default=None,
        above=0,
        below=1,
        optional=True,
        help="hold out this fraction of every client's training samples and test on them in every round; the test "
        "set is used once then, after the last round",
    )
    test: bool = flag(default=True, help="use the test set; without it, a run knows nothing of it")
    seed: int = number(
        default=0,
        at_least=0,
        at_most=2**64 - 1,
        whole=True,
        help="of everything random: participation, batches, dropout, the weights of a named model",
    )
    dtype: str = choice("float32", "float64", default="float32", help="precision of all numbers")
    oracle: str = choice(
        "auto",
        "autograd",
        default="auto",
        help="how gradients are computed: the fastest exact way for the model, or always by autograd",
    )
    fast: bool = flag(
        default=True,
        help="let the named models convolve in the way that is quickest on this processor, alike on every engine and "
        "after resuming; else with PyTorch's own layers",
    )
    device: str = text(default="cpu", help="where to compute: cpu, or cuda on a machine with a GPU")
    buffers: str = choice(
        "average",
        "local",
        "server",
        "reset",
        default="average",
        help="of the model, BatchNorm statistics: average them at the server, keep them local at each client, "
        "leave the server's unchanged, or reset them before a local round and average. With local and server the "
        "global model is tested with the statistics it began with",
    )
    on_bad_upload: str = choice(
        "skip",
        "stop",
        default="skip",
        help="skip an upload with NaN, a wrong shape or a missing vector, or stop the run",
    )
    on_divergence: str = choice(
        "stop",
        "restore",
        default="stop",
        help="when the model is no longer finite: stop with the last finite one, the error Diverged, exit code 3, or "
        "undo the round and restore server and clients. Both end when 3 rounds in a row, or 10 with restore, came to "
        "nothing",
    )
    norm_bound: float | str | Mapping[str, float | str] | None = number(
        default=None,
        above=0,
        optional=True,
        pattern=r"^median(:\d+(\.\d+)?)?$",
        by_name=True,
        help="how long an uploaded vector may be: one number, or one by name ({update: 5}); median:5 is five "
        "times the median length of earlier rounds. The bound of buffers is how far statistics may go in a round",
    )
    over_bound: str = choice(
        "skip",
        "clip",
        default="skip",
        help="an upload with a longer vector: skip it as a bad one, or clip the vector",
    )
    max_share: float | None = number(
        default=None,
        above=0,
        at_most=1,
        optional=True,
        help="of a round's weight, at most this much for one client (0.5 in a real federation); with too few clients "
        "for that, all weigh alike",
    )
    aggregate: str = text(
        default="mean",
        pattern=r"^(mean|median|trimmed:0?\.\d+)$",
        help="the mean of the updates, or of every coordinate the median, or trimmed:0.1, the mean without the "
        "largest and smallest tenth. These count every client once and hold all uploads of a round in memory",
    )
    threads: int = number(
        default=1,
        at_least=1,
        whole=True,
        help="threads of torch in this process; above 1 the last digits depend on the number",
    )
    state_memory: float | str | None = number(
        default=None,
        at_least=0,
        optional=True,
        pattern=r".",
        help="memory for what is kept per client, as 2GiB; the rest is on disk, in the run directory or TMPDIR",
    )
    checkpoint_every: int | None = number(
        default=None,
        at_least=1,
        optional=True,
        whole=True,
        help="rounds from one checkpoint to the next; by default less than 2 % of the time is spent on them",
    )
    clients_every: int | None = number(
        default=None,
        at_least=1,
        optional=True,
        whole=True,
        help="rounds from one test of every client on its own test samples to the next, in clients.jsonl; off by "
        "default, and only where the data says whose test samples are whose",
    )
    measure: Sequence[str | Mapping[str, Any]] = entries(
        help="flatness to record, as [distance, drift, {sharpness: {every: 10, samples: 2000}}]; distance and drift "
        "come from the uploads in every round, at next to no cost, others by default in every tenth"
    )

    HOW: ClassVar[tuple[str, ...]] = ("device", "threads", "state_memory", "checkpoint_every")
    """settings that do not change the numbers: they may be others when a run is resumed"""

    def __post_init__(self) -> None:
        for name in ("dtype", "device"):  # torch.float64, torch.device("cpu")
            object.__setattr__(self, name, str(getattr(self, name)).removeprefix("torch."))
        check_parameters(self, "train()")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> TrainingSettings:
        """From keywords; an unknown one is an error that names the nearest."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise FedflatError(f"train() has no setting '{name}'.{nearest(name, known)}")
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """As run.json has them: what the numbers depend on by name, the rest below `"how"`."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        how = {name: named.pop(name) for name in self.HOW}
        metrics = [_name(one) for one in self.metrics]
        return {
            **named,
            "loss": _name(self.loss),
            "metrics": metrics,
            "measure": list(self.measure),
            "how": how,
        }


def takes_settings(function: Function) -> Function:
    """Write the settings that a function takes as keywords into its signature and at the end of its docstring."""
    signature = inspect.signature(function)
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    settings = inspect.signature(TrainingSettings).parameters.values()
    function.__signature__ = signature.replace(parameters=[*own, *settings])  # type: ignore[attr-defined]
    told = [f"    {field.name}: {_told(field.metadata)}" for field in fields(TrainingSettings)]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), *told])
    return function


def _name(thing: Any) -> str:
    if isinstance(thing, str):
        return thing
    return str(getattr(thing, "name", None) or getattr(thing, "__name__", None) or type(thing).__name__)


def _told(facts: Mapping[str, Any]) -> str:
    words = [f'`"{word}"`' for word in facts.get("words", ())]
    return f"{facts['help']}." + (f" One of {', '.join(words)}." if words else "")
