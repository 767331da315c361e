"""What a run costs: samples that pass through the model, and about how long that takes on one core."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..data.official import OFFICIAL, Official
from .schema import Experiment

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
BATCH = 50
UNKNOWN = Official(50_000, 10_000, 10)
"""What a dataset without published sizes is taken for."""
CLIENTS = 100
PRODUCTS = 25
"""With the Hessian, until its largest eigenvalue has settled: most often 20 to 40."""


@dataclass(frozen=True)
class Passes:
    """How many samples pass forward, and how many backward."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> Passes:
        return Passes(factor * self.forward, factor * self.backward)

    def seconds(self, model: str | None) -> float:
        """About how long they take on one core: backward takes twice as long as forward."""
        step = STEP_SECONDS.get((model or "mlp").partition(":")[0], 0.1)
        return step / BATCH * (self.forward + 2 * self.backward) / 3


@dataclass(frozen=True)
class RunCost:
    """What a run's parts take."""

    training: Passes
    testing: Passes
    measuring: Passes

    @property
    def total(self) -> Passes:
        """All of it."""
        return self.training + self.testing + self.measuring


def core_seconds(content: Mapping[str, Any]) -> float:
    """About how long a run takes on one core: training, testing and measuring."""
    experiment = Experiment.model_validate(dict(content)).with_defaults()
    return run_cost(experiment).total.seconds(experiment.model)


def run_cost(experiment: Experiment) -> RunCost:
    """The passes of a filled experiment on the dataset as published, clients all of the same size.

    What a method spares in some rounds or epochs, such as FedGMT's teacher and FedGF's ascent, is counted.
    """
    from ..methods.text import as_method

    size = OFFICIAL.get(experiment.dataset, UNKNOWN)
    rounds, active = experiment.rounds or 1, active_clients(experiment)
    each = size.train / (experiment.clients or CLIENTS)
    local, cost = experiment.local, as_method(experiment.method).cost
    batch = min(local.batch_size if isinstance(local.batch_size, int) else each, each)
    taught = local.steps * batch if local.steps else (local.epochs or 1) * each
    tests = min(size.test, experiment.test_samples or size.test)
    return RunCost(
        Passes(cost.forward, cost.backward) * (rounds * active * taught),
        Passes(forward=times(rounds, experiment.eval_every) * tests),
        _measuring(
            experiment, size, tests, active * each, Passes(cost.forward, cost.backward) * (taught / each)
        ),
    )


def times(rounds: int, every: int) -> int:
    """How often something happens that happens at an interval of rounds, and in the last."""
    return math.ceil(rounds / every)


def active_clients(experiment: Experiment) -> float:
    """Clients that take part in a round, in the mean."""
    given, clients = experiment.participation, experiment.clients or CLIENTS
    if isinstance(given, int):
        return given
    if isinstance(given, str) and given.startswith("bernoulli:"):
        return float(given.partition(":")[2]) * clients
    if isinstance(given, str) and given.startswith("uniform:"):
        return float(given.partition(":")[2])
    return sum(map(len, given)) / len(given) if isinstance(given, list) and given else clients


def _measuring(
    experiment: Experiment, size: Official, tests: int, active_samples: float, trained: Passes
) -> Passes:
    """`trained` is what local training takes of every sample of a client."""
    from ..flatness.recording import wanted

    total = Passes()
    for one in wanted(experiment.measure):
        samples: float = tests if one.part == "test" else size.train
        samples = min(samples, one.samples or samples)
        settings = {**one.measure.defaults, **one.settings}
        often = times(experiment.rounds or 1, one.every)
        if one.measure.name == "discrepancy":
            samples += size.train if one.of_all else active_samples
            total += trained * (often * size.train if one.of_all else 0)
        total += PASSES[one.measure.name](settings) * (often * samples)
    return total


# -- what a measure takes of every sample ----------------------------------------------------------


def _products(vectors: int, together: int = 1) -> Passes:
    """Passes of Hessian-vector products: some vectors at a time share a forward and a backward pass."""
    shared = math.ceil(vectors / together)
    return Passes(shared, shared + vectors)


def _trace(settings: Mapping[str, Any]) -> Passes:
    from ..flatness.trace import TOGETHER

    products, third = settings["products"], settings["products"] // 3
    if settings["method"] == "hutchinson":
        return _products(products, TOGETHER)
    return _products(third, TOGETHER) * 2 + _products(products - 2 * third, TOGETHER)


def _radius(settings: Mapping[str, Any]) -> Passes:
    away = sum(radius != 0 for radius in settings["radii"])
    return Passes(1 + away * (settings["directions"] + 1), 1)


_ASCENT = Passes(2, 1)

PASSES: Mapping[str, Callable[[Mapping[str, Any]], Passes]] = {
    "distance": lambda _: Passes(),
    "drift": lambda _: Passes(),
    "gradient-drift": lambda _: Passes(1, 1),
    "sharpness": lambda _: _ASCENT,
    "client-sharpness": lambda _: _ASCENT,
    "discrepancy": lambda _: _ASCENT,
    "worst-case": lambda s: Passes(1, 1) * (1 + s["steps"] * (1 + s["restarts"])),
    "eigenvalues": lambda s: _products(PRODUCTS) + _products(s["top"], s["top"]),
    "trace": _trace,
    "density": lambda s: _products(s["probes"], s["probes"]) * s["steps"],
    "low-pass": lambda s: Passes(1 + s["draws"]),
    "radius": _radius,
}
"""By the name of the measure, from its settings."""
