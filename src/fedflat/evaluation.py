"""Loss and accuracy of a model on a data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .flat import FlatModel

if TYPE_CHECKING:
    from .local import LossFunction

BATCH = 2048
"""Samples per evaluation batch: large, so that matrix products are efficient."""


@dataclass(frozen=True)
class Score:
    """A mean loss, and the fraction of samples classified right (None for targets that are no classes)."""

    loss: float
    accuracy: float | None


def evaluate(
    model: FlatModel, w: Tensor, data: tuple[Tensor, Tensor], loss: LossFunction, batch: int = BATCH
) -> Score:
    """Evaluate the model at w, in evaluation mode, without augmentation."""
    inputs, targets = data
    classes = not targets.is_floating_point()
    total, right, predictions = 0.0, 0, targets.numel() if classes else len(targets)
    with model.at(w), model.evaluating() as module, torch.inference_mode():
        for first in range(0, len(targets), batch):
            x, y = inputs[first : first + batch], targets[first : first + batch]
            outputs = module(x)
            total += loss(outputs, y).item() * len(y)
            if classes:
                right += int((outputs.argmax(dim=1) == y).sum())
    return Score(total / len(targets), right / predictions if classes else None)
