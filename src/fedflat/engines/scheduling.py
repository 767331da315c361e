"""Who does what next: a round's clients, long ones first, and a test set in shares for whoever has no client."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from ..core.metrics import Metrics, Partials, Score

SHARES_PER_WORKER = 2
"""Few, since each copies the model; several, since workers are not free at once."""


class ClientQueue:
    """Positions in a round, handed out by length and folded in order.

    Only those that come next, as many as there is room for, are looked at: all of them find room, so nothing ever
    waits for a place, and when they are all out, those that are still at work are the short ones.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._out: set[int] = set()
        """handed out, not folded"""
        self._losses: Counter[int] = Counter()
        self.next = 0
        """the position that is folded next"""

    @property
    def done(self) -> bool:
        """Whether all are folded."""
        return self.next == len(self._lengths)

    def hand_out(self, room: int) -> int | None:
        """Choose a position where `room` may be out at once; None if all are out that come next."""
        end = min(self.next + max(1, room), len(self._lengths))
        waiting = [position for position in range(self.next, end) if position not in self._out]
        if not waiting:
            return None
        position = max(waiting, key=self._lengths.__getitem__)
        self._out.add(position)
        return position

    def give_back(self, position: int) -> int:
        """Have a position handed out again, whose worker was lost; how often that has happened to it."""
        self._out.remove(position)
        self._losses[position] += 1
        return self._losses[position]

    def fold(self) -> None:
        """Step on to the next position."""
        self._out.remove(self.next)
        self.next += 1


class SharedTest:
    """The future score of a test set whose batches are shared out; merged exactly, whoever had them.

    Args:
        metrics: what is measured.
        batches: of the test set.
        workers: that will take shares.
        work: hands out shares and receives some, for whoever waits for the result.
    """

    def __init__(self, metrics: Metrics, batches: int, workers: int, work: Callable[[], None]) -> None:
        self._metrics, self._work = metrics, work
        size = max(1, math.ceil(batches / (SHARES_PER_WORKER * workers)))
        self._waiting = [range(n, min(n + size, batches)) for n in range(0, batches, size)][::-1]
        self._missing = batches
        self._losses: Counter[range] = Counter()
        self._partials: Partials = {}

    def hand_out(self) -> range | None:
        """Choose the next share; None if all are out."""
        return self._waiting.pop() if self._waiting else None

    def give_back(self, share: range) -> int:
        """Have a share handed out again, whose worker was lost; how often that has happened to it."""
        self._waiting.append(share)
        self._losses[share] += 1
        return self._losses[share]

    def receive(self, share: range, partials: Partials) -> None:
        """Take what a share scored."""
        self._partials = self._metrics.merge(self._partials, partials)
        self._missing -= len(share)

    def done(self) -> bool:
        """Whether all shares have come back."""
        return not self._missing

    def result(self) -> Score:
        """Wait for the score of the whole test set."""
        while not self.done():
            self._work()
        return self._metrics.compute(self._partials)
