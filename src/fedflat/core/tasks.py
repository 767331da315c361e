"""What is predicted: one class of each sample, several labels, or numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets to the mean loss of a batch."""

CLASSIFICATION, MULTI_LABEL, REGRESSION, UNKNOWN = "classification", "multi-label", "regression", "unknown"
TASKS = (CLASSIFICATION, MULTI_LABEL, REGRESSION)

_OF_NUMBERS = (F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss)
_MODULES_OF_NUMBERS = (nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss)


def task_of(loss: LossFunction, outputs: Tensor, targets: Tensor) -> str:
    """What a loss is for: what it says itself (`loss.task`), or what kinds of outputs and targets tell.

    Looks at kinds and shapes alone, never at values: no number is read back from an accelerator. Floats under a loss
    that is not known are `unknown`: they may be numbers, labels or probabilities.
    """
    said = getattr(loss, "task", None)
    if said in TASKS:
        return str(said)
    if is_bernoulli(loss):
        several = targets.ndim > 1 and targets.shape == outputs.shape and targets.shape[-1] > 1
        return MULTI_LABEL if several else CLASSIFICATION
    if not targets.is_floating_point():
        return CLASSIFICATION
    return REGRESSION if _is_one_of(loss, _OF_NUMBERS, _MODULES_OF_NUMBERS) else UNKNOWN


def is_bernoulli(loss: LossFunction) -> bool:
    """Whether it is torch's loss of a logit."""
    return _is_one_of(loss, (F.binary_cross_entropy_with_logits,), (nn.BCEWithLogitsLoss,))


def is_single(outputs: Tensor) -> bool:
    """Whether there is one output per sample."""
    return outputs.ndim == 1 or outputs.shape[-1] == 1


def _is_one_of(loss: LossFunction, functions: tuple[object, ...], modules: tuple[type, ...]) -> bool:
    function = loss.func if isinstance(loss, partial) else loss
    return function in functions or isinstance(function, modules)
