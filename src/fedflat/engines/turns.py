"""Which of a round's clients is handed out next: the longest first, and yet few uploads wait to be folded."""

from __future__ import annotations

from collections.abc import Sequence


class Turns:
    """Positions in a round, handed out by length and folded in order; so many at most are out at once."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._longest = sorted(range(len(lengths)), key=lambda position: lengths[position])
        """the longest last"""
        self._out: set[int] = set()
        """handed out, not folded"""
        self.turn = 0
        """the position that is folded next"""

    def hand_out(self, room: int) -> int | None:
        """The next position where `room` may be out at once; None if there is none, or no room."""
        free = room - len(self._out)
        if self.turn in self._out and free < 1:
            return None
        while self._longest and (self._longest[-1] < self.turn or self._longest[-1] in self._out):
            self._longest.pop()
        if not self._longest:
            return None
        # the last free place is for the one whose turn it is, or nothing could go on
        position = self.turn if free <= 1 and self.turn not in self._out else self._longest.pop()
        self._out.add(position)
        return position

    def fold(self) -> None:
        """The turn is over."""
        self._out.remove(self.turn)
        self.turn += 1
