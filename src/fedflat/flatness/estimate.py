"""A mean over random draws, with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import FedflatError


@dataclass(frozen=True)
class Estimate:
    """A mean over random draws; the truth lies in `[low, high]` with the probability `confidence`."""

    value: float
    low: float
    high: float
    draws: int
    confidence: float = 0.95

    @classmethod
    def of(
        cls, draws: Sequence[float], confidence: float = 0.95, scale: float = 1.0, offset: float = 0.0
    ) -> Estimate:
        """Of independent draws with one expectation: Student's interval; then `offset + scale·` all of it."""
        number = len(draws)
        at_least("draws", number, 2)
        mean = math.fsum(draws) / number
        variance = math.fsum((draw - mean) ** 2 for draw in draws) / (number - 1)
        half = student(confidence, number - 1) * math.sqrt(variance / number)
        value = offset + mean
        return cls(value, value - half, value + half, number, confidence)


def student(confidence: float, freedom: int) -> float:
    """The t that Student's |T| stays below with this probability (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    if not 0 < confidence < 1:
        raise FedflatError(f"confidence={confidence}: give a probability between 0 and 1.")
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        if _student_probability(angle, freedom) < confidence:
            low = angle
        else:
            high = angle
    return math.sqrt(freedom) * math.tan(low)


def _student_probability(angle: float, freedom: int) -> float:
    """`P(|T| ≤ √freedom tan(angle))`."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(odd + 1, freedom, 2):  # exponents of the cosine after the first
        total += term
        term *= cosine**2 * (k / (k + 1))
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def at_least(name: str, value: float, least: float) -> None:
    """Refuse a setting that is too small, or no number."""
    if not value >= least:
        raise FedflatError(f"{name}={value}: give at least {least}.")
