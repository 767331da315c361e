"""How long an uploaded vector may be: a number, or a multiple of what was usual in the rounds before."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import FedflatError, nearest

FACTOR = 5.0
"""Of plain `median`: lengths of honest updates differ with clients' samples and steps, though not by much more."""
REMEMBERED = 20
"""Rounds whose medians are remembered."""

Bound = float | str
"""A length, `median`, or `median:5`: that many times the median length of what was accepted before."""


class NormBounds:
    """The bounds of a method's vectors by name, and what those that adapt remember."""

    def __init__(
        self, given: Bound | Mapping[str, Bound] | None, names: Collection[str], method: str
    ) -> None:
        self._for_all = not isinstance(given, Mapping)
        by_name = (
            given if isinstance(given, Mapping) else {} if given is None else dict.fromkeys(names, given)
        )
        self.fixed: dict[str, float] = {}
        self.factors: dict[str, float] = {}
        """of the median, by name"""
        for name, bound in by_name.items():
            if name not in names:
                raise FedflatError(f"norm_bound: {method} uploads no '{name}'.{nearest(name, names)}")
            if isinstance(bound, str):
                self.factors[name] = _factor(name, bound)
            else:
                self.fixed[name] = _length(name, bound)
        self.medians: dict[str, list[float]] = {name: [] for name in self.factors}
        """of the accepted lengths of every past round, the latest last"""
        self._seen: dict[str, list[float]] = {}
        self.open()

    def open(self) -> None:
        """Begin a round."""
        self._seen = {name: [] for name in self.factors}
        known = {name: statistics.median(past) for name, past in self.medians.items() if past}
        self.now = {
            **self.fixed,
            **{name: self.factors[name] * length for name, length in known.items()},
        }
        """the lengths that hold in this round"""

    @property
    def unknown(self) -> bool:
        """Whether there is no past yet to go by."""
        return any(not past for past in self.medians.values())

    def learn(self, lengths: Mapping[str, list[float]]) -> None:
        """Go by this round itself, in the first one: by what all have uploaded."""
        for name, factor in self.factors.items():
            if not self.medians[name] and any(lengths[name]):
                self.now[name] = factor * statistics.median(lengths[name])

    def accept(self, name: str, length: float) -> None:
        """Remember how long a vector is that was accepted."""
        if name in self._seen:
            self._seen[name].append(length)

    def close(self) -> None:
        """End a round that counts. Rounds in which nothing moved say nothing of what is usual."""
        for name, lengths in self._seen.items():
            if lengths and (median := statistics.median(lengths)):
                self.medians[name] = [*self.medians[name], median][-REMEMBERED:]

    def to_dict(self) -> dict[str, Any]:
        """As they were given, name by name; a bound of all vectors goes without saying for buffers."""
        named = {**self.fixed, **{name: f"median:{factor:g}" for name, factor in self.factors.items()}}
        return {name: bound for name, bound in named.items() if not (self._for_all and name == "buffers")}


def _length(name: str, length: object) -> float:
    if isinstance(length, bool) or not isinstance(length, int | float) or not 0 < length < math.inf:
        raise FedflatError(
            f"norm_bound: the bound of '{name}' must be a number above 0, or median:5, not {length!r}."
        )
    return float(length)


def _factor(name: str, text: str) -> float:
    match = re.fullmatch(r"median(?::(\d{1,9}(?:\.\d{1,9})?))?", text)
    factor = FACTOR if match is None or match[1] is None else float(match[1])
    if match is None or factor < 1:
        raise FedflatError(
            f"norm_bound: the bound of '{name}' must be a number above 0, or median:5 for five times the median "
            f"length of earlier rounds, at least median:1, not {text!r}."
        )
    return factor
