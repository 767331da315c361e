"""Models by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import nn

from ..errors import FedflatError, nearest
from ..randomness import torch_seeded

if TYPE_CHECKING:
    from ..data.federation import Federation


def mlp(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...] = (200, 200)) -> nn.Module:
    """Fully connected with ReLU: 784-200-200-10 on Fashion-MNIST."""
    sizes = [math.prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {"mlp": mlp}


def build_model(name: str, federation: Federation, seed: int) -> nn.Module:
    """A named model for a federation's samples, its weights drawn from the seed."""
    if name not in MODELS:
        raise FedflatError(f"There is no model '{name}'.{nearest(name, MODELS)}")
    with torch_seeded(seed, "weights"):
        return MODELS[name](federation.sample_shape, federation.classes)
