"""Which client each connected node is."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from ...errors import FedflatError
from .limits import Limits
from .logs import say
from .wire import UNREADABLE, Malformed, shown

HELLO = 120.0
"""Seconds that a node has to say which client it is; then it is asked again."""
AGAIN = 5.0
"""Seconds until a node is asked again whose answer was no good; twice as long every time."""
MOST_AGAIN = 600.0
"""No node waits longer for that."""

DIMENSIONS = 8
ENTRIES = 2**26
"""Numbers of one sample, at most: 256 MiB of them."""
CLASSES = 2**20
VOCABULARY = 2**24
SAMPLES = 2**40
"""More than any node has."""


@dataclass(frozen=True)
class Facts:
    """What samples look like."""

    shape: tuple[int, ...]
    classes: int
    vocabulary: int | None


@dataclass(frozen=True)
class Given:
    """What the server knows of samples, from its settings or its test set; nodes must agree on what is None."""

    shape: tuple[int, ...] | None = None
    classes: int | None = None
    vocabulary: int | None = None
    """goes with the shape"""

    def __post_init__(self) -> None:
        shape = self.shape or ()
        if not all(isinstance(n, int) and n > 0 for n in shape) or math.prod(shape) > ENTRIES:
            raise FedflatError(f"shape={shape}: give whole numbers above 0, at most {ENTRIES:,} in a sample.")
        for name, most in (("classes", CLASSES), ("vocabulary", VOCABULARY)):
            count = getattr(self, name)
            if count is not None and (not isinstance(count, int) or not 1 <= count <= most):
                raise FedflatError(f"{name}={count}: give a whole number from 1 to {most:,}.")

    def fault(self, facts: Facts) -> str | None:
        """Why a node does not fit."""
        if self.shape is not None and (facts.shape, facts.vocabulary) != (self.shape, self.vocabulary):
            words = "" if facts.vocabulary == self.vocabulary else f" and {facts.vocabulary} words"
            return f"its samples have shape {facts.shape}{words}, the federation's {self.shape}."
        if self.classes is not None and facts.classes > self.classes:
            return f"it has {facts.classes} classes, the federation {self.classes}."
        return None


@dataclass
class _Failed:
    """A node whose answer was no good."""

    reason: str
    pause: float
    until: float


class Nodes:
    """The nodes of a federation by client number.

    Args:
        grid: Flower's, as a `ServerApp` gets it.
        clients: how many there are.
        patience: limits.
        given: what the server knows of samples; of the rest more than half of the nodes must say the same, so that no
            single one decides.
        samples: whether nodes say at once how many samples they have. Ask only where the method does not withhold it.
    """

    def __init__(
        self,
        grid: Grid,
        clients: int,
        patience: Limits,
        given: Given | None = None,
        samples: bool = False,
    ) -> None:
        self._grid, self._clients, self._patience = grid, clients, patience
        self._given, self._ask_samples = given or Given(), samples
        self._node: dict[int, int] = {}
        """the node of a client"""
        self._facts: dict[int, Facts] = {}
        self._samples: dict[int, int] = {}
        """that a client said it has when it came first"""
        self._failed: dict[int, _Failed] = {}
        self._asked: dict[str, tuple[int, float]] = {}
        """who has been asked and has not answered, and until when that is waited for"""

    def samples(self, client: int) -> int | None:
        """How many samples a client said it has when it came first; None where it was not asked."""
        return self._samples.get(client)

    def wait(self) -> Facts:
        """Wait until enough clients are there, and say what their samples look like."""
        needed = self._patience.min_clients or self._clients
        if needed > self._clients:
            raise FedflatError(f"min_clients={needed}: the federation has {self._clients} clients.")
        end = time.monotonic() + self._patience.connect
        said = -1
        while True:
            connected = self.connected()
            if len(connected) >= needed:
                say(logging.INFO, f"connected: {_listed(connected)}")
                return self._agree(connected)
            if len(connected) != said:
                said = len(connected)
                say(logging.INFO, f"waiting for clients: {said} of {needed} are connected")
            if time.monotonic() >= end:
                raise FedflatError(
                    f"{len(connected)} of {needed} clients connected within {self._patience.connect:g} s "
                    f"({_listed(connected)}). Start the missing SuperNodes, each with its own partition-id from 0 to "
                    f"{self._clients - 1}, or wait longer (connect)."
                )
            time.sleep(self._patience.poll)

    def connected(self) -> dict[int, int]:
        """The nodes that are connected now, by client. New ones are asked who they are, and not waited for."""
        online, now = set(self._grid.get_node_ids()), time.monotonic()
        self._listen(online)
        busy = {node for node, _ in self._asked.values()}
        resting = {node for node, failed in self._failed.items() if failed.until > now}
        new = sorted(online - set(self._node.values()) - resting - busy)
        if new:
            wish = (
                RecordDict({"wish": ConfigRecord({"samples": True})}) if self._ask_samples else RecordDict()
            )
            asked = [Message(wish, dst_node_id=node, message_type="query.hello", ttl=HELLO) for node in new]
            for message, node in zip(self._grid.push_messages(asked), new, strict=False):
                self._asked[message] = node, now + HELLO
        return {client: node for client, node in sorted(self._node.items()) if node in online}

    def _listen(self, online: set[int]) -> None:
        """Hear who has answered by now; who has not in time will be asked again."""
        now = time.monotonic()
        for message, (node, until) in list(self._asked.items()):
            answered = True
            try:
                replies = list(self._grid.pull_messages([message]))
                answered = bool(replies)
                if replies:
                    self._introduce(node, replies[0], online)
            except UNREADABLE as problem:
                self._leave_out(
                    node, str(problem) if isinstance(problem, Malformed) else "its answer cannot be read."
                )
            if answered or until <= now:
                del self._asked[message]

    def _introduce(self, node: int, reply: Message, online: set[int]) -> None:
        if reply.has_error():
            raise Malformed(f"its app failed: {shown(reply.error.reason, 1000)}")
        client, facts, samples = read_hello(reply.content)
        if not 0 <= client < self._clients:
            raise Malformed(f"it says that it is client {client}; there are 0 to {self._clients - 1}.")
        if self._node.get(client, node) != node and self._node[client] in online:
            raise Malformed(f"it says that it is client {client}, which another node is.")
        if (reason := self._given.fault(facts)) is not None:
            raise Malformed(reason)
        # a node that withholds the number will say at the first order what it insists on
        if self._ask_samples and samples is not None and self._samples.setdefault(client, samples) != samples:
            raise Malformed(
                f"client {client} had {self._samples[client]} samples when it came first, and has {samples} now. "
                "Start the run again to resume with what it has."
            )
        self._failed.pop(node, None)
        self._node[client], self._facts[client] = node, facts

    def _leave_out(self, node: int, reason: str) -> None:
        """For a while: what was wrong at a node may be put right."""
        before = self._failed.get(node)
        pause = AGAIN if before is None else min(2 * before.pause, MOST_AGAIN)
        self._failed[node] = _Failed(reason, pause, time.monotonic() + pause)
        if before is None or before.reason != reason:
            say(logging.WARNING, f"node {node} is left out for now: {reason}")

    def _agree(self, connected: Iterable[int]) -> Facts:
        """What samples look like: what the server knows, and what more than half of the nodes say of the rest."""
        told = [self._facts[client] for client in connected]
        shape, vocabulary = self._given.shape, self._given.vocabulary
        if shape is None:
            shape, vocabulary = _agreed("shape", [(f.shape, f.vocabulary) for f in told])
        classes = self._given.classes or _agreed("classes", [f.classes for f in told])
        self._given = Given(shape, classes, vocabulary)
        for client, facts in list(self._facts.items()):
            if (reason := self._given.fault(facts)) is not None:
                del self._facts[client]
                self._leave_out(self._node.pop(client), reason)
        return Facts(shape, classes, vocabulary)


def _agreed(name: str, said: list[Any]) -> Any:
    """What more than half say."""
    (value, count), *others = Counter(said).most_common()
    if 2 * count <= len(said):
        values = ", ".join(str(v[0] if name == "shape" else v) for v, _ in [(value, count), *others][:5])
        raise FedflatError(
            f"The nodes do not agree on the {name} of samples ({values}), and no single one decides. Say it on the "
            f"server: server_app(..., {name}=...)."
        )
    return value


def read_hello(content: RecordDict) -> tuple[int, Facts, int | None]:
    """Who a node says it is; what is absurd is an error before anything is made of it."""
    refusal, hello = content.get("refusal"), content.get("hello")
    if isinstance(refusal, ConfigRecord):
        raise Malformed(f"it refused: {shown(refusal.get('reason'), 1000)}")
    if not isinstance(hello, ConfigRecord):
        raise Malformed("it did not say who it is.")
    limits = {"client": 2**31, "classes": CLASSES, "vocabulary": VOCABULARY}
    if "samples" in hello:
        limits["samples"] = SAMPLES
    numbers: dict[str, int] = {}
    for name, most in limits.items():
        number = hello.get(name)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= most:
            raise Malformed(
                f"its {name} is {shown(number)}: a whole number, at most {most:,}, must be there."
            )
        numbers[name] = number
    if numbers.get("samples") == 0 or numbers["classes"] == 0:
        raise Malformed("it has no samples." if numbers["classes"] else "it has no classes.")
    shape = () if hello.get("scalar") is True else hello.get("shape")
    if not isinstance(shape, list | tuple) or len(shape) > DIMENSIONS:
        raise Malformed(f"its samples have the shape {shown(shape)}.")
    sizes = tuple(n for n in shape if isinstance(n, int) and not isinstance(n, bool) and 0 < n <= ENTRIES)
    if len(sizes) < len(shape) or math.prod(sizes) > ENTRIES:
        raise Malformed(
            f"its samples have the shape {shown(shape)}; no sample has more than {ENTRIES:,} numbers."
        )
    facts = Facts(sizes, numbers["classes"], numbers["vocabulary"] or None)
    return numbers["client"], facts, numbers.get("samples")


def _listed(clients: dict[int, int]) -> str:
    return f"clients {', '.join(map(str, clients))}" if clients else "none"
