"""Learning rates: over the rounds of a run, and over the steps of a client's round.

A schedule is written as text, `cosine:500`, in files and in Python; `warmup:10/cosine:500` warms up and then follows
the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from ..core.parameters import check_parameters, number
from ..errors import FedflatError, nearest


class Schedule(Protocol):
    """A factor on the learning rate, by the number of a round."""

    def factor(self, round: int) -> float:
        """Find the factor of a round, from 0."""


@dataclass(frozen=True)
class Constant:
    """`η_t = η`."""

    def factor(self, round: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Exponential:
    """`η_t = η decay^t`."""

    decay: float = number(above=0, at_most=1)

    def factor(self, round: int) -> float:
        return float(self.decay**round)


@dataclass(frozen=True)
class Stepwise:
    """`η_t = η decay^⌊t/every⌋`."""

    every: int = number(at_least=1, whole=True)
    decay: float = number(default=0.1, above=0, at_most=1)

    def factor(self, round: int) -> float:
        return float(self.decay ** (round // self.every))


@dataclass(frozen=True)
class Cosine:
    """`η_t = η (floor + (1 − floor)(1 + cos(πt/T))/2)` up to round T, then `η floor`."""

    rounds: int = number(at_least=1, whole=True)
    floor: float = number(default=0.0, at_least=0, at_most=1)

    def factor(self, round: int) -> float:
        share = min(round / self.rounds, 1.0)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * share))


@dataclass(frozen=True)
class WarmUp:
    """`η_t = η (t+1)/T` in the first T rounds, then another schedule from its own beginning."""

    rounds: int = number(at_least=1, whole=True)
    then: Schedule = field(default=Constant(), kw_only=True)

    def factor(self, round: int) -> float:
        return (round + 1) / self.rounds if round < self.rounds else self.then.factor(round - self.rounds)


@dataclass(frozen=True)
class Linear:
    """`η_k = η_t (1 − (1 − to) k/K)` in the K steps of a client's round."""

    to: float = number(default=0.1, above=0, at_most=1)

    def rates(self, lr: float, steps: int) -> list[float]:
        """Find every step's rate."""
        return [lr * (1.0 - (1.0 - self.to) * step / steps) for step in range(steps)]


OVER_ROUNDS: dict[str, type] = {
    "constant": Constant,
    "exponential": Exponential,
    "step": Stepwise,
    "cosine": Cosine,
    "warmup": WarmUp,
}
WITHIN_ROUNDS: dict[str, type] = {"constant": Constant, "linear": Linear}


def parse_schedule(text: str) -> Schedule:
    """Read a schedule over rounds, such as `cosine:500:0.01`, `step:100:0.1` or `warmup:10/cosine:500`."""
    first, slash, rest = str(text).partition("/")
    made: Schedule = _parsed(first, OVER_ROUNDS)
    if not slash:
        return made
    if not isinstance(made, WarmUp):
        raise FedflatError(
            f"schedule '{text}': only warmup is followed by another, as in warmup:10/cosine:500."
        )
    return WarmUp(made.rounds, then=parse_schedule(rest))


def parse_within(text: str) -> Linear | None:
    """Read a schedule within a round, such as `linear:0.1`; None is a constant rate."""
    made = _parsed(str(text), WITHIN_ROUNDS)
    return made if isinstance(made, Linear) else None


def _parsed(text: str, known: dict[str, type]) -> Any:
    name, *values = text.strip().split(":")
    if name not in known:
        raise FedflatError(f"There is no schedule '{name}'.{nearest(name, known)}")
    try:
        made = known[name](*(float(value) for value in values))
    except (ValueError, TypeError):
        wanted = [name, *(part.name.upper() for part in fields(known[name]) if not part.kw_only)]
        raise FedflatError(f"schedule '{text}' cannot be read: write {':'.join(wanted)}.") from None
    check_parameters(made, f"schedule '{text}'")
    return made
