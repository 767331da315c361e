"""The loss after a low-pass filter: its mean over Gaussian noise on the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.evaluation import LossFunction
from ..core.flat import FlatModel
from ..data.federation import Federation, Shard
from .directions import gaussian
from .estimate import Estimate, at_least
from .surface import Surface


@dataclass(frozen=True)
class LowPass:
    """The filtered loss, and the loss itself."""

    filtered: Estimate
    loss: float
    rise: Estimate
    """the filtered loss minus the loss: `σ² tr H / 2` for small σ"""


def low_pass(
    model: nn.Module | FlatModel,
    data: Shard | Federation,
    sigma: float = 0.01,
    draws: int = 100,
    antithetic: bool = False,
    confidence: float = 0.95,
    seed: int = 0,
    at: Tensor | None = None,
    loss: LossFunction = F.cross_entropy,
) -> LowPass:
    """`E_{τ ~ N(0, σ²I)} L(w − τ)` by Monte Carlo, L the mean loss on all of `data`.

    LPF of Bisla, Wang & Choromanska (2022), Low-Pass Filtering SGD. A forward pass per draw. With `antithetic` each
    second draw is the first one's opposite, `(L(w − τ) + L(w + τ))/2`: the same expectation, and a far narrower
    interval where the gradient is not zero.
    """
    at_least("draws", draws, 4 if antithetic else 2)
    surface = Surface(model, data, loss, at)
    base, losses = surface.value(), []
    for number in range(draws // 2 if antithetic else draws):
        noise = gaussian(surface, seed, "low pass", number)
        value = surface.value(surface.w.sub(noise, alpha=sigma))
        if antithetic:
            value = (value + surface.value(surface.w.add(noise, alpha=sigma))) / 2
        losses.append(value)
    return LowPass(Estimate.of(losses, confidence), base, Estimate.of(losses, confidence, offset=-base))
