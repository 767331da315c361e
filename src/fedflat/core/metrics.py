"""The metrics of a test by name.

A new metric is a class in a file of this folder and an entry of `METRICS`; what a metric is stands in `core/metric`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ..errors import FedflatError, nearest
from .classification import CLASSIFICATION_METRICS, TopK
from .metric import (
    BatchOutputs as BatchOutputs,
    Counting as Counting,
    FunctionMetric as FunctionMetric,
    InOrder as InOrder,
    Metric as Metric,
)
from .regression import REGRESSION_METRICS
from .tasks import MULTI_LABEL, LossFunction as LossFunction

Partials = dict[str, Any]
"""The scores of some batches, by metric; None where a metric is not defined for their targets."""

Score = dict[str, Any]
"""The value of every metric on a data set, by name: a number, a list, or None where it is not defined."""

MetricLike = str | Metric | Callable[[Tensor, Tensor], Any]
"""A metric by name, a metric, or a function of all outputs and targets."""


class Loss(InOrder):
    """The mean of the loss over samples."""

    name = "loss"
    larger_is_better = False

    def keep(self, batch: BatchOutputs) -> tuple[float, int]:
        samples = len(batch.targets)
        return batch.loss(batch.outputs, batch.targets).item() * samples, samples

    def combine(self, kept: Sequence[tuple[float, int]]) -> float:
        return sum(loss for loss, _ in kept) / sum(samples for _, samples in kept)


class Accuracy(Counting):
    """The fraction of targets predicted right."""

    name = "accuracy"
    share = True

    def score(self, batch: BatchOutputs) -> list[list[int]] | None:
        return None if batch.hits is None else [[int(batch.hits.sum())], [batch.hits.numel()]]

    def compute(self, score: list[list[int]]) -> float:
        (hits,), (count,) = score
        return hits / count


class Fractions(Counting):
    """A metric of hits over occurrences by class or group, NaN where there are none."""

    larger_is_better = None

    def compute(self, score: list[list[int]]) -> list[float]:
        return [hits / count if count else math.nan for hits, count in zip_longest(*score, fillvalue=0)]


class AccuracyByClass(Fractions):
    """The fraction of every class's targets predicted right, NaN for a class that does not occur."""

    name = "accuracy_by_class"

    def score(self, batch: BatchOutputs) -> list[list[int]] | None:
        if batch.hits is None or batch.task == MULTI_LABEL:
            return None
        return _count(batch.labels, batch.hits, least=batch.classes)


class AccuracyByGroup(Fractions):
    """The fraction of every user's or domain's targets predicted right, where it is known whose samples are whose."""

    name = "accuracy_by_group"

    def score(self, batch: BatchOutputs) -> list[list[int]] | None:
        if batch.hits is None or batch.groups is None:
            return None
        groups = batch.groups.view(-1, *(1,) * (batch.hits.ndim - 1)).expand_as(batch.hits)
        return _count(groups, batch.hits, least=1)


def _count(numbers: Tensor, hits: Tensor, least: int) -> list[list[int]]:
    """How often every number is hit, and how often it occurs."""
    return [torch.bincount(found, minlength=least).tolist() for found in (numbers[hits], numbers.flatten())]


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *(Loss(), Accuracy(), AccuracyByClass(), AccuracyByGroup()),
        *CLASSIFICATION_METRICS,
        *REGRESSION_METRICS,
    )
}
"""The metrics that are known by name, beside `top-5` and its like."""

STANDARD = ("loss", "accuracy", "accuracy_by_class", "accuracy_by_group")
"""What a test measures if nothing else is said."""


def make_metric(given: MetricLike) -> Metric:
    """A metric from its name, written with - or _, from itself, or from a function of all outputs and targets."""
    if isinstance(given, Metric):
        return given
    if not isinstance(given, str):
        if isinstance(given, Mapping) or not callable(given):
            raise FedflatError(f"A metric is a name, such as auroc, or a function, not {given!r}.")
        return FunctionMetric(given)
    for name in (given, given.replace("_", "-").lower()):
        if name in METRICS:
            return METRICS[name]
        if best := re.fullmatch(r"top-([1-9]\d{0,5})", name):
            return TopK(int(best[1]))
    raise FedflatError(f"There is no metric '{given}'.{nearest(given, [*METRICS, 'top-5'])}")


class Metrics:
    """Several metrics, of which one pass over the data gives all.

    Args:
        metrics: names, or metrics or functions of one's own.
    """

    def __init__(self, metrics: Iterable[MetricLike] = STANDARD) -> None:
        self._metrics = {metric.name: metric for metric in map(make_metric, metrics)}

    @property
    def functions(self) -> list[Any]:
        """What of a person's own travels to other processes: functions, and classes of metrics."""
        return [getattr(metric, "function", type(metric)) for metric in self._metrics.values()]

    def __contains__(self, name: object) -> bool:
        return name in self._metrics

    def score(self, batch: BatchOutputs) -> Partials:
        """Score one batch."""
        return {name: metric.score(batch) for name, metric in self._metrics.items()}

    def merge(self, one: Partials, other: Partials) -> Partials:
        """Join the scores of two sets of batches, either of which may be empty."""
        if not one or not other:
            return one or other
        return {
            name: None if one[name] is None or other[name] is None else metric.merge(one[name], other[name])
            for name, metric in self._metrics.items()
        }

    def compute(self, partials: Partials) -> Score:
        """The values, from the scores of all batches."""
        return {
            name: None if partials.get(name) is None else metric.compute(partials[name])
            for name, metric in self._metrics.items()
        }
