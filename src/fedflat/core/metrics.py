"""What a test of a model measures: small objects that score a batch, merge scores, and compute a value from them.

A test set is scored in batches, by any number of processes. Every metric has the same bits however batches were
shared out: a score is made of whole numbers (`Counting`), or is kept batch by batch and added up in their order
(`InOrder`). A new metric is a class here, or in a file of its own, and a line of `METRICS`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import FedflatError, nearest

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets to the mean loss of a batch."""

Partials = dict[str, Any]
"""The scores of some batches, by metric; None where a metric is not defined for their targets."""

Score = dict[str, Any]
"""The value of every metric on a data set, by name: a number, a list, or None where it is not defined."""


@dataclass(frozen=True, eq=False)
class BatchOutputs:
    """A model's outputs for one batch of a data set, and what they are compared with: all that a metric sees."""

    number: int
    """of the batch, in the order of the data set"""
    outputs: Tensor
    targets: Tensor
    groups: Tensor | None
    """the number of the user or domain of every sample, where that is known"""
    loss: LossFunction

    @cached_property
    def labels(self) -> Tensor:
        """The targets as classes."""
        return self.targets.long()

    @cached_property
    def predicted(self) -> Tensor | None:
        """The class of every target by the model: that of the largest output.

        A single output is the logit of class 1, unless the loss is cross-entropy, of which it would be the only
        class. None where targets are no classes: of a single output other numbers than 0 and 1; and floats, unless
        the loss is torch's `binary_cross_entropy_with_logits`, which takes classes as floats.
        """
        outputs, targets = self.outputs, self.targets
        single = outputs.numel() == targets.numel() and (outputs.ndim == 1 or outputs.shape[1] == 1)
        if not single or self.loss is F.cross_entropy:
            return None if targets.is_floating_point() else outputs.argmax(dim=1)
        labelled = not targets.is_floating_point() or _is_bernoulli(self.loss)
        if not labelled or not bool(((targets == 0) | (targets == 1)).all()):
            return None
        return (outputs.reshape(targets.shape) > 0).long()

    @cached_property
    def hits(self) -> Tensor | None:
        """Whether every target was predicted right."""
        return None if self.predicted is None else self.predicted == self.labels


def _is_bernoulli(loss: LossFunction) -> bool:
    """Whether it is torch's loss of a logit."""
    function = loss.func if isinstance(loss, partial) else loss
    return function is F.binary_cross_entropy_with_logits or isinstance(function, nn.BCEWithLogitsLoss)


# -- what a metric is ------------------------------------------------------------------------------


class Metric(ABC):
    """One value, from the scores of all batches: `compute(merge(merge(score(b_0), score(b_1)), ...))`.

    A score is plain data, since it travels between processes. `merge` must give one result in whatever order and
    grouping batches are merged.
    """

    name: str

    @abstractmethod
    def score(self, batch: BatchOutputs) -> Any:
        """Score one batch; None says that the metric is not defined for its targets, nor then for the data set."""

    @abstractmethod
    def merge(self, one: Any, other: Any) -> Any:
        """Join the scores of two sets of batches."""

    @abstractmethod
    def compute(self, score: Any) -> Any:
        """The value, from the score of all batches."""


class Counting(Metric):
    """A metric whose scores are lists of whole numbers, added up one by one."""

    def merge(self, one: list[list[int]], other: list[list[int]]) -> list[list[int]]:
        return [[a + b for a, b in zip_longest(*pair, fillvalue=0)] for pair in zip(one, other, strict=True)]


class InOrder(Metric):
    """A metric that keeps something of every batch, such as a sum of floats, or all outputs and targets."""

    def score(self, batch: BatchOutputs) -> dict[int, Any] | None:
        kept = self.keep(batch)
        return None if kept is None else {batch.number: kept}

    def merge(self, one: dict[int, Any], other: dict[int, Any]) -> dict[int, Any]:
        return one | other

    def compute(self, score: dict[int, Any]) -> Any:
        return self.combine([score[number] for number in sorted(score)])

    @abstractmethod
    def keep(self, batch: BatchOutputs) -> Any:
        """Choose what is kept of a batch; None says that the metric is not defined for its targets."""

    @abstractmethod
    def combine(self, kept: Sequence[Any]) -> Any:
        """The value, from what was kept of all batches, in their order."""


# -- the metrics -----------------------------------------------------------------------------------


class Loss(InOrder):
    """The mean of the loss over samples."""

    name = "loss"

    def keep(self, batch: BatchOutputs) -> tuple[float, int]:
        samples = len(batch.targets)
        return batch.loss(batch.outputs, batch.targets).item() * samples, samples

    def combine(self, kept: Sequence[tuple[float, int]]) -> float:
        return sum(loss for loss, _ in kept) / sum(samples for _, samples in kept)


class Accuracy(Counting):
    """The fraction of targets predicted right."""

    name = "accuracy"

    def score(self, batch: BatchOutputs) -> list[list[int]] | None:
        return None if batch.hits is None else [[int(batch.hits.sum())], [batch.hits.numel()]]

    def compute(self, score: list[list[int]]) -> float:
        (hits,), (count,) = score
        return hits / count


class Fractions(Counting):
    """A metric of hits over occurrences by class or group, NaN where there are none."""

    def compute(self, score: list[list[int]]) -> list[float]:
        return [hits / count if count else math.nan for hits, count in zip_longest(*score, fillvalue=0)]


class AccuracyByClass(Fractions):
    """The fraction of every class's targets predicted right, NaN for a class that does not occur."""

    name = "accuracy_by_class"

    def score(self, batch: BatchOutputs) -> list[list[int]] | None:
        if batch.hits is None:
            return None
        return _count(batch.labels, batch.hits, least=max((2, *batch.outputs.shape[1:2])))


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


METRICS: dict[str, type[Metric]] = {
    metric.name: metric for metric in (Loss, Accuracy, AccuracyByClass, AccuracyByGroup)
}
"""The metrics that are known by name."""

STANDARD = ("loss", "accuracy", "accuracy_by_class", "accuracy_by_group")
"""What a test measures if nothing else is said."""


class Metrics:
    """Several metrics, of which one pass over the data gives all.

    Args:
        metrics: names, or metrics of one's own.
    """

    def __init__(self, metrics: Iterable[str | Metric] = STANDARD) -> None:
        made = [METRICS[_known(m)]() if isinstance(m, str) else m for m in metrics]
        self._metrics = {metric.name: metric for metric in made}

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


def _known(name: str) -> str:
    if name not in METRICS:
        raise FedflatError(f"There is no metric '{name}'.{nearest(name, METRICS)}")
    return name
