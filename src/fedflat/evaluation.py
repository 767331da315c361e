"""Loss and accuracy of a model on a data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .flat import FlatModel

if TYPE_CHECKING:
    from .data.federation import Shard
    from .local import LossFunction

BATCH = 2048
"""Samples per evaluation batch: large, so that matrix products are efficient."""


@dataclass(frozen=True)
class Score:
    """A mean loss, and the fraction of samples classified right (None for targets that are no classes)."""

    loss: float
    accuracy: float | None


def evaluate(model: FlatModel, w: Tensor, data: Shard, loss: LossFunction, batch: int = BATCH) -> Score:
    """Evaluate the model at w, in evaluation mode, without augmentation."""
    classes = not data.targets.is_floating_point()
    total, right, predictions = 0.0, 0, 0
    with model.at(w), model.evaluating() as module, torch.inference_mode():
        for inputs, targets in data.batches(batch):
            outputs = module(inputs)
            total += loss(outputs, targets).item() * len(targets)
            if classes:
                right += int((outputs.argmax(dim=1) == targets).sum())
                predictions += targets.numel()
    return Score(total / len(data), right / predictions if classes else None)
