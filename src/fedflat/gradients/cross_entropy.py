"""The cross-entropy of many batches, of which an epoch is prepared at once.

With `G = −onehot(y)/n` the mean loss of a batch of n samples is `Σ G ∘ log softmax(z)`, and one operation makes its
gradient for z of G and log softmax(z). What depends on the targets alone is known before the first step, and losses
need not be summed before somebody asks. Beside a small network's products every operation counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

CLASSES = 256
"""Up to so many G is small beside the samples."""
AT_ONCE = 64
"""So many batches are summed up together."""

log_softmax_backward = torch.ops.aten._log_softmax_backward_data.default


class CrossEntropy:
    """`F.cross_entropy`, with its defaults, of the batches of a client's round."""

    def __init__(self, classes: int, like: Tensor) -> None:
        self._unit = -torch.eye(classes, dtype=like.dtype, device=like.device)
        self._batches: Sequence[Tensor] = ()
        """G of the epoch's batches; none where it is not as simple as that"""
        self._batch = 0
        self._terms: list[tuple[Tensor, Tensor]] = []
        self._sum = 0.0

    def next_epoch(self, targets: Tensor, size: int) -> None:
        """An epoch's targets, in the order of its batches."""
        self._batches = ()
        if targets.dim() != 1 or targets.dtype != torch.int64:
            return
        low, high = torch.stack(torch.aminmax(targets)).tolist()
        if low < 0 or high >= len(self._unit):  # samples to be left out, or a mistake
            return
        size = min(size, len(targets))
        batches = list(torch.split((self._unit / size).index_select(0, targets), size))
        batches[-1].mul_(size / len(batches[-1]))
        self._batches = batches

    def next_batch(self, number: int) -> None:
        """The position of the batch in the epoch."""
        self._batch = number

    def takes(self, outputs: Tensor) -> bool:
        """Whether the batch's outputs are such."""
        return bool(self._batches) and outputs.shape == self._batches[self._batch].shape

    def differentiate(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """`log softmax(z)`, which the loss is made of, and the loss's gradient for z."""
        logs = torch.log_softmax(outputs, 1)
        return logs, log_softmax_backward(self._batches[self._batch], logs, 1, outputs.dtype)

    def count(self, logs: Tensor) -> None:
        """Let the loss of the present batch be part of the sum."""
        self._terms.append((self._batches[self._batch], logs))
        if len(self._terms) == AT_ONCE:
            self._add_up()

    def take_sum(self) -> float:
        """The sum of the losses that count; it begins anew."""
        self._add_up()
        total, self._sum = self._sum, 0.0
        return total

    def _add_up(self) -> None:
        if self._terms:
            weights, logs = (torch.cat(part) for part in zip(*self._terms, strict=True))
            terms = weights * logs
            total = torch.sum(terms).item()
            if math.isnan(total):  # of a class that is not the sample's, and out of the question
                total = torch.sum(terms.where(weights != 0, 0.0)).item()
            self._sum += total
            self._terms.clear()
