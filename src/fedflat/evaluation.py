"""How well a model does on a data set: loss, accuracy, accuracy by client."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .flat import FlatModel

if TYPE_CHECKING:
    from .data.federation import Federation, Shard

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


@dataclass(frozen=True)
class BatchScore:
    """A sum of losses over some samples; for every class how often it occurs and how often it is recognised."""

    samples: int
    loss: float
    right: list[int]
    predictions: list[int]


def batches_in(data: Shard) -> int:
    """How many batches `score_batches` divides a data set into."""
    return math.ceil(len(data) / BATCH)


def score_batches(
    model: FlatModel, w: Tensor, data: Shard, loss: LossFunction, which: Iterable[int]
) -> list[BatchScore]:
    """Evaluate the model at w on the named batches, in evaluation mode, without augmentation."""
    classes = not data.targets.is_floating_point()
    scores = []
    with model.at(w), model.evaluating() as module, torch.inference_mode():
        for number in which:
            inputs, targets = data.batch(number * BATCH, BATCH)
            outputs = module(inputs)
            total = loss(outputs, targets).item() * len(targets)
            right, predictions = [], []
            if classes:
                hits = targets[outputs.argmax(dim=1) == targets]
                number = outputs.shape[1]
                right = torch.bincount(hits, minlength=number).tolist()
                predictions = torch.bincount(targets.flatten(), minlength=number).tolist()
            scores.append(BatchScore(len(targets), total, right, predictions))
    return scores


def total_score(scores: list[BatchScore]) -> Score:
    """The whole from its batches."""
    loss = sum(s.loss for s in scores) / sum(s.samples for s in scores)
    if not scores[0].predictions:
        return Score(loss, None)
    longest = max(len(s.predictions) for s in scores)  # a label without an output makes its batch's longer
    right, predictions = np.zeros(longest), np.zeros(longest)
    for score in scores:
        right[: len(score.right)] += score.right
        predictions[: len(score.predictions)] += score.predictions
    by_class = np.divide(right, predictions, out=np.full(longest, np.nan), where=predictions > 0)
    return Score(loss, float(right.sum() / predictions.sum()), by_class.tolist())


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
