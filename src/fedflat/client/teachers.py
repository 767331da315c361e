"""Models that do not change during a client's round (teachers), whose passes can be spared.

A teacher's outputs on a sample depend only on the sample. Without augmentation all of a client's samples are known
before the first step: the outputs are computed once per round, in large batches. With augmentation they are
computed once per local epoch, after the epoch's samples have been drawn.

A teacher is evaluated in a module of its own, whose buffers (BatchNorm statistics) are those with which the client's
round began, whichever average its weights are: they do not move with the student's passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.flat import FlatModel
from ..gradients.dense import Chain

Transform = Callable[[Tensor], Tensor]
"""Of the outputs of many samples, sample by sample."""

BATCH = 512
"""Samples per forward pass of a frozen model."""


class Passes:
    """Counts passes over a batch."""

    def __init__(self) -> None:
        self.forward = self.backward = self.spared_forward = self.spared_backward = 0

    def make(self, forward: int, backward: int) -> None:
        """Passes that are computed now."""
        self.forward += forward
        self.backward += backward

    def spare(self, forward: int, backward: int) -> None:
        """Passes that are not."""
        self.make(forward, backward)
        self.spared_forward += forward
        self.spared_backward += backward


class _Frozen:
    """One frozen model and what is known of its outputs."""

    def __init__(self, vector: Tensor, pieces: list[Tensor], then: Transform | None) -> None:
        self.vector, self.pieces, self.then = vector, pieces, then
        self.everywhere: Tensor | None = None
        self.epoch = self.batch = -1
        self.batches: Sequence[Tensor] = ()
        """the outputs of an epoch"""


class FrozenModels:
    """The outputs of frozen models on the samples of one client's round."""

    def __init__(
        self, model: FlatModel, passes: Passes, teacher: Callable[[], FlatModel], buffers: Tensor | None
    ) -> None:
        self._model, self._passes = model, passes
        self._make_teacher, self._buffers = teacher, buffers
        self._teacher: FlatModel | None = None
        self.chain: Chain | None = None
        """what computes the model's outputs in fewer calls, if there is such"""
        self._frozen: dict[tuple[int, Transform | None], _Frozen] = {}
        self._latest: _Frozen | None = None
        self._samples: Tensor | None = None
        self._inputs = torch.empty(0)
        self._order: Tensor | None = None
        self._epoch = self._batch = self._size = 0

    def same_samples(self, samples: Tensor) -> None:
        """All epochs of the round are orders of these samples."""
        self._samples = samples

    def next_epoch(self, inputs: Tensor, order: Tensor | None, size: int) -> None:
        """An epoch's samples, in the order of its batches."""
        self._inputs, self._order, self._size = inputs, order, size
        self._epoch += 1

    def next_batch(self, number: int) -> None:
        """The position of the batch in the epoch."""
        self._batch = number

    def outputs_at(self, vector: Tensor, then: Transform | None = None) -> Tensor:
        """The outputs of the model with these weights on the present batch, or what `then` makes of them."""
        frozen = self._latest  # mostly the same again, and asking is quicker than a hash of the key
        if frozen is None or frozen.vector is not vector or frozen.then != then:
            key = (vector.data_ptr(), then)
            if key not in self._frozen:
                self._frozen[key] = _Frozen(vector, self._model.split(vector), then)
            frozen = self._latest = self._frozen[key]
        if frozen.epoch != self._epoch:
            frozen.batches = torch.split(self._epoch_outputs(frozen), self._size)
            frozen.epoch, frozen.batch = self._epoch, -1
        if frozen.batch != self._batch:  # asked for again in the same step it is the same pass
            self._passes.spare(1, 0)
            frozen.batch = self._batch
        return frozen.batches[self._batch]

    def _epoch_outputs(self, frozen: _Frozen) -> Tensor:
        if self._samples is None:
            return self._compute(frozen, self._inputs)
        if frozen.everywhere is None:
            frozen.everywhere = self._compute(frozen, self._samples)
        return frozen.everywhere if self._order is None else frozen.everywhere.index_select(0, self._order)

    def _compute(self, frozen: _Frozen, inputs: Tensor) -> Tensor:
        """In evaluation mode, without a graph; these passes are the ones not spared."""
        self._passes.spared_forward -= math.ceil(len(inputs) / self._size)
        with torch.no_grad():
            parts = [
                self._forward(frozen, inputs[first : first + BATCH]) for first in range(0, len(inputs), BATCH)
            ]
        outputs = parts[0] if len(parts) == 1 else torch.cat(parts)
        return outputs if frozen.then is None else frozen.then(outputs)

    def _forward(self, frozen: _Frozen, inputs: Tensor) -> Tensor:
        if self.chain is not None and self.chain.takes(inputs):
            return self.chain.outputs_at(frozen.pieces, inputs)
        if self._teacher is None:
            self._teacher = self._make_teacher()
            self._teacher.write_buffers(self._buffers)
        self._teacher.stand_on(frozen.vector, frozen.pieces)
        return self._teacher.outputs(inputs)
