"""The batches of a client's round: epoch after epoch, freshly shuffled, augmented where the data asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.randomness import generator
from ..data.federation import Shard


@dataclass(frozen=True, eq=False)
class Epoch:
    """One pass over a client's samples, in the order of its batches."""

    inputs: Tensor
    size: int
    """of a batch"""
    samples: Tensor | None
    """of which the inputs are the rows `order`, in every epoch of the round; None where they are augmented"""
    order: Tensor | None


class Batch(NamedTuple):
    """One batch, and where it comes from."""

    inputs: Tensor
    targets: Tensor
    number: int
    """from 0 in every epoch"""
    epoch: Epoch


def batches(
    shard: Shard, size: int | None, steps: int, seed: int, round: int, client: int
) -> Iterator[Batch]:
    """Draw `steps` batches, from the seed, the round and the client; an epoch is gathered and augmented at once."""
    shuffling = generator(seed, "batches", round, client)
    augmenting = generator(seed, "augmentation", round, client) if shard.pipeline.random else None
    samples, size, left, device = len(shard), size or len(shard), steps, shard.targets.device
    if left * size < samples:  # not even one epoch: do not touch samples that are not needed
        shard = shard.at(torch.from_numpy(shuffling.permutation(samples)[: left * size]).to(device))
    stored, labels = shard.stored()
    if augmenting is None:
        stored = shard.pipeline.test(stored)
    shuffled = size < samples and len(shard) == samples
    while left > 0:
        inputs, targets, order = stored, labels, None
        if shuffled:
            order = torch.from_numpy(shuffling.permutation(samples)[: left * size]).to(device)
            inputs, targets = _rows(stored, order), labels.index_select(0, order)
        if augmenting is not None:
            inputs = shard.pipeline.train(inputs, augmenting, size)
        epoch = Epoch(inputs, size, None if augmenting is not None else stored, order)
        parts = zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
        for number, (part, labelled) in enumerate(parts):
            left -= 1
            yield Batch(part, labelled, number, epoch)


def _rows(stored: Tensor, order: Tensor) -> Tensor:
    """Gather samples in an order; images keep their channels last in memory, where they are."""
    if stored.dim() == 4 and stored.is_contiguous(memory_format=torch.channels_last):
        return stored.permute(0, 2, 3, 1).index_select(0, order).permute(0, 3, 1, 2)
    return stored.index_select(0, order)
