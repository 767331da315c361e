"""The app on a node: receive, hold against what the node insists on, test, train, keep, reply."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from ...client.round import ClientRound
from ...core.evaluation import LossFunction
from ...core.flat import FlatModel
from ...core.messages import Download, Upload, unpack_download
from ...data.federation import Federation
from ...errors import FedflatError
from ...methods.text import as_method
from ...models import build_model
from ...models.conv.conv2d import set_column
from .client_state import KeptState, LostState, mark_of
from .logs import say, to_console
from .reply import Reply, hello_of, reply_of, take_part
from .require import Require
from .run_spec import RunSpec
from .secret import node_secret
from .wire import from_record, from_upload

APP_FAILED = 2
"""Flower's code for an exception in a client app."""

Node = Mapping[str, Any]
"""What `--node-config` says of a node."""
DataHook = Callable[[Node], Federation]
"""From that to the node's own data: a federation of one client, perhaps with a test set."""
ModelHook = Callable[[tuple[int, ...], int], nn.Module]
"""From the shape of a sample and the number of classes to a model."""


def client_app(
    data: DataHook,
    model: ModelHook | None = None,
    loss: LossFunction = F.cross_entropy,
    require: Require | None = None,
) -> ClientApp:
    """A Flower `ClientApp` that trains on a node's own data, with whatever method the server runs.

    Args:
        data: called with the node's config; returns the node's data as `Federation([(x, y)], test=(x, y))`. The
            samples do not leave the node.
        model: makes the model, if it is none that is known by name; the server's app needs the same.
        loss: from outputs and targets to the mean loss of a batch.
        require: what nodes with this app insist on, such as `Require(noise=1.0, clip=1.0)`; a node can insist on more
            in its config (`require-noise=1.0`). Terms below that are refused, by a sentence in the node's log and to
            the server. By default nothing is: the terms alone decide.
    """
    app = ClientApp()
    worker = _Worker(data, model, loss, require or Require())

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        return _answer(message, context, worker.hello)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _answer(message, context, worker.train)

    return app


def _answer(message: Message, context: Context, work: Callable[[RecordDict, Node], RecordDict]) -> Message:
    """A reply; what a person can put right is said in it as a sentence.

    Flower would send the text of any other exception, and who knows what of the samples is in that.
    """
    to_console()
    try:
        content = work(message.content, context.node_config)
    except FedflatError as problem:
        say(logging.ERROR, str(problem))
        content = RecordDict({"refusal": ConfigRecord({"reason": str(problem)})})
    except Exception as problem:
        say(logging.ERROR, f"{type(problem).__name__}: {problem}", problem)
        reason = f"{type(problem).__name__} in the node's app; its own log says more."
        return Message(Error(APP_FAILED, reason), reply_to=message)
    return Message(content, reply_to=message)


@contextmanager
def _explained_here(sentence: str) -> Iterator[None]:
    """Leave what an error says of samples or files in the node's log, and tell the server no more than a sentence."""
    try:
        yield
    except LostState:
        raise
    except FedflatError as problem:
        say(logging.ERROR, str(problem))
        raise FedflatError(f"{sentence} The node's own log says why.") from None


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

    def __init__(self, data: DataHook, model: ModelHook | None, loss: LossFunction, require: Require) -> None:
        self._hook, self._model, self._loss, self._require = data, model, loss, require
        self._data: tuple[Node, Federation] | None = None
        self._training: tuple[RunSpec, ClientRound] | None = None

    def hello(self, content: RecordDict, node: Node) -> RecordDict:
        """Who this is, and what samples look like; nothing about any sample.

        How many there are only if the server asks: it does not where the method withholds that from every reply.
        """
        client = client_number(node)
        insisted = self._require.and_of(node)  # a mistake in the config is said before the first round
        wish = content.get("wish")
        asked = isinstance(wish, ConfigRecord) and wish.get("samples") is True
        facts = hello_of(client, self._load(node), samples=asked and not insisted.withholds("samples"))
        return RecordDict({"hello": ConfigRecord(facts)})

    def train(self, content: RecordDict, node: Node) -> RecordDict:
        """One round."""
        order = content.get("order")
        if not isinstance(order, ConfigRecord):
            raise FedflatError("The server's message holds no order.")
        terms = RunSpec.read(order.get("terms"))
        client, round = client_number(node), int(str(order["round"]))
        if order.get("client") != client:
            raise FedflatError(f"The server's message is for another client; this is client {client}.")
        torch.set_num_threads(int(node.get("threads", 1)))
        data = self._load(node).to(getattr(torch, terms.dtype))
        training = self._trainer(terms, data)
        self._require.and_of(node).check(training, terms.report)
        home = state_home(node)
        kept = KeptState(home, terms.run, client)
        state, anew = self._state(kept, order)
        download = _download(content, order, training, round)
        with _explained_here("Its secret cannot be read."):
            secret = training.secret = node_secret(home)
        with _explained_here("Its training failed."):
            upload = take_part(training, client, data, download, state, terms.report)
        with _explained_here("Its state cannot be kept."):
            receipt = kept.write(round, upload.state, mark_of(content, secret, anew))
            _tell(upload, training, kept, reply_of(upload, receipt))
        return from_upload(upload, receipt)

    def _state(self, kept: KeptState, order: ConfigRecord) -> tuple[dict[str, Tensor], bool]:
        """What the client begins with, and whether that is nothing though the server names a state."""
        receipt = None
        if int(str(order["receipt round"])) >= 0:
            receipt = (int(str(order["receipt round"])), int(str(order["receipt mark"])))
        try:
            with _explained_here("Its state cannot be read."):
                return kept.read(receipt), False
        except LostState as problem:
            say(logging.WARNING, f"client {kept.client}: its states are in {kept.directory}")
            if order.get("lost state") != "restart":
                raise
            say(logging.WARNING, f"client {kept.client}: {problem} It starts anew.")
            return {}, True

    def _load(self, node: Node) -> Federation:
        if self._data is None or self._data[0] != dict(node):
            with _explained_here("Its data cannot be loaded."):
                data = self._hook(node)
            if not isinstance(data, Federation) or len(data) != 1:
                raise FedflatError(
                    "The data hook must return the node's own data as fedflat.Federation([(x, y)], test=(x, y))."
                )
            self._data = dict(node), data
        return self._data[1]

    def _trainer(self, terms: RunSpec, data: Federation) -> ClientRound:
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
            set_column(module, terms.convolutions)
            flat = FlatModel(module, getattr(torch, terms.dtype))
            method = as_method(terms.method)
            self._training = (
                terms,
                ClientRound(
                    flat,
                    method,
                    terms.optimiser,
                    self._loss,
                    terms.seed,
                    terms.buffers,
                    oracle=terms.oracle,
                ),
            )
        return self._training[1]


def _download(content: RecordDict, order: ConfigRecord, training: ClientRound, round: int) -> Download:
    """What the server sent, if it is what the method expects."""
    model, method = training.model, training.method
    allowed = {"start", *method.down, *(name for c in method.contracts for name in c.each)}
    held = training.initial_buffers
    numbers = {"client": order["client"], "round": round, "lr": float(str(order["lr"]))}
    parts: dict[str, dict[str, Any]] = {"order": numbers}
    for part in ("common", "each"):
        record: Any = content.get(part, {})
        sizes: dict[str, int | None] = {name: model.size for name in record if name in allowed}
        if part == "common":
            sizes["start"] = model.size
            if "buffers" in record and held is not None:
                sizes["buffers"] = held.numel()
        parts[part] = from_record(record, sizes, model.vector.dtype) if record else {}
    scalars: Any = content.get("scalars", {})
    parts["scalars"] = {name: float(v) for name, v in scalars.items()}
    _, download, _ = unpack_download(parts)
    return download


def _tell(upload: Upload, training: ClientRound, kept: KeptState, reply: Reply) -> None:
    """Say in the node's log what was done, and name everything that leaves."""
    place = f"client {upload.client}, round {upload.round}"
    for mechanism, contract in zip(training.method.mechanisms, training.method.contracts, strict=True):
        if contract.noise is not None and (zeroed := training.local.memo.get(mechanism)):
            count = kept.count_zeroed(len(zeroed))
            say(
                logging.WARNING,
                f"{place}: {', '.join(zeroed)} held NaN or infinite values and leave as zeros, buffers as received "
                f"({count} vectors of this run so far).",
            )
    before = f"accuracy {upload.report['accuracy']:.1%} before, " if "accuracy" in upload.report else ""
    state = ", state kept" if "receipt" in reply else ""
    names = [
        name if part in ("vectors", "numbers") else f"{part} {name}" for part in reply for name in reply[part]
    ]
    say(logging.INFO, f"{place}: {before}{upload.steps} steps{state}; leaving: {', '.join(names)}")
