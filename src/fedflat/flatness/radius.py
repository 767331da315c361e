"""The loss at growing distance from a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.evaluation import LossFunction
from ..core.flat import FlatModel, inverse_norm
from ..data.federation import Federation, Shard
from .directions import unit
from .estimate import Estimate, at_least
from .surface import Surface


@dataclass(frozen=True)
class RadiusProfile:
    """The loss at every radius."""

    radii: tuple[float, ...]
    random: tuple[Estimate, ...]
    """the mean over random directions"""
    gradient: tuple[float, ...]
    """along the gradient's direction, uphill"""

    def numbers(self, places: int = 4) -> dict[str, float]:
        """The loss at a few radii, evenly spaced over all of them; `uphill` where that is another one."""
        last = len(self.radii) - 1
        found: dict[str, float] = {}
        for index in sorted({round(last * place / max(1, places - 1)) for place in range(places)}):
            radius = f"{self.radii[index]:g}"
            found[radius] = self.random[index].value
            if self.radii[index]:
                found[f"{radius} uphill"] = self.gradient[index]
        return found


def loss_along_radius(
    model: nn.Module | FlatModel,
    data: Shard | Federation,
    radii: Sequence[float] = tuple(range(16)),
    directions: int = 10,
    confidence: float = 0.95,
    seed: int = 0,
    at: Tensor | None = None,
    loss: LossFunction = F.cross_entropy,
) -> RadiusProfile:
    """`mean_u L(w + r u)` over random unit vectors u, and `L(w + r n(∇L(w)))`, at every radius r.

    FedGF (Lee & Yoon 2024), Figure 5, which does not state its directions: here uniform on the sphere over all
    weights, the same ones at every radius. A forward pass per radius and direction.
    """
    at_least("directions", directions, 2)
    surface = Surface(model, data, loss, at)
    base, gradient = surface.value_and_gradient()
    uphill = gradient.mul_(inverse_norm(gradient))

    def profile(direction: Tensor) -> list[float]:
        return [surface.value(surface.w.add(direction, alpha=r)) if r else base for r in radii]

    curves = [profile(unit(surface, seed, "radius", number)) for number in range(directions)]
    means = tuple(Estimate.of(losses, confidence) for losses in zip(*curves, strict=True))
    return RadiusProfile(tuple(float(r) for r in radii), means, tuple(profile(uphill)))
