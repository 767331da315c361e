"""The clients' optimiser."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.flat import Pieces
from ..core.parameters import check_parameters, choice, number
from ..errors import FedflatError


@dataclass(frozen=True)
class LocalSGD:
    """The clients' optimiser: SGD, its momentum started anew every round.

    `K_i = epochs * ceil(n_i / batch_size)` steps, the last partial batch kept; or exactly `steps` steps.
    `batch_size=None` is the full batch, so that `epochs=3` is then three steps.
    """

    lr: float = number(default=0.1, above=0)
    momentum: float = number(default=0.0, at_least=0, below=1)
    weight_decay: float = number(default=0.0, at_least=0)
    epochs: int | None = number(default=None, at_least=1, optional=True, whole=True)
    batch_size: int | None = number(default=50, at_least=1, optional=True, whole=True)
    steps: int | None = number(default=None, at_least=1, optional=True, whole=True)
    lr_decay: float = number(default=1.0, above=0, at_most=1)
    """the learning rate of round t is `lr * lr_decay**t`"""
    clip_norm: float | None = number(default=None, above=0, optional=True)
    clip_stage: str = choice("direction", "gradient", default="direction")
    """clip the corrected direction, or the raw gradient before any correction"""

    def __post_init__(self) -> None:
        check_parameters(self, "LocalSGD")
        if self.epochs is not None and self.steps is not None:
            raise FedflatError("LocalSGD: give epochs or steps, not both.")
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 1)

    def lr_in(self, round: int) -> float:
        """`η_t`."""
        return self.lr * self.lr_decay**round

    def steps_for(self, samples: int) -> int:
        """`K_i`."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * math.ceil(samples / (self.batch_size or samples))


def sgd_(
    w: list[Tensor],
    d: Pieces,
    momentum: list[Tensor] | None,
    mu: float,
    weight_decay: float,
    lr: float,
    first: bool = False,
) -> None:
    """`b ← μ b + d + λ w` (b is d + λ w in the first step), `w ← w − η b`, in one sweep over memory."""
    if momentum is None and not weight_decay:
        torch._foreach_add_(w, d, alpha=-lr)
        return
    torch._fused_sgd_(
        w,
        d,
        momentum if momentum is not None else [],
        weight_decay=weight_decay,
        momentum=mu,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=first,
    )


def drifting_sgd_(
    w: list[Tensor],
    d: Pieces,
    drift: list[Tensor] | None,
    weight_decay: float,
    lr: float,
) -> None:
    """`w ← w − η (d + drift + λ w)` in one sweep over memory; the drift stays as it is."""
    if drift is None:
        sgd_(w, d, None, 0.0, weight_decay, lr)
        return
    # a momentum that wholly persists and takes nothing in, of which Nesterov's rule adds all to the direction
    torch._fused_sgd_(
        w,
        d,
        drift,
        weight_decay=weight_decay,
        momentum=1.0,
        lr=lr,
        dampening=1.0,
        nesterov=True,
        maximize=False,
        is_first_step=False,
    )


def clip_(vector: Tensor, norm: float) -> None:
    """Scale a vector in place so that it is no longer than `norm`."""
    length = torch.linalg.vector_norm(vector).item()
    if length > norm:
        vector.mul_(norm / length)
