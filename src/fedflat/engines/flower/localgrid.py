"""Flower's grid in one process: messages go straight to a client app. To try an app, and to test with.

The only file that touches a private name of Flower's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

APP_FAILED = 2
"""Flower's code for an exception in a client app."""


class LocalGrid(Grid):
    """Nodes 1, 2, ... that are clients 0, 1, ...; each runs the app when its answer is asked for."""

    def __init__(self, app: ClientApp, configs: Iterable[dict[str, Any]]) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
        self.app = app
        self.contexts = {
            number: Context(1, number, dict(config), RecordDict(), {})
            for number, config in enumerate(configs, start=1)
        }
        self.offline: set[int] = set()
        """nodes that are not connected"""
        self.tamper: Callable[[Message, Message], Message | None] | None = None
        """what becomes of a message's reply on its way; None is a reply that never comes"""
        self._messages: dict[str, Message] = {}
        self._count = 0

    def set_run(self, run: Any) -> None:
        """There is only one."""

    @property
    def run(self) -> Any:
        """There is only one."""
        return None

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Flower's old way."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Who is connected."""
        return [node for node in self.contexts if node not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take messages."""
        ids = []
        for message in messages:
            self._count += 1
            name = f"message-{self._count}"
            message.metadata.__dict__["_message_id"] = name
            self._messages[name] = message
            ids.append(name)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Run the app for messages that have not been answered yet."""
        replies = []
        for name in list(message_ids):
            message = self._messages.get(name)
            if message is None:
                continue
            reply = self._answer(message)
            if reply is not None:
                reply.metadata.__dict__["_reply_to_message_id"] = name
                del self._messages[name]
                replies.append(reply)
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Both."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        if node in self.offline:
            return None
        try:
            reply: Message | None = self.app(message, self.contexts[node])
        except Exception as problem:
            reply = Message(Error(APP_FAILED, f"{type(problem).__name__}: {problem}"), reply_to=message)
        assert reply is not None
        return reply if self.tamper is None else self.tamper(message, reply)
