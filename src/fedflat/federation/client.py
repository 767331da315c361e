"""The app on a node: receive, test what was received, train, keep, reply."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from ..composition import as_method
from ..data.federation import Federation
from ..errors import FedflatError
from ..evaluation import LossFunction, evaluate
from ..flat import FlatModel
from ..local_training import LocalTraining
from ..messages import Download, Upload
from ..models import build_model
from .kept import KeptState, LostState, Receipt
from .logs import say, to_console
from .secret import node_secret
from .terms import Terms
from .wire import from_record, from_upload

Node = Mapping[str, Any]
"""What `--node-config` says of a node."""
DataHook = Callable[[Node], Federation]
"""From that to the node's own data: a federation of one client, perhaps with a test set."""
ModelHook = Callable[[tuple[int, ...], int], nn.Module]
"""From the shape of a sample and the number of classes to a model."""


def client_app(
    data: DataHook, model: ModelHook | None = None, loss: LossFunction = F.cross_entropy
) -> ClientApp:
    """A Flower `ClientApp` that trains on a node's own data, with whatever method the server runs.

    Args:
        data: called with the node's config; returns the node's data as `Federation([(x, y)], test=(x, y))`. The
            samples do not leave the node.
        model: makes the model, if it is none that is known by name; the server's app needs the same.
        loss: from outputs and targets to the mean loss of a batch.
    """
    app = ClientApp()
    worker = _Worker(data, model, loss)

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        return _answer(message, context, worker.hello)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _answer(message, context, worker.train)

    return app


def _answer(message: Message, context: Context, work: Callable[[RecordDict, Node], RecordDict]) -> Message:
    """A reply; what a person can put right is said in it as a sentence."""
    to_console()
    try:
        content = work(message.content, context.node_config)
    except FedflatError as problem:
        say(logging.ERROR, str(problem))
        content = RecordDict({"refusal": ConfigRecord({"reason": str(problem)})})
    return Message(content, reply_to=message)


def state_home(node: Node) -> Path:
    """Where a node keeps what its client keeps: its config's `state-dir`, FEDFLAT_STATE, or the home directory."""
    named = node.get("state-dir") or os.environ.get("FEDFLAT_STATE")
    return Path(str(named)) if named else Path.home() / ".fedflat" / "state"


def client_number(node: Node) -> int:
    """Which client a node is."""
    number = node.get("partition-id")
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise FedflatError(
            'This node does not know which client it is. Start it with --node-config "partition-id=0".'
        )
    return number


class _Worker:
    """The work of a node. What it has loaded stays for the next message, where the process does."""

    def __init__(self, data: DataHook, model: ModelHook | None, loss: LossFunction) -> None:
        self._hook, self._model, self._loss = data, model, loss
        self._data: tuple[Node, Federation] | None = None
        self._training: tuple[Terms, LocalTraining] | None = None

    def hello(self, content: RecordDict, node: Node) -> RecordDict:
        """Who this is, and what samples look like; nothing about any sample."""
        client = client_number(node)
        data = self._load(node)
        facts: dict[str, Any] = {
            "client": client,
            "shape": list(data.sample_shape) or [0],
            "scalar": not data.sample_shape,
            "classes": data.classes,
            "vocabulary": data.vocabulary or 0,
        }
        return RecordDict({"hello": ConfigRecord(facts)})

    def train(self, content: RecordDict, node: Node) -> RecordDict:
        """One round."""
        order = content.get("order")
        if not isinstance(order, ConfigRecord):
            raise FedflatError("The server's message holds no order.")
        terms = Terms.read(order.get("terms"))
        client, round = client_number(node), int(str(order["round"]))
        if order.get("client") != client:
            raise FedflatError(f"The server's message is for another client; this is client {client}.")
        torch.set_num_threads(int(node.get("threads", 1)))
        data = self._load(node).to(getattr(torch, terms.dtype))
        training = self._trainer(terms, data)
        home = state_home(node)
        kept = KeptState(home, terms.run, client)
        state = self._state(kept, order)
        download = _download(content, order, training, round)
        report = _report(training, data, download, state, self._loss) if terms.report else {}
        training.local.secret = node_secret(home)
        upload = training.run(client, data.client(0), download, state)
        if report and upload.loss == upload.loss:  # a method that withholds the loss withholds the report too
            upload = replace(upload, report=report)
        receipt = kept.write(round, upload.state)
        say(logging.INFO, f"client {client}, round {round}: {_told(upload, receipt)}")
        return from_upload(upload, receipt)

    def _state(self, kept: KeptState, order: ConfigRecord) -> dict[str, Tensor]:
        receipt = None
        if int(str(order["receipt round"])) >= 0:
            receipt = (int(str(order["receipt round"])), int(str(order["receipt checksum"])))
        try:
            return kept.read(receipt)
        except LostState as problem:
            if order.get("lost state") != "restart":
                raise
            say(logging.WARNING, f"client {kept.client}: {problem} It starts anew.")
            return {}

    def _load(self, node: Node) -> Federation:
        if self._data is None or self._data[0] != dict(node):
            data = self._hook(node)
            if not isinstance(data, Federation) or len(data) != 1:
                raise FedflatError(
                    "The data hook must return the node's own data as fedflat.Federation([(x, y)], test=(x, y))."
                )
            self._data = dict(node), data
        return self._data[1]

    def _trainer(self, terms: Terms, data: Federation) -> LocalTraining:
        if data.sample_shape != terms.shape:
            raise FedflatError(
                f"The samples of this node have shape {data.sample_shape}, the others' {terms.shape}; all need the "
                "same."
            )
        if data.classes > terms.classes:
            raise FedflatError(
                f"This node has {data.classes} classes, the federation {terms.classes}: say `classes=` where the "
                "other nodes load their data."
            )
        if self._training is None or self._training[0] != terms:
            data.classes, data.vocabulary = terms.classes, terms.vocabulary
            if self._model is not None:
                module = self._model(terms.shape, terms.classes)
            else:
                module = build_model(terms.model, data, terms.seed)
            flat = FlatModel(module, getattr(torch, terms.dtype))
            method = as_method(terms.method)
            self._training = (
                terms,
                LocalTraining(flat, method, terms.sgd, self._loss, terms.seed, terms.buffers),
            )
        return self._training[1]


def _download(content: RecordDict, order: ConfigRecord, training: LocalTraining, round: int) -> Download:
    """What the server sent, if it is what the method expects."""
    model, method = training.model, training.method
    allowed = {"start", *method.down, *(name for c in method.contracts for name in c.each)}
    held = training.initial_buffers
    vectors: dict[str, Tensor] = {}
    for part in ("common", "each"):
        record: Any = content.get(part, {})
        sizes: dict[str, int | None] = {name: model.size for name in record if name in allowed}
        if part == "common":
            sizes["start"] = model.size
            if "buffers" in record and held is not None:
                sizes["buffers"] = held.numel()
        if record:
            vectors |= from_record(record, sizes, model.vector.dtype)
    scalars: Any = content.get("scalars", {})
    values: dict[str, Tensor | float] = {name: float(v) for name, v in scalars.items()}
    start, buffers = vectors.pop("start"), vectors.pop("buffers", None)
    return Download(round, float(str(order["lr"])), start, {**values, **vectors}, buffers)


def _report(
    training: LocalTraining,
    data: Federation,
    download: Download,
    state: Mapping[str, Tensor],
    loss: LossFunction,
) -> dict[str, float]:
    """How the model that was received does here: on the node's test set, or else on what it trains on."""
    shard = data.test or data.client(0)
    training.model.write_buffers(state.get("buffers", download.buffers))
    score = evaluate(training.model, download.start, shard, loss)
    told = {"loss": score.loss, "samples": float(len(shard))}
    if score.accuracy is not None:
        told["accuracy"] = score.accuracy
    return told


def _told(upload: Upload, receipt: Receipt | None) -> str:
    before = f"accuracy {upload.report['accuracy']:.1%} before, " if "accuracy" in upload.report else ""
    kept = "" if receipt is None else f", state kept ({receipt[1]:08x})"
    return f"{before}{upload.steps} steps{kept}"
