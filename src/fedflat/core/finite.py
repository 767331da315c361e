"""Numbers that are no longer finite: how to find them, what the likely cause is."""

from __future__ import annotations

import math
from statistics import median

import torch
from torch import Tensor

from ..errors import FedflatError
from .messages import Upload

MARGIN = 1e8
"""How far lr stays from the ends of its number type: methods divide by it, and multiply by samples and steps."""
APART = 1000.0
"""A client whose training loss is this many times the others' is named as the likely cause."""


def is_finite(value: Tensor | float) -> bool:
    """Whether no entry is NaN or infinite."""
    if not isinstance(value, Tensor):
        return math.isfinite(value)
    # a sum is finite only if every entry is (or cancels no infinity): one pass, no copy
    return math.isfinite(value.sum().item()) or bool(torch.isfinite(value).all())


def is_as_finite(buffers: Tensor, before: Tensor | None) -> bool:
    """Whether no entry is NaN or infinite but those that were infinite before, as in a mask."""
    if is_finite(buffers) or before is None or before.shape != buffers.shape:
        return is_finite(buffers)
    return bool((torch.isfinite(buffers) | (buffers == before)).all())


def is_spoiled(upload: Upload, buffers: Tensor | None = None) -> bool:
    """Whether an upload holds NaN or infinite values that were not among the buffers sent."""
    if isinstance(upload.buffers, Tensor) and not is_as_finite(upload.buffers, buffers):
        return True
    vectors = (upload.update, *upload.vectors.values())
    return not all(is_finite(v) for v in vectors if isinstance(v, Tensor) and v.dtype.is_floating_point)


def likely_cause(lr: float, losses: dict[int, float]) -> str:
    """Why a round's sums are not finite, as far as the clients' training losses tell."""
    worst = max(losses, key=lambda client: _height(losses[client]), default=None)
    others = [loss for client, loss in losses.items() if client != worst]
    if worst is not None and others and all(map(math.isfinite, others)):
        usual = median(others)
        if _height(losses[worst]) > APART * max(usual, 1.0):
            return (
                f"Client {worst} had a training loss of {losses[worst]:.3g}, the others about {usual:.3g}: look at "
                "its data, or bound what one client can do with norm_bound."
            )
    return f"lr={lr:g} is probably too high: lower it, or bound the local steps with clip_norm."


def _height(loss: float) -> float:
    return loss if loss == loss else math.inf


def check_lr(least: float, most: float, dtype: torch.dtype) -> None:
    """Whether learning rates can be divided by, and multiplied with, in a number type."""
    limits, name = torch.finfo(dtype), str(dtype).removeprefix("torch.")
    if least < limits.tiny * MARGIN:
        raise FedflatError(
            f"lr falls to {least:.3g}, below what {name} can divide by ({limits.tiny * MARGIN:.1g}): give a higher "
            "lr, a milder lr_decay, or fewer rounds."
        )
    if most > limits.max / MARGIN:
        raise FedflatError(f"lr={most:.3g} is too much for {name}: give a lower one.")
