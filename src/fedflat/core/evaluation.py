"""How well a model does on a data set: loss, accuracy, accuracy by class, by group and by client."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .flat import FlatModel

if TYPE_CHECKING:
    from ..data.federation import Federation, Shard

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets to the mean loss of a batch."""

BATCH = 1000
"""Samples per evaluation batch: large, so that matrix products are efficient."""


@dataclass(frozen=True)
class Score:
    """A mean loss, and the fraction of samples classified right (None for targets that are no classes)."""

    loss: float
    accuracy: float | None
    by_class: list[float] | None = None
    """the same fraction for every class, NaN for one that does not occur"""
    by_group: list[float] | None = None
    """the same fraction for every user or domain, where the data says whose samples are whose"""


@dataclass(frozen=True)
class BatchScore:
    """A sum of losses over some samples; for every class how often it occurs and how often it is recognised.

    The same for every group, where there are any. These are whole numbers: sums of them do not depend on who counted.
    """

    samples: int
    loss: float
    right: list[int]
    predictions: list[int]
    group_right: list[int] = field(default_factory=list)
    group_predictions: list[int] = field(default_factory=list)


def batches_in(data: Shard) -> int:
    """How many batches `score_batches` divides a data set into."""
    return math.ceil(len(data) / BATCH)


def score_batches(
    model: FlatModel, w: Tensor, data: Shard, loss: LossFunction, which: Iterable[int]
) -> list[BatchScore]:
    """Evaluate the model at w on the named batches, in evaluation mode, without augmentation."""
    scores = []
    with model.at(w), model.evaluating(), torch.no_grad():
        for number in which:
            inputs, targets = data.batch(number * BATCH, BATCH)
            outputs = model.outputs(inputs)
            total = loss(outputs, targets).item() * len(targets)
            counts: list[list[int]] = [[], []]
            if (guessed := _predicted(outputs, targets, loss)) is not None:
                labels, classes = targets.long(), max((2, *outputs.shape[1:2]))
                hits = guessed == labels
                counts = _counted(labels, hits, classes)
                if (groups := data.group_numbers(number * BATCH, BATCH)) is not None:
                    counts += _counted(groups.view(-1, *(1,) * (labels.ndim - 1)).expand_as(labels), hits, 1)
            scores.append(BatchScore(len(targets), total, *counts))
    return scores


def _counted(numbers: Tensor, hits: Tensor, least: int) -> list[list[int]]:
    """How often every number is hit, and how often it occurs."""
    return [torch.bincount(found, minlength=least).tolist() for found in (numbers[hits], numbers.flatten())]


def _predicted(outputs: Tensor, targets: Tensor, loss: LossFunction) -> Tensor | None:
    """The class of every target by the model: that of the largest output.

    A single output is the logit of class 1, unless the loss is cross-entropy, of which it would be the only class.
    None where targets are no classes: of a single output other numbers than 0 and 1; and floats, unless the loss is
    torch's `binary_cross_entropy_with_logits`, which takes classes as floats.
    """
    single = outputs.numel() == targets.numel() and (outputs.ndim == 1 or outputs.shape[1] == 1)
    if not single or loss is F.cross_entropy:
        return None if targets.is_floating_point() else outputs.argmax(dim=1)
    labelled = not targets.is_floating_point() or _is_bernoulli(loss)
    if not labelled or not bool(((targets == 0) | (targets == 1)).all()):
        return None
    return (outputs.reshape(targets.shape) > 0).long()


def _is_bernoulli(loss: LossFunction) -> bool:
    """Whether it is torch's loss of a logit."""
    function = loss.func if isinstance(loss, partial) else loss
    return function is F.binary_cross_entropy_with_logits or isinstance(function, nn.BCEWithLogitsLoss)


def total_score(scores: list[BatchScore]) -> Score:
    """The whole from its batches."""
    loss = sum(s.loss for s in scores) / sum(s.samples for s in scores)
    if not all(s.predictions for s in scores):
        return Score(loss, None)
    right, predictions = _summed([s.right for s in scores]), _summed([s.predictions for s in scores])
    accuracy = float(right.sum() / predictions.sum())
    by_class = _shares(right, predictions)
    if not scores[0].group_predictions:
        return Score(loss, accuracy, by_class)
    hits, occurrences = (
        _summed([getattr(s, name) for s in scores]) for name in ("group_right", "group_predictions")
    )
    return Score(loss, accuracy, by_class, _shares(hits, occurrences))


def _summed(counts: list[list[int]]) -> np.ndarray:
    """Counts by number, of all batches; a label without an output makes its batch's longer."""
    total = np.zeros(max(map(len, counts)))
    for one in counts:
        total[: len(one)] += one
    return total


def _shares(right: np.ndarray, predictions: np.ndarray) -> list[float]:
    """The fraction that is right, NaN where there is nothing."""
    hits = np.pad(right, (0, len(predictions) - len(right)))
    shares: list[float] = np.divide(
        hits, predictions, out=np.full(len(predictions), np.nan), where=predictions > 0
    ).tolist()
    return shares


def evaluate(model: FlatModel, w: Tensor, data: Shard, loss: LossFunction) -> Score:
    """Evaluate the model at w on all of a data set."""
    return total_score(score_batches(model, w, data, loss, range(batches_in(data))))


class ClassMix:
    """How clients' samples spread over the classes: what a test says about each of them, at no further pass.

    A client's accuracy is taken on the test set in its own mix of classes, `Σ_c p_i(c) accuracy(c)`: what it would
    see on unseen data like its own, if clients differ in their labels. Other differences it does not show.
    """

    LARGEST = 20_000_000
    """Clients times classes up to which it is worth the memory."""

    def __init__(self, shares: np.ndarray) -> None:
        self.shares = shares
        """`p_i(c)`, a client a row"""

    @classmethod
    def of(cls, federation: Federation) -> ClassMix | None:
        """Of a federation; None where targets are no classes, or clients too many."""
        size = len(federation) * federation.classes
        if federation.test is None or size > cls.LARGEST:
            return None
        labels = federation.labels_by_client()
        if labels is None:
            return None
        owners, targets = labels
        counts = np.bincount(owners * federation.classes + targets, minlength=size)
        shares = counts.reshape(len(federation), -1).astype(np.float32)
        return cls(shares / shares.sum(axis=1, keepdims=True))

    def spread(self, by_class: list[float]) -> dict[str, float] | None:
        """Mean, deviation, and the mean of the tenth of clients that fare worst; None if a class was not tested."""
        accuracy = np.asarray(by_class)[: self.shares.shape[1]]
        missing = np.isnan(accuracy)
        if len(accuracy) < self.shares.shape[1] or (self.shares[:, missing] > 0).any():
            return None
        each = np.sort(self.shares @ np.where(missing, 0.0, accuracy))
        worst = each[: math.ceil(len(each) / 10)]
        return {"mean": float(each.mean()), "std": float(each.std()), "worst_decile": float(worst.mean())}
