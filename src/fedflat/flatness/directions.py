"""Random vectors over a model's weights, the same for the same seed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..core.flat import inverse_norm
from ..core.randomness import generator
from .surface import Surface


def gaussian(surface: Surface, seed: int, purpose: str, number: int) -> Tensor:
    """Independent standard normal entries; 0 on weights that are constants."""
    rng = generator(seed, f"flatness {purpose}", number)
    kind = np.float64 if surface.w.dtype == torch.float64 else np.float32
    return surface.movable(torch.from_numpy(rng.standard_normal(surface.size, dtype=kind)).to(surface.w))


def unit(surface: Surface, seed: int, purpose: str, number: int) -> Tensor:
    """Uniform on the unit sphere."""
    vector = gaussian(surface, seed, purpose, number)
    return vector.mul_(inverse_norm(vector))


def signs(surface: Surface, seed: int, purpose: str, number: int) -> Tensor:
    """Independent entries 1 or −1 with equal probability (Rademacher); 0 on weights that are constants."""
    rng = generator(seed, f"flatness {purpose}", number)
    draws = torch.from_numpy(rng.integers(0, 2, surface.size, dtype=np.int8))
    return surface.movable(draws.to(surface.w).mul_(2).sub_(1))
