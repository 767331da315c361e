"""Teachers: models that do not change during a client's round, whose outputs are computed once for many steps.

A teacher's outputs on a sample depend on the sample alone. Without augmentation all of a client's samples are known
before the first step: the outputs are computed once a round, in large batches. With augmentation they are computed
once an epoch, after its samples have been drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.flat import Flat
from ..gradients.base import Oracle
from .batches import Batch, Epoch

Transform = Callable[[Tensor], Tensor]
"""Of the outputs of many samples, sample by sample."""
AT_ONCE = 512
"""Samples per forward pass."""


@dataclass
class Passes:
    """Counts of passes over a batch: what the method makes, and how many of these were not computed."""

    forward: int = 0
    backward: int = 0
    spared_forward: int = 0
    spared_backward: int = 0

    def make(self, forward: int, backward: int) -> None:
        """Count passes that are computed."""
        self.forward += forward
        self.backward += backward

    def skip(self, forward: int, backward: int) -> None:
        """Count passes that the method makes and that need not be computed."""
        self.make(forward, backward)
        self.spared_forward += forward
        self.spared_backward += backward


class Teacher:
    """One model with fixed weights, in evaluation mode, with the buffers that the client's round began with."""

    def __init__(self, oracle: Oracle, w: Flat, then: Transform | None, passes: Passes) -> None:
        self._oracle, self._w, self._then, self._passes = oracle, w, then, passes
        self._everywhere: Tensor | None = None
        """its outputs on all of the client's samples"""
        self._epoch: Epoch | None = None
        self._asked: Batch | None = None
        self._outputs: Sequence[Tensor] = ()
        """its outputs on every batch of the epoch"""

    def outputs(self, batch: Batch) -> Tensor:
        """Compute its outputs on a batch, and what `then` makes of them."""
        if batch.epoch is not self._epoch:
            self._epoch = batch.epoch
            self._outputs = torch.split(self._outputs_in(batch.epoch), batch.epoch.size)
        if batch is not self._asked:  # asked for again in one step it is one pass
            self._asked = batch
            self._passes.skip(1, 0)
        return self._outputs[batch.number]

    def _outputs_in(self, epoch: Epoch) -> Tensor:
        if epoch.samples is None:
            return self._compute(epoch.inputs, epoch.size)
        if self._everywhere is None:
            self._everywhere = self._compute(epoch.samples, epoch.size)
        return self._everywhere if epoch.order is None else self._everywhere.index_select(0, epoch.order)

    def _compute(self, inputs: Tensor, size: int) -> Tensor:
        self._passes.spared_forward -= math.ceil(len(inputs) / size)  # these are not skipped
        parts = [self._oracle.outputs(self._w, part) for part in torch.split(inputs, AT_ONCE)]
        outputs = parts[0] if len(parts) == 1 else torch.cat(parts)
        return outputs if self._then is None else self._then(outputs)
