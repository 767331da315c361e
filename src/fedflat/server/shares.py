"""How much one client may weigh in a round: no more than a stated share of what all weigh."""

from __future__ import annotations

from collections.abc import Sequence


def largest_weight(weights: Sequence[float], share: float) -> float:
    """What no weight may exceed, so that none is more than `share` of the sum of what is left of them.

    It is the largest `c = share · Σ min(w, c)`: 0 where there are fewer than `1 / share` clients. More clients never
    make it smaller.
    """
    heaviest_first = sorted(weights, reverse=True)
    rest = sum(heaviest_first)
    for cut, heaviest in enumerate(heaviest_first):
        room = 1.0 - cut * share
        # a third of three that weigh alike is a third, whatever rounding says
        if room > 0.0 and heaviest * room <= share * rest * (1.0 + 1e-9):
            return max(heaviest, share * rest / room)
        rest -= heaviest
    return 0.0
