"""What a mechanism sees of a client's round."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.flat import Flat, Layout


@dataclass(eq=False)
class Local:
    """One client's round: what it received, what it keeps, and where it is."""

    layout: Layout
    """names and shapes of the parameters in a flat vector"""
    at: InitVar[Flat]
    round: int
    client: int
    samples: int
    steps: int
    lr: float
    """`η_t`, the learning rate of the round"""
    rate_sum: float
    """`Σ_k η_k` over the round's steps; `K_i η_t` where the rate stays the same within a round"""
    start: Tensor
    """the model received, where the client starts"""
    received: dict[str, Any]
    """what came beside the model, by name"""
    state: dict[str, Tensor]
    """what the client keeps between rounds: replace vectors, do not change them in place"""
    buffers: Tensor | None
    """the model's buffers as the round began; None where it has none"""
    seed: int
    secret: bytes | None = None
    """the node's, in a real federation: what no other party can know is drawn from it"""
    memo: dict[Any, Any] = field(default_factory=dict)
    """a mechanism's own memo for this round, under `self`"""
    update: Tensor = field(init=False, repr=False)
    """`Δ_i`, from `end` on; `end` may change it in place, and that is what is uploaded"""
    _base: Tensor | None = None
    """where the iterate began, if a shift that is alike in every step carries it along"""
    _scratch: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self, at: Flat) -> None:
        self._at = at.vector

    @property
    def w(self) -> Tensor:
        """The local iterate `w_{i,k}`; read it, never write it."""
        return self._at if self._base is None else self.start + (self._at - self._base)

    def moved(self) -> Tensor:
        """How far the iterate has gone: `w_{i,k} − w_{i,0}`."""
        return self._at - (self.start if self._base is None else self._base)

    def carry(self, offset: Tensor) -> None:
        """Let the iterate lie `offset` away from `w` for the rest of the round."""
        self._base = self.start + offset
        self._at.copy_(self._base)

    def kept(self, name: str) -> Tensor:
        """A vector the client keeps; zeros where it keeps nothing yet."""
        value = self.state.get(name)
        return torch.zeros_like(self.start) if value is None else value

    def scratch(self, name: str) -> Tensor:
        """A vector to compute in, one for every name in a round; its content is undefined at first."""
        if name not in self._scratch:
            self._scratch[name] = torch.empty_like(self.start)
        return self._scratch[name]

    def pseudo_gradient(self) -> Tensor:
        """`G_i = −Δ_i / Σ_k η_k`."""
        return self.update / -self.rate_sum
