"""From a paper's experiments to ones that take minutes, by an estimate of what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .experiment import NATURAL, Experiment
from .presets import PaperCell

STEP_SECONDS = {
    "mlp": 0.0012,
    "mlp-200-100": 0.0010,
    "fasttext": 0.004,
    "char-lstm": 0.15,
    "lenet": 0.06,
    "cnn": 0.08,
    "vit-small": 0.15,
    "resnet8": 0.25,
    "resnet18": 0.14,
    "resnet18-cifar": 1.2,
    "resnet18-cifar-nonorm": 1.1,
    "resnet34": 0.25,
    "resnet50": 2.0,
    "vgg11": 0.2,
    "vit-b16": 12.0,
    "swin-s": 8.0,
    "swin-b": 14.0,
}
"""One forward and backward pass over a batch of 50 on one core of a usual machine: for estimates of cost."""

SMALL_BUDGET = 20.0
"""Seconds of one core that all cells of a small reproduction may take together, unless two rounds take more."""
SMALL_SUBSTITUTES = {"vit-b16": "resnet8", "swin-s": "resnet8", "swin-b": "resnet8", "resnet50": "resnet8"}
"""Models that are too large to try, and need weights from elsewhere."""
LARGE_IMAGES = {"office-home": 20}
"""How much longer a substitute takes for these than for small images."""

_TRAINING_SAMPLES = {"fashion-mnist": 60_000, "cinic10": 90_000, "tiny-imagenet": 100_000, "ag-news": 120_000}


def core_seconds(content: Mapping[str, Any], batch: int = 50) -> float:
    """About how long a run takes on one core, evaluation aside."""
    experiment = Experiment.model_validate(dict(content)).filled()
    per_round = _active(experiment)
    local = experiment.local
    size = local.batch_size if isinstance(local.batch_size, int) else 500
    samples = _TRAINING_SAMPLES.get(experiment.dataset, 50_000) / (experiment.clients or 100)
    steps = local.steps or (local.epochs or 1) * math.ceil(samples / size)
    model = (experiment.model or "mlp").partition(":")[0]
    step = STEP_SECONDS.get(model, 0.1) * size / batch
    return (experiment.rounds or 1) * per_round * steps * step * _passes(experiment.method)


def _active(experiment: Experiment) -> float:
    given, clients = experiment.participation, experiment.clients or 100
    if isinstance(given, int):
        return given
    if isinstance(given, str) and given.startswith("bernoulli:"):
        return float(given.partition(":")[2]) * clients
    return clients


def _passes(method: Any) -> float:
    """Relative to FedAvg, which makes one forward and one backward pass: a forward pass is a third."""
    from ..composition import as_method

    cost = as_method(method).cost
    return (cost.forward + 2 * cost.backward) / 3


def small(cells: Sequence[PaperCell]) -> list[dict[str, Any]]:
    """The cells' experiments, scaled down together so that all finish in minutes.

    20 clients, few of them a round, few steps on small batches, as many rounds as fit, few test samples. What it
    shows is then that everything runs, not the numbers.
    """
    for level in LEVELS:
        shrunk = {cell.run: _shrunk(cell.content, level) for cell in cells}
        one_round = sum(
            core_seconds({**content, "rounds": 1}) * LARGE_IMAGES.get(content["dataset"], 1)
            for content in shrunk.values()
        )
        rounds = min(40, int(SMALL_BUDGET / max(one_round, 1e-9)))
        if rounds >= 3:
            break
    rounds = max(rounds, 2)
    for content in shrunk.values():
        content |= {"rounds": rounds, "eval_every": max(1, rounds // level.tests)}
    return [shrunk[cell.run] for cell in cells]


class _Level(NamedTuple):
    active: int
    steps: int
    batch: int
    test_samples: int
    tests: int


LEVELS = (_Level(4, 5, 20, 500, 10), _Level(2, 2, 10, 100, 2), _Level(2, 1, 10, 50, 1))
"""From what is wanted to what is bearable."""
_FEW: Mapping[str, Mapping[str, float]] = {"low-pass": {"draws": 4}, "eigenvalues": {"tolerance": 0.1}}
MEASURED_SAMPLES = 10
"""What flatness is measured of: a product with the Hessian takes as long as some steps."""


def _shrunk(content: Mapping[str, Any], level: _Level) -> dict[str, Any]:
    result = dict(content)
    local = {key: value for key, value in result.get("local", {}).items() if key not in ("epochs", "steps")}
    size = local.get("batch_size", level.batch)
    local |= {
        "steps": level.steps,
        "batch_size": min(size, level.batch) if isinstance(size, int) else level.batch,
    }
    natural = str(result.get("partition", "")).split("/")[-1] in NATURAL
    model = str(result.get("model", "mlp")).partition(":")[0]
    result |= {
        "local": local,
        "clients": None if natural else 20,
        "participation": level.active,
        "model": SMALL_SUBSTITUTES.get(model, model),
        "test_samples": level.test_samples,
        "stand_in": True,
        "measure": [_quick(entry) for entry in result.get("measure", ()) if not _takes_long(entry, level)],
    }
    return {key: value for key, value in result.items() if value is not None}


def _takes_long(entry: str | Mapping[str, Any], level: _Level) -> bool:
    """Whether a measure takes longer than a small training.

    One that passes over all data of all clients does, and of a large model also products with its Hessian.
    """
    return "discrepancy" in entry or ("eigenvalues" in entry and level is LEVELS[-1])


def _quick(entry: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    """A measure that is taken once, of few samples."""
    if isinstance(entry, str):
        return entry
    ((name, settings),) = entry.items()
    return {name: {**settings, **_FEW.get(name, {}), "every": 10**6, "samples": MEASURED_SAMPLES}}
