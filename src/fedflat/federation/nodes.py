"""Which client each connected node is."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from ..errors import FedflatError
from .logs import say
from .patience import Patience
from .wire import Malformed, shown

HELLO = 120.0
"""Seconds that a node has to say which client it is; then it is asked again."""


@dataclass(frozen=True)
class Facts:
    """What samples look like."""

    shape: tuple[int, ...]
    classes: int
    vocabulary: int | None


class Nodes:
    """The nodes of a federation by client number."""

    def __init__(self, grid: Grid, clients: int, patience: Patience) -> None:
        self._grid, self._clients, self._patience = grid, clients, patience
        self._node: dict[int, int] = {}
        """the node of a client"""
        self._facts: dict[int, Facts] = {}
        self._refused: set[int] = set()
        self._asked: dict[str, tuple[int, float]] = {}
        """who has been asked and has not answered, and until when that is waited for"""

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
                return self._common_facts()
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
        online = set(self._grid.get_node_ids())
        self._listen(online)
        busy = {node for node, _ in self._asked.values()}
        new = sorted(online - set(self._node.values()) - self._refused - busy)
        if new:
            asked = [
                Message(RecordDict(), dst_node_id=node, message_type="query.hello", ttl=HELLO) for node in new
            ]
            until = time.monotonic() + HELLO
            for message, node in zip(self._grid.push_messages(asked), new, strict=False):
                self._asked[message] = node, until
        return {client: node for client, node in sorted(self._node.items()) if node in online}

    def _listen(self, online: set[int]) -> None:
        """Hear who has answered by now; who has not in time will be asked again."""
        if self._asked:
            for reply in self._grid.pull_messages(list(self._asked)):
                found = self._asked.pop(reply.metadata.reply_to_message_id, None)
                if found is not None:
                    self._introduce(found[0], reply, online)
        now = time.monotonic()
        self._asked = {message: asked for message, asked in self._asked.items() if asked[1] > now}

    def _introduce(self, node: int, reply: Message, online: set[int]) -> None:
        try:
            client, facts = _read_hello(reply)
            if not 0 <= client < self._clients:
                raise Malformed(f"it says that it is client {client}; there are 0 to {self._clients - 1}.")
            if self._node.get(client, node) != node and self._node[client] in online:
                raise Malformed(f"it says that it is client {client}, which another node is.")
            common = self._common_facts() if self._facts else facts
            if (facts.shape, facts.vocabulary) != (common.shape, common.vocabulary):
                raise Malformed(f"its samples have shape {facts.shape}, the others' {common.shape}.")
        except Malformed as problem:
            self._refused.add(node)
            say(logging.WARNING, f"node {node} is left out: {problem}")
            return
        self._node[client], self._facts[client] = node, facts

    def _common_facts(self) -> Facts:
        first = next(iter(self._facts.values()))
        classes = max(facts.classes for facts in self._facts.values())
        return Facts(first.shape, classes, first.vocabulary)


def _read_hello(reply: Message) -> tuple[int, Facts]:
    if reply.has_error():
        raise Malformed(f"its app failed: {shown(reply.error.reason, 1000)}")
    refusal, hello = reply.content.get("refusal"), reply.content.get("hello")
    if isinstance(refusal, ConfigRecord):
        raise Malformed(f"it refused: {shown(refusal.get('reason'), 1000)}")
    if not isinstance(hello, ConfigRecord):
        raise Malformed("it did not say who it is.")
    shape, numbers = hello.get("shape"), [hello.get(name) for name in ("client", "classes", "vocabulary")]
    whole = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**31 for n in numbers)
    fits = isinstance(shape, list) and len(shape) <= 8 and all(isinstance(n, int) and n >= 0 for n in shape)
    if not whole or not fits:
        raise Malformed("it did not say properly who it is.")
    client, classes, vocabulary = (int(str(number)) for number in numbers)
    assert isinstance(shape, list)
    sizes = () if hello.get("scalar") else tuple(int(str(n)) for n in shape)
    return client, Facts(sizes, classes, vocabulary or None)


def _listed(clients: dict[int, int]) -> str:
    return f"clients {', '.join(map(str, clients))}" if clients else "none"
