"""How long the server waits, for how many, with which consequence for those that do not answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...core.parameters import check_parameters, choice, number


@dataclass(frozen=True)
class Limits:
    """Nothing waits without bound: every limit is here, in seconds, and has a default."""

    deadline: float = number(default=600.0, above=0)
    """for a round: whoever has not answered by then is left out, and the row says so"""
    connect: float = number(default=300.0, above=0)
    """for nodes to connect before the first round; too few by then ends the run"""
    min_clients: int | None = number(default=None, at_least=1, optional=True, whole=True)
    """that must be connected before the first round; by default all"""
    min_replies: float = number(default=0.5, at_least=0, at_most=1)
    """share of a round's clients that must answer, at least one"""
    too_few: str = choice("stop", "skip", default="stop")
    """when fewer answer: stop the run, which can be resumed, or skip the round, which then changes nothing"""
    retries: int = number(default=1, at_least=0, whole=True)
    """how often a client whose node failed or vanished is asked again within the deadline"""
    lost_state: str = choice("refuse", "restart", default="refuse")
    """a client that has lost what it kept: leave it out, or let it start anew"""
    poll: float = number(default=0.5, above=0)
    """between two looks for replies"""

    def __post_init__(self) -> None:
        check_parameters(self, "Limits")

    def minimum(self, clients: int) -> int:
        """How many of a round's clients must answer."""
        return max(1, math.ceil(self.min_replies * clients))
