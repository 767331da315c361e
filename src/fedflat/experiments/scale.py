"""From a paper's experiments to ones that take minutes: what differs between cells is scaled, not lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .cost import active_clients, run_cost
from .presets import PaperCell
from .schema import NATURAL, Experiment

SMALL_BUDGET = 20.0
"""Seconds of one core that all cells of a small reproduction may take together, unless two rounds take more."""
SMALL_SUBSTITUTES = {"swin-s": "lenet", "swin-b": "resnet8", "vit-b16": "cnn", "resnet50": "resnet8"}
"""In the place of models that are too large to try, and need weights from elsewhere: another for each in a table."""
LARGE_IMAGES = {"tiny-imagenet": 4, "office-home": 20}
"""How much longer a model takes for these than for small images."""


def small(cells: Sequence[PaperCell]) -> list[dict[str, Any]]:
    """The cells' experiments, scaled down together so that all finish in minutes.

    At most 20 clients, few of them a round, few steps on small batches, as many rounds as fit, few test samples. What
    cells differ in they still differ in, and in the same order: 1, 5, 10 and 20 epochs become 1, 2, 3 and 4 steps.
    What it shows is then that everything runs, not the numbers.
    """
    for level in LEVELS:
        factors = _Factors.of([cell.content for cell in cells], level)
        shrunk = {cell.run: _shrunk(cell.content, level, factors) for cell in cells}
        round_seconds, other_seconds = _seconds(shrunk.values(), level)
        rounds = min(40, int((SMALL_BUDGET - other_seconds) / max(round_seconds, 1e-9)))
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


LEVELS = (
    _Level(4, 5, 20, 500, 10),
    _Level(2, 2, 10, 100, 2),
    _Level(2, 1, 10, 50, 1),
    _Level(2, 1, 5, 50, 1),
)
"""From what is wanted to what is bearable."""
_FEW: Mapping[str, Mapping[str, float]] = {"low-pass": {"draws": 4}, "eigenvalues": {"tolerance": 0.1}}
MEASURED_SAMPLES = 10
"""What flatness is measured of: a product with the Hessian takes as long as some steps."""
CLIENTS = 20


def _seconds(contents: Iterable[Mapping[str, Any]], level: _Level) -> tuple[float, float]:
    """What a round of all runs takes, and what all their tests and measurements take."""
    each, other = 0.0, 0.0
    for content in contents:
        experiment = Experiment.model_validate({**content, "rounds": 1}).with_defaults()
        cost, factor = run_cost(experiment), LARGE_IMAGES.get(experiment.dataset, 1)
        each += factor * cost.training.seconds(experiment.model)
        other += factor * (cost.testing * level.tests + cost.measuring).seconds(experiment.model)
    return each, other


@dataclass(frozen=True)
class _Factors:
    """What an experiment's numbers become, each from the values that it has in all cells."""

    clients: Mapping[float, int]
    active: Mapping[float, int]
    length: Mapping[float, int]
    batch: Mapping[float, int]

    @classmethod
    def of(cls, contents: Sequence[Mapping[str, Any]], level: _Level) -> _Factors:
        """Of all cells at a level."""
        every = [Experiment.model_validate(dict(content)).with_defaults() for content in contents]
        sizes = {_batch(one) for one in every}
        return cls(
            spread((one.clients for one in every if one.clients is not None), CLIENTS),
            spread((active_clients(one) for one in every), level.active),
            spread((_length(one) for one in every), level.steps),
            spread(sizes, int(min(level.batch, max(sizes)))),
        )


def spread(values: Iterable[float], most: int) -> dict[float, int]:
    """Whole numbers for some values, in their order and all different, up to `most` where that is enough of them.

    >>> spread([1, 5, 10, 20], 5)
    {1: 1, 5: 2, 10: 3, 20: 5}
    """
    ordered = sorted(set(values))
    top = max(most, len(ordered))
    return {value: top * (place + 1) // len(ordered) for place, value in enumerate(ordered)}


def _length(experiment: Experiment) -> float:
    return experiment.local.steps or experiment.local.epochs or 1


def _batch(experiment: Experiment) -> float:
    size = experiment.local.batch_size
    return size if isinstance(size, int) else float("inf")


def _shrunk(content: Mapping[str, Any], level: _Level, factors: _Factors) -> dict[str, Any]:
    result = dict(content)
    filled = Experiment.model_validate(result).with_defaults()
    local = {key: value for key, value in result.get("local", {}).items() if key not in ("epochs", "steps")}
    local |= {"steps": factors.length[_length(filled)], "batch_size": factors.batch[_batch(filled)]}
    natural = str(result.get("partition", "")).split("/")[-1] in NATURAL
    model = str(result.get("model", "mlp")).partition(":")[0]
    result |= {
        "local": local,
        "clients": None if natural or filled.clients is None else factors.clients[filled.clients],
        "participation": factors.active[active_clients(filled)],
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
    return "discrepancy" in entry or ("eigenvalues" in entry and level.steps == 1)


def _quick(entry: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    """A measure that is taken once, of few samples."""
    if isinstance(entry, str):
        return entry
    ((name, settings),) = entry.items()
    return {name: {**settings, **_FEW.get(name, {}), "every": 10**6, "samples": MEASURED_SAMPLES}}
