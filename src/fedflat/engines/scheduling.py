"""Which of a round's clients is handed out next: a long one, and yet few uploads wait to be folded."""

from __future__ import annotations

from collections.abc import Sequence


class Turns:
    """Positions in a round, handed out by length and folded in order.

    Only those that come next, as many as there is room for, are looked at: all of them find room, so nothing ever
    waits for a place, and when they are all out, those that are still at work are the short ones.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._out: set[int] = set()
        """handed out, not folded"""
        self.turn = 0
        """the position that is folded next"""

    def hand_out(self, room: int) -> int | None:
        """The next position where `room` may be out at once; None if all are out that come next."""
        end = min(self.turn + max(1, room), len(self._lengths))
        waiting = [position for position in range(self.turn, end) if position not in self._out]
        if not waiting:
            return None
        position = max(waiting, key=self._lengths.__getitem__)
        self._out.add(position)
        return position

    def fold(self) -> None:
        """The turn is over."""
        self._out.remove(self.turn)
        self.turn += 1
