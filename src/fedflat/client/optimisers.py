"""The clients' optimiser."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.flat import Pieces
from .settings import LocalSGD as LocalSGD


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
