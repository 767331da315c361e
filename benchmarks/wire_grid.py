"""Flower's grid in one process, where messages are bytes on their way."""

from __future__ import annotations

from typing import Any

from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedflat.engines.flower.localgrid import LocalGrid


class Bytes(LocalGrid):
    """Counts the bytes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.down = self.up = self.messages = 0
        self._packed: dict[str, tuple[str, dict[str, bytes]]] = {}

    def push_messages(self, messages: Any) -> list[str]:
        """What messages have in common is turned into bytes once, as Flower does."""
        messages = list(messages)
        with no_object_id_recompute():
            whole: dict[str, Any] = {}
            roots = []
            for message in messages:
                whole |= get_all_nested_objects(message)
                roots.append((message.object_id, list(get_all_nested_objects(message))))
            contents = {name: thing.deflate() for name, thing in whole.items()}
        self.down += sum(map(len, contents.values()))
        self.messages += len(messages)
        ids = super().push_messages(messages)
        for name, (root, parts) in zip(ids, roots, strict=True):
            self._packed[name] = root, {part: contents[part] for part in parts}
        return ids

    def _answer(self, message: Message) -> Message | None:
        root, contents = self._packed.pop(message.metadata.message_id)
        arrived: Any = inflate_object_from_contents(root, contents)
        arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
        reply: Any = super()._answer(arrived)
        with no_object_id_recompute():
            parts = {name: thing.deflate() for name, thing in get_all_nested_objects(reply).items()}
            root = reply.object_id
        self.up += sum(map(len, parts.values()))
        returned: Any = inflate_object_from_contents(root, parts)
        return returned
