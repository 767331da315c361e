"""What uploaded buffers must be, as far as their names say: BatchNorm's variances and counters are not negative."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.flat import FlatModel

NOT_NEGATIVE = ("running_var", "num_batches_tracked")
COUNTER = "num_batches_tracked"
COUNTS = 100
"""Batches that a counter can have met in one local step, at most."""


@dataclass(frozen=True)
class BufferRules:
    """Where in the vector of all buffers what lies."""

    not_negative: Tensor
    counter: Tensor
    averaged: Tensor
    """real numbers: how far they go is what a norm bound is about"""

    @classmethod
    def of(cls, model: FlatModel) -> BufferRules | None:
        """Of a model; None where it has no buffers."""
        names = {id(b): n for child in model.module.modules() for n, b in child._buffers.items()}
        held = [(names.get(id(b), ""), b) for b in model.buffers.tensors()]
        vector = model.read_buffers()
        if vector is None:
            return None

        def where(chosen: list[bool]) -> Tensor:
            parts = [torch.full((b.numel(),), c) for c, (_, b) in zip(chosen, held, strict=True)]
            marked = torch.zeros(len(vector), dtype=torch.bool)  # and not what follows of large whole numbers
            marked[: sum(map(len, parts))] = torch.cat(parts)
            return marked.to(model.vector.device)

        return cls(
            where([name in NOT_NEGATIVE for name, _ in held]),
            where([name == COUNTER for name, _ in held]),
            where([b.is_floating_point() for _, b in held]),
        )

    def fault(self, buffers: Tensor, before: Tensor, steps: int) -> str | None:
        """Why buffers must be refused."""
        if bool((buffers[self.not_negative] < 0).any()):
            return "its buffers hold a negative variance or count."
        if bool((buffers[self.counter] > before[self.counter] + COUNTS * steps).any()):
            return f"its buffers count more batches than {steps} steps can have."
        return None

    def statistics(self, change: Tensor) -> Tensor:
        """How far statistics went: the change without counters."""
        return torch.where(self.averaged, change, 0.0)
