"""The batches of a client's round: epoch after epoch, freshly shuffled, augmented where the data wants it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.randomness import generator
from ..data.federation import Shard
from ..gradients.cross_entropy import CrossEntropy
from .teachers import FrozenModels


def batches(
    shard: Shard,
    size: int | None,
    steps: int,
    seed: int,
    place: tuple[int, int],
    frozen: FrozenModels,
    entropy: CrossEntropy | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """So many batches of inputs and targets. Every epoch is gathered (and augmented) once, then sliced.

    Random numbers are those of the seed and the place, a round and a client. `frozen` learns which samples come,
    `entropy` which targets.
    """
    shuffling = generator(seed, "batches", *place)
    augmenting = generator(seed, "augmentation", *place) if shard.pipeline.random else None
    samples, size, left, device = len(shard), size or len(shard), steps, shard.targets.device
    if left * size < samples:  # not even one epoch: do not touch samples that are not needed
        shard = shard.at(torch.from_numpy(shuffling.permutation(samples)[: left * size]).to(device))
    stored, labels = shard.stored()
    if augmenting is None:
        stored = shard.pipeline.test(stored)
        frozen.same_samples(stored)
    shuffled = size < samples and len(shard) == samples
    while left > 0:
        inputs, targets, order = stored, labels, None
        if shuffled:
            order = torch.from_numpy(shuffling.permutation(samples)[: left * size]).to(device)
            inputs, targets = _rows(stored, order), labels.index_select(0, order)
        if augmenting is not None:
            inputs = shard.pipeline.train(inputs, augmenting, size)
        frozen.next_epoch(inputs, order, size)
        if entropy is not None:
            entropy.next_epoch(targets, size)
        for number, batch in enumerate(
            zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
        ):
            left -= 1
            frozen.next_batch(number)
            if entropy is not None:
                entropy.next_batch(number)
            yield batch


def _rows(stored: Tensor, order: Tensor) -> Tensor:
    """Some samples, in that order; images keep their channels last in memory, where they are."""
    if stored.dim() == 4 and stored.is_contiguous(memory_format=torch.channels_last):
        return stored.permute(0, 2, 3, 1).index_select(0, order).permute(0, 3, 1, 2)
    return stored.index_select(0, order)
