"""The worst loss within a radius, searched by ascent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.evaluation import LossFunction
from ..core.flat import FlatModel, axpy, inverse_norm
from ..data.federation import Federation, Shard
from .directions import unit
from .estimate import at_least
from .surface import Surface


@dataclass(frozen=True)
class WorstCase:
    """How much the loss can rise within the radius, as far as the ascent found."""

    sharpness: float
    by_step: tuple[float, ...]
    """the highest rise after every step; the first is SAM's sharpness, if that is positive"""


def worst_case_sharpness(
    model: nn.Module | FlatModel,
    data: Shard | Federation,
    rho: float = 0.05,
    steps: int = 10,
    restarts: int = 0,
    seed: int = 0,
    at: Tensor | None = None,
    loss: LossFunction = F.cross_entropy,
) -> WorstCase:
    """`max_{‖δ‖≤ρ} L(w + δ) − L(w)`, a lower bound of it, by `steps` projected ascent steps.

    The maximum that SAM takes one step towards (Foret et al. 2021, Eq. 1). δ starts at SAM's `ρ n(∇L(w))`; then
    `δ ← Π(δ + s n(∇L(w + δ)))`, Π the projection on the ball and s = 2ρ. A step that does not raise the loss is taken
    back and s is halved. `restarts` more ascents start at random points of the sphere, as the only one does where the
    gradient is zero. A forward and a backward pass per step.
    """
    at_least("steps", steps, 1)
    surface = Surface(model, data, loss, at)
    base, gradient = surface.value_and_gradient()
    starts = [gradient.mul_(inverse_norm(gradient))] if inverse_norm(gradient) else []
    random = restarts if starts else max(1, restarts)
    starts += [unit(surface, seed, "worst case", number) for number in range(random)]
    climbs = [_climb(surface, start, rho, steps) for start in starts]
    rises = [max(base, *heights) - base for heights in zip(*climbs, strict=True)]
    return WorstCase(rises[-1], tuple(rises))


def _climb(surface: Surface, direction: Tensor, rho: float, steps: int) -> list[float]:
    """The loss after every step, which never falls."""
    shift, stride = direction * rho, 2 * rho
    height, gradient = surface.value_and_gradient(surface.w + shift)
    heights = [height]
    for _ in range(steps - 1):
        trial = axpy(shift, gradient, stride * inverse_norm(gradient))
        length = torch.linalg.vector_norm(trial).item()
        if length > rho:
            trial.mul_(rho / length)
        there, steepest = surface.value_and_gradient(surface.w + trial)
        if there > height:
            shift, height, gradient = trial, there, steepest
        else:
            stride /= 2
        heights.append(height)
    return heights
