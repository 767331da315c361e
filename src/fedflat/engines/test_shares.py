"""A test set in shares, which workers take when they have nothing to train."""

from __future__ import annotations

import math

from ..core.evaluation import BatchScore, Score, total_score
from ..errors import FedflatError

FINER = 2
"""So many shares for every worker: few, since each copies the model; several, since workers are not free at once."""


class Shares:
    """The batches of a test set, and what they scored; summed in their order, whoever had them."""

    def __init__(self, batches: int, workers: int, buffers: bool) -> None:
        self.buffers = buffers
        """whether the tested model has such"""
        size = math.ceil(batches / (FINER * workers))
        self._waiting = [range(n, min(n + size, batches)) for n in range(0, batches, size)][::-1]
        self._scores: list[BatchScore | None] = [None] * batches
        self._missing = batches

    def hand_out(self) -> range | None:
        """The next share; None if all are out."""
        return self._waiting.pop() if self._waiting else None

    def receive(self, share: range, scores: list[BatchScore]) -> None:
        """What a share scored."""
        for number, score in zip(share, scores, strict=True):
            self._scores[number] = score
        self._missing -= len(share)

    @property
    def done(self) -> bool:
        """Whether all have come back."""
        return not self._missing

    def total(self) -> Score:
        """The score of the whole test set."""
        if not self.done:
            raise FedflatError("The test set has been scored in part only.")
        return total_score([score for score in self._scores if score is not None])
