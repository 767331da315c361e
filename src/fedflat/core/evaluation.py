"""A pass of a model over a data set, batch by batch; what is measured on the way is `core/metrics`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from .flat import FlatModel
from .metrics import BatchOutputs, LossFunction as LossFunction, Metrics, Partials, Score

BATCH = 1000
"""Samples per evaluation batch: large, so that matrix products are efficient."""


class Samples(Protocol):
    """A data set that can be looked at batch by batch, in order and without augmentation."""

    def __len__(self) -> int: ...

    def batch(self, first: int, size: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some samples."""

    def group_numbers(self, first: int, size: int) -> Tensor | None:
        """The groups of some samples, where there are any."""


def batches_in(data: Samples) -> int:
    """How many batches `score_batches` divides a data set into."""
    return math.ceil(len(data) / BATCH)


def score_batches(
    model: FlatModel,
    w: Tensor | None,
    data: Samples,
    loss: LossFunction,
    metrics: Metrics,
    which: Iterable[int],
) -> Partials:
    """Score the model at w on the named batches, in evaluation mode."""
    partials: Partials = {}
    with model.at(w), model.evaluating(), torch.no_grad():
        for number in which:
            inputs, targets = data.batch(number * BATCH, BATCH)
            groups = data.group_numbers(number * BATCH, BATCH)
            batch = BatchOutputs(number, model.outputs(inputs), targets, groups, loss)
            partials = metrics.merge(partials, metrics.score(batch))
    return partials


def evaluate(
    model: FlatModel, w: Tensor | None, data: Samples, loss: LossFunction, metrics: Metrics | None = None
) -> Score:
    """Evaluate the model at w on all of a data set."""
    metrics = metrics or Metrics()
    return metrics.compute(score_batches(model, w, data, loss, metrics, range(batches_in(data))))
