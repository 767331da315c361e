"""What a client answers, field by field, before it is put into Flower's records.

A node sends what is here and nothing else (`wire.from_upload`), and `fedflat privacy` looks at what is here and
nothing else. So nothing here needs Flower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...client.round import ClientRound
from ...core.evaluation import evaluate
from ...core.messages import Download, Upload, pack_upload
from ...core.metrics import Metrics
from ...data.federation import Federation
from .client_state import Receipt

Reply = dict[str, dict[str, Tensor | int | float]]
"""Values by part and name."""

LEAVING = ("vectors", "numbers", "report")
"""The parts of an upload that leave a node; others stay."""


def hello_of(client: int, data: Federation, samples: bool) -> dict[str, Any]:
    """Who a node is, what samples look like and, where that may leave, how many there are; nothing about any one."""
    counted = {"samples": len(data.client(0))} if samples else {}
    return {
        "client": client,
        "shape": list(data.sample_shape) or [0],
        "scalar": not data.sample_shape,
        "classes": data.classes,
        "vocabulary": data.vocabulary or 0,
        **counted,
    }


def take_part(
    training: ClientRound,
    client: int,
    data: Federation,
    download: Download,
    state: dict[str, Tensor],
    report: bool,
) -> Upload:
    """A client's round: test what was received, if that is asked for, and train."""
    found = _report(training, data, download, state) if report else {}
    upload = training.run(client, data.client(0), download, state)
    if found and upload.loss == upload.loss:  # a method that withholds the loss withholds the report too
        upload = replace(upload, report=found)
    return upload


def reply_of(upload: Upload, receipt: Receipt | None) -> Reply:
    """A client's reply: its vectors, its numbers, what it measured, and which state it has kept."""
    packed = pack_upload(upload)
    reply: Reply = {part: packed[part] for part in LEAVING if packed[part]}
    if receipt is not None:
        reply["receipt"] = {"round": receipt[0], "mark": receipt[1]}
    return reply


def _report(
    training: ClientRound, data: Federation, download: Download, state: Mapping[str, Tensor]
) -> dict[str, float]:
    """How the model that was received does here: on the node's test set, or else on what it trains on."""
    shard = data.test or data.client(0)
    training.model.write_buffers(state.get("buffers", download.buffers))
    score = evaluate(training.model, download.start, shard, training.loss, Metrics(("loss", "accuracy")))
    told = {"loss": score["loss"], "samples": float(len(shard)), "accuracy": score["accuracy"]}
    return {name: value for name, value in told.items() if value is not None}
