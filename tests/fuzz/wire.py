"""What nodes send, as Flower's bytes: a reply after a round, from there to a round's row, or a node's first word."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

WORDS = (
    "",
    "client",
    "round",
    "samples",
    "steps",
    "loss",
    "accuracy",
    "forward",
    "update",
    "control",
    "buffers",
    "x",
)
PARTS = ("vectors", "numbers", "report", "receipt", "hello", "refusal", "x")
NUMBERS = (
    *(0, 1, -1, 2, 3, 2**31, 2**53, 2**53 + 1, 2**62, -(2**62), 0.0, -0.0, 0.5, 1e308, -1e308, 5e-324),
    *(math.nan, math.inf, -math.inf, 3.5e38, 1e9, 1e19),
)


@cache
def world() -> Any:
    """A small model with statistics, a method with an upload of its own, and what an honest client sends."""
    import torch
    from torch import nn

    import fedflat as ff
    from fedflat.core.flat import FlatModel
    from fedflat.core.messages import Upload

    torch.manual_seed(0)
    flat = FlatModel(nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)))
    held = flat.read_buffers()
    assert held is not None

    def upload(client: int) -> Upload:
        update = torch.full((flat.size,), 0.1 * (client + 1))
        control = {"control": update * 2}
        return Upload(
            client, 3, 20, 5, update, control, held + 1, 0.7, 5, 5, report={"loss": 0.5, "samples": 9.0}
        )

    return flat, ff.scaffold(), held, upload


def seeds() -> Iterator[bytes]:
    """Replies with all there may be and with little, and a first word."""
    from flwr.app import ConfigRecord, RecordDict

    from fedflat.engines.flower.wire import from_upload

    _, _, _, upload = world()
    yield written(from_upload(upload(1), (3, 12345)))
    tested = {"loss": 0.5, "samples": 9.0, "accuracy": 0.75}
    yield written(from_upload(replace(upload(1), report=tested), None))
    yield written(from_upload(replace(upload(1), report={}, loss=math.nan, forward=0, backward=0), None))
    hello = {"client": 1, "shape": [2], "scalar": False, "classes": 3, "vocabulary": 0, "samples": 20}
    yield written(RecordDict({"hello": ConfigRecord(hello)}))


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Other values, names and records."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord

    from fedflat.engines.flower.wire import UNREADABLE

    try:
        content = read(data)
    except UNREADABLE:
        return data
    part = dice.choice([*content, dice.choice(PARTS)])
    record = content.get(part)
    if dice.random() < 0.1:
        content.pop(part, None)
    elif record is None or dice.random() < 0.1:
        content[part] = dice.choice((ArrayRecord, ConfigRecord, MetricRecord))()
    else:
        name = dice.choice([*record, dice.choice(WORDS)])
        if dice.random() < 0.15:
            record.pop(name, None)
        elif isinstance(record, ArrayRecord):
            old = record.get(name) or dice.choice([*record.values(), Array("float32", (0,), "", b"")])
            record[name] = Array(
                dice.choice((old.dtype, "float64", "object")),
                dice.choice((old.shape, (), (1,), (3, 1), (2**31 - 1,), (5,))),
                dice.choice((old.stype, "pickle")),
                dice.choice((old.data, bytes(4), _floats(len(old.data) // 4, dice))),
            )
        else:
            number = dice.choice(NUMBERS)
            record[name] = dice.choice((number, number, [number] * dice.randrange(4)))
            if isinstance(record, ConfigRecord) and dice.random() < 0.3:
                record[name] = dice.choice(("", "x" * 300, True, [True], ["y"], b"\x00", "\u202e\n"))
    try:
        return written(content)
    except ValueError:  # a number that has no place in Flower's bytes
        return data


def check(data: bytes) -> None:
    """What is accepted leaves finite numbers behind, and no client has more than its share."""
    import torch

    from fedflat.engines.flower.nodes import ENTRIES, read_hello
    from fedflat.engines.flower.wire import UNREADABLE, Malformed, to_upload
    from fedflat.server.buffer_rules import BufferRules
    from fedflat.server.server import Server
    from fedflat.training.record import RoundRecord

    try:
        content = read(data)
    except UNREADABLE:
        raise Malformed("its reply cannot be read.") from None
    if "hello" in content:
        client, facts, samples = read_hello(content)
        assert client >= 0
        assert math.prod(facts.shape) <= ENTRIES
        assert samples is None or samples > 0
        return
    flat, method, held, honest = world()
    sizes = {"update": flat.size, "control": flat.size}
    upload, _ = to_upload(content, 1, 3, sizes, held.numel(), torch.float32)
    server = Server(flat.vector.clone(), method, 3, buffers=held)
    server.rules = BufferRules.of(flat)
    server.limit(max_share=0.5)
    server.open(3, 0.1)
    row = RoundRecord(3, [], server)
    for one in (honest(0), upload, honest(2)):
        row.count_up(one)
        server.receive(one)
    server.close()
    assert server.undone is None and torch.isfinite(server.w).all()
    assert torch.isfinite(server.vector("control")).all()
    assert server.buffers is not None and torch.isfinite(server.buffers).all()
    assert (server.buffers[server.rules.not_negative] >= 0).all()  # type: ignore[union-attr]
    assert server.weight(upload) <= 40
    losses = [(one.loss, server.weight(one)) for one in (honest(0), upload) if one.loss == one.loss]
    row.sum_up(losses, {1: dict(upload.report)} if upload.report else {})
    row.dropped += upload.notes
    json.dumps(row.row(), allow_nan=False)


def written(content: Any) -> bytes:
    """Records as Flower's bytes."""
    from flwr.common.serde import recorddict_to_proto

    return bytes(recorddict_to_proto(content).SerializeToString())


def read(data: bytes) -> Any:
    """And back."""
    logging.getLogger("flwr").setLevel(logging.ERROR)  # of names that come twice it warns
    from flwr.common.serde import recorddict_from_proto
    from flwr.proto.recorddict_pb2 import RecordDict

    return recorddict_from_proto(RecordDict.FromString(data))


def _floats(count: int, dice: random.Random) -> bytes:
    import numpy as np

    values = [dice.choice((0.0, 1.0, -1.0, 4e9, -4e9, 3e38, math.nan, math.inf)) for _ in range(count)]
    return np.array(values, dtype="<f4").tobytes()
