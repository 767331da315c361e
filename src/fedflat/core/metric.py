"""What a metric is: a small object that scores a batch, merges scores, and computes a value from them.

A test set is scored in batches, by any number of processes. Every metric has the same bits however batches were
shared out: a score is made of whole numbers (`Counting`), or is kept batch by batch and added up in their order
(`InOrder`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .tasks import CLASSIFICATION, MULTI_LABEL, REGRESSION, LossFunction, is_bernoulli, task_of

Counts = list[list[int]]


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
    def task(self) -> str:
        """What is predicted."""
        return task_of(self.loss, self.outputs, self.targets)

    @cached_property
    def labels(self) -> Tensor:
        """The targets as classes."""
        return self.targets.long()

    @cached_property
    def predicted(self) -> Tensor | None:
        """The class of every target by the model: that of the largest output.

        A single output is the logit of class 1, unless the loss is cross-entropy, of which it would be the only
        class; with several labels, each output is the logit of its label. None where targets are no classes: of a
        single output other numbers than 0 and 1; and floats, unless the loss takes classes as floats.
        """
        outputs, targets = self.outputs, self.targets
        if self.task == MULTI_LABEL:
            fits = outputs.shape == targets.shape and _are_binary(targets)
            return (outputs > 0).long() if fits else None
        single = outputs.numel() == targets.numel() and (outputs.ndim == 1 or outputs.shape[1] == 1)
        if not single or self.loss is F.cross_entropy:
            as_classes = not targets.is_floating_point() and self.task == CLASSIFICATION
            return outputs.argmax(dim=1) if as_classes else None
        said = is_bernoulli(self.loss) or getattr(self.loss, "task", None) == CLASSIFICATION
        labelled = (not targets.is_floating_point() or said) and self.task == CLASSIFICATION
        return (outputs.reshape(targets.shape) > 0).long() if labelled and _are_binary(targets) else None

    @cached_property
    def hits(self) -> Tensor | None:
        """Whether every target was predicted right; of several labels, whether all of a sample were."""
        if self.predicted is None:
            return None
        right = self.predicted == self.labels
        return right.flatten(1).all(dim=1) if self.task == MULTI_LABEL else right

    @cached_property
    def classes(self) -> int:
        """How many classes, or labels, the model tells apart; a single logit tells two."""
        least = 1 if self.task == MULTI_LABEL else 2
        return max(least, int(self.outputs.shape[1])) if self.outputs.ndim > 1 else least

    @cached_property
    def counts(self) -> Counts | None:
        """By class: targets predicted right, predictions, targets; then whether these are several labels."""
        predicted, labels = self.predicted, self.labels
        if predicted is None:
            return None
        if self.task == MULTI_LABEL:
            rows = (predicted * labels, predicted, labels)
            return [*(row.flatten(0, -2).sum(0).tolist() for row in rows), [1]]
        found = (labels[predicted == labels], predicted, labels)
        return [*(torch.bincount(row.flatten(), minlength=self.classes).tolist() for row in found), [0]]

    @cached_property
    def logits(self) -> tuple[Tensor, Tensor] | None:
        """A row of logits, one per class, and the class of every target; several labels are two classes each."""
        if self.predicted is None:
            return None
        outputs, labels = self.outputs.double(), self.labels.flatten()
        if outputs.numel() == labels.numel() and self.loss is not F.cross_entropy:
            z = outputs.flatten()
            return torch.stack([torch.zeros_like(z), z], dim=1), labels
        rows = outputs.movedim(1, -1).reshape(-1, outputs.shape[1])
        inside = labels < rows.shape[1]  # a class without an output has no probability
        return (rows, labels) if bool(inside.all()) else None

    @cached_property
    def numbers(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Outputs and targets as numbers, a row per sample; None where targets are classes."""
        if self.task in (CLASSIFICATION, MULTI_LABEL) or self.outputs.numel() != self.targets.numel():
            return None
        if self.task != REGRESSION and not self.targets.is_floating_point():
            return None
        rows = len(self.targets)
        outputs, targets = self.outputs.reshape(rows, -1), self.targets.reshape(rows, -1)
        return outputs.double().cpu().numpy(), targets.double().cpu().numpy()


def _are_binary(targets: Tensor) -> bool:
    return bool(((targets == 0) | (targets == 1)).all())


class Metric(ABC):
    """One value, from the scores of all batches: `compute(merge(merge(score(b_0), score(b_1)), ...))`.

    A score is plain data, since it travels between processes. `merge` must give one result in whatever order and
    grouping batches are merged.
    """

    name: str
    larger_is_better: bool | None = True
    """whether a larger value is a better one; None where the value is no number to compare by"""
    share: bool = False
    """whether it is a fraction that people read in per cent"""

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

    def merge(self, one: Counts, other: Counts) -> Counts:
        empty: list[int] = []
        pairs = zip_longest(one, other, fillvalue=empty)
        return [[a + b for a, b in zip_longest(*pair, fillvalue=0)] for pair in pairs]


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


class FunctionMetric(InOrder):
    """A person's own function of all outputs and all targets of a data set, as tensors in its order.

    Args:
        function: from outputs and targets to a number, or to a list of numbers.
        name: by default that of the function.
        larger_is_better: what `monitor` goes by; None where the function gives a list.
        share: whether the value is a fraction to show in per cent.
    """

    def __init__(
        self,
        function: Callable[[Tensor, Tensor], Any],
        name: str | None = None,
        larger_is_better: bool | None = True,
        share: bool = False,
    ) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.larger_is_better, self.share = larger_is_better, share

    def keep(self, batch: BatchOutputs) -> tuple[np.ndarray, np.ndarray]:
        return batch.outputs.cpu().numpy(), batch.targets.cpu().numpy()

    def combine(self, kept: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
        outputs, targets = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*kept, strict=True))
        value = self.function(outputs, targets)
        return value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value
