"""Loss and accuracy of a model on a data set."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .flat import FlatModel

if TYPE_CHECKING:
    from .data.federation import Shard
    from .local import LossFunction

BATCH = 1000
"""Samples per evaluation batch: large, so that matrix products are efficient."""


@dataclass(frozen=True)
class Score:
    """A mean loss, and the fraction of samples classified right (None for targets that are no classes)."""

    loss: float
    accuracy: float | None


@dataclass(frozen=True)
class BatchScore:
    """A sum of losses over some samples, and how many predictions were right."""

    samples: int
    loss: float
    right: int
    predictions: int


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
            right = int((outputs.argmax(dim=1) == targets).sum()) if classes else 0
            predictions = targets.numel() if classes else 0
            total = loss(outputs, targets).item() * len(targets)
            scores.append(BatchScore(len(targets), total, right, predictions))
    return scores


def total_score(scores: list[BatchScore]) -> Score:
    """The whole from its batches."""
    predictions = sum(s.predictions for s in scores)
    accuracy = sum(s.right for s in scores) / predictions if predictions else None
    return Score(sum(s.loss for s in scores) / sum(s.samples for s in scores), accuracy)


def evaluate(model: FlatModel, w: Tensor, data: Shard, loss: LossFunction) -> Score:
    """Evaluate the model at w on all of a data set."""
    return total_score(score_batches(model, w, data, loss, range(batches_in(data))))
