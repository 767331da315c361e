"""How a round's updates become one: their weighted mean, which streams, or a middle that a few clients cannot move.

A middle is taken in every coordinate by itself and needs all uploads of a round at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import FedflatError
from ..methods.mechanism import overrides
from ..methods.method import Method

HELD = 1000
"""At most this many uploads are held; a round with more is refused."""
PIECE = 2**22
"""Numbers that are sorted at once: what that takes beside the uploads is small."""


class Middle:
    """`median`, or `trimmed:0.1`: the mean without the smallest and the largest tenth."""

    def __init__(self, text: str) -> None:
        match = re.fullmatch(r"median|trimmed:(0?\.\d+)", str(text))
        self.cut = 0.0 if match is None or match[1] is None else float(match[1])
        self.median = text == "median"
        if match is None or not (self.median or 0 < self.cut < 0.5):
            raise FedflatError(
                f"aggregate '{text}' is not possible: give mean, median, or trimmed:0.1, a share below 0.5."
            )

    @classmethod
    def of(cls, text: str, method: Method) -> Middle | None:
        """From how it is written; None is the mean. Methods whose servers make sums of their own are refused."""
        if text == "mean":
            return None
        middle = cls(text)
        summing = [mechanism.name for mechanism in method.mechanisms if overrides(mechanism, "receive")]
        if summing:
            raise FedflatError(
                f"aggregate '{text}': {method.name} sums uploads in {summing[0]} too, where one client would count "
                "as ever. Use norm_bound and max_share with it, or a method without."
            )
        return middle

    def __call__(self, vectors: Sequence[Tensor]) -> Tensor:
        """The middle of every coordinate."""
        count = len(vectors)
        low = (count - 1) // 2 if self.median else int(self.cut * count)
        result = torch.empty_like(vectors[0])
        step = max(1, PIECE // count)
        for first in range(0, len(result), step):
            ordered = torch.stack([vector[first : first + step] for vector in vectors]).sort(dim=0).values
            result[first : first + step] = ordered[low : count - low].mean(dim=0)
        return result
