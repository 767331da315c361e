"""The engine of a real federation: one message a client over Flower's grid, uploads in client order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from ...core.messages import Download, Missing, Upload, pack_download
from ...errors import FedflatError
from ...models.conv.conv2d import column_of
from ..base import Finished, Job
from .limits import Limits
from .logs import say
from .nodes import Nodes
from .privacy import withholds_samples
from .run_spec import RunSpec
from .wire import UNREADABLE, Malformed, shown, to_record, to_upload

TOGETHER = 16
"""Messages that are pushed at once: what they have in common is hashed and sent only once."""
HOLD = 2**30
"""Bytes of uploads that may be here before their turn; beyond that they wait at the SuperLink."""
GRACE = 60.0
"""Seconds after the deadline for which the SuperLink still knows a message: it must not lapse before we look."""
RECEIPT = "receipt"
"""What the server keeps of a client: which state the client itself keeps."""


@dataclass
class _Asked:
    """A client that an answer is waited for."""

    client: int
    content: RecordDict
    message: str | None = None
    """the id of the message under way; None while it must be sent (again)"""
    tries: int = 0
    problem: str = ""
    """why it failed the last time"""


class Flower:
    """Clients on nodes of their own, whatever the method.

    What a client keeps stays on its node; the server keeps a receipt for it, where a simulation keeps the state
    itself, so that checkpoints and going on need no other code.

    Args:
        grid: Flower's, as a `ServerApp` gets it.
        nodes: who is connected.
        model: the model's name, or empty where the clients' app brings its own.
        run: names the run, for what clients keep.
        patience: limits.
        report: whether clients test what they receive.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Nodes,
        model: str = "",
        run: str = "run",
        patience: Limits | None = None,
        report: bool = True,
    ) -> None:
        self._grid, self._nodes, self._model, self._run = grid, nodes, model, run
        self.patience, self._report = patience or Limits(), report
        self._round: int | None = None
        """known as soon as a client has been asked"""
        self._said: dict[int, int] = {}
        """how many samples a client has by its first reply, where it was not asked before"""

    def open(self, job: Job) -> None:
        """Write the terms down."""
        if job.measured:
            raise FedflatError(
                "measure: distance, drift and discrepancy are of what clients train, and in a real federation the "
                "server sees what they upload. Leave these out, or measure in a simulation."
            )
        name, _, weights = self._model.partition(
            ":"
        )  # nodes have no use for the file: weights travel every round
        if weights and job.buffers == "reset" and job.model.read_buffers() is not None:
            raise FedflatError(
                "buffers: reset: nodes would reset to statistics in the server's file of weights, which they do not "
                "have. Use average, server or local."
            )
        self._job = job
        federation = job.federation
        self._dtype = job.model.vector.dtype
        self._terms = RunSpec.of(
            self._run,
            job.method,
            job.local,
            name,
            federation.sample_shape,
            federation.classes,
            federation.vocabulary,
            job.seed,
            job.buffers,
            str(self._dtype).removeprefix("torch."),
            self._report,
            column_of(job.model.module),
            job.oracle,
        ).text()
        self._sizes = dict.fromkeys(("update", *job.method.up), job.model.size)
        held = job.model.read_buffers()
        returned = held is not None and job.buffers in ("average", "reset")
        self._buffers = held.numel() if held is not None and returned else None

    def uploads(
        self,
        clients: Sequence[int],
        download: Callable[[int], Download],
        state: Callable[[int], dict[str, Tensor]],
    ) -> Iterator[Upload | Missing]:
        """All at once, folded in the order of `clients`; no client is waited for after the deadline."""
        self._end, self._round = time.monotonic() + self.patience.deadline, None
        connected = self._nodes.connected()
        answers: dict[int, Upload | Missing] = {
            client: Missing(client, "its node is not connected.")
            for client in clients
            if client not in connected
        }
        asked = self._compose([c for c in clients if c in connected], download, state)
        self._push(asked, connected)
        minimum, good = self.patience.minimum(len(clients)), 0
        while good < minimum and asked:  # nothing is folded before it is known that enough have answered
            found = self._collect(asked, list(asked))
            good += sum(isinstance(answer, Upload) for answer in found.values())
            answers |= found
            if len(asked) + good < minimum:
                break
        if good < minimum:
            yield from self._too_few(clients, answers, good, minimum)
            return
        for client in clients:
            while client not in answers:
                held = sum(answer.bytes for answer in answers.values() if isinstance(answer, Upload))
                answers |= self._collect(asked, [client] if held > HOLD else list(asked))
            yield answers.pop(client)

    def evaluate(self, w: Tensor, buffers: Tensor | None) -> Finished:
        """Here and at once, on the server's own test set."""
        return self._job.evaluate(w, buffers)

    def close(self) -> None:
        """Nothing to let go of."""

    # -- details -----------------------------------------------------------------------------------

    def _compose(
        self,
        clients: Sequence[int],
        download: Callable[[int], Download],
        state: Callable[[int], dict[str, Tensor]],
    ) -> dict[int, _Asked]:
        """The content of every message; vectors that all receive are in one record that all share."""
        common: ArrayRecord | None = None
        asked = {}
        for client in clients:
            message = download(client)
            parts = pack_download(client, message, {}, self._job.each)  # the state is on the node
            if common is None:
                common = to_record(parts["common"])
            receipt = state(client).get(RECEIPT, torch.tensor([-1, 0]))
            order: dict[str, Any] = {
                "terms": self._terms,
                **parts["order"],
                "receipt round": int(receipt[0]),
                "receipt mark": int(receipt[1]),
                "lost state": self.patience.lost_state,
            }
            content = RecordDict({"common": common, "order": ConfigRecord(order)})
            if parts["each"]:
                content["each"] = to_record(parts["each"])
            if parts["scalars"]:
                content["scalars"] = MetricRecord(parts["scalars"])
            asked[client] = _Asked(client, content)
            self._round = message.round
        return asked

    def _push(self, asked: dict[int, _Asked], connected: dict[int, int]) -> None:
        """Send what has to be sent, to whoever is connected."""
        due = [one for one in asked.values() if one.message is None and one.client in connected]
        for first in range(0, len(due), TOGETHER):
            some = due[first : first + TOGETHER]
            left = max(0.0, self._end - time.monotonic())
            messages = [
                Message(
                    one.content,
                    dst_node_id=connected[one.client],
                    message_type="train",
                    ttl=left + GRACE,  # the SuperLink forgets what comes later
                    group_id=str(self._round),
                )
                for one in some
            ]
            ids = list(self._grid.push_messages(messages))
            for one, message in zip(some, ids, strict=False):
                one.message = message
                one.tries += 1

    def _collect(self, asked: dict[int, _Asked], wanted: list[int]) -> dict[int, Upload | Missing]:
        """Look once for the answers of the clients that are wanted; who has answered is asked no longer."""
        late = time.monotonic() >= self._end
        found: dict[int, Upload | Missing] = {}
        for one in [asked[client] for client in wanted]:
            answer = None if one.message is None else self._pull(one, one.message)
            if answer is None and late:
                why = one.problem or "it did not answer in time"
                answer = Missing(one.client, f"{why} (deadline {self.patience.deadline:g} s).")
            if answer is not None:
                found[one.client] = answer
                del asked[one.client]
        if any(one.message is None for one in asked.values()):
            self._push(asked, self._nodes.connected())
        if not found:
            time.sleep(min(self.patience.poll, max(0.0, self._end - time.monotonic())))
        return found

    def _pull(self, one: _Asked, message: str) -> Upload | Missing | None:
        """An answer, if there is one by now; whatever a node sent, it is no more than a bad answer."""
        try:
            replies = list(self._grid.pull_messages([message]))
            return self._read(one, replies[0]) if replies else None
        except UNREADABLE as problem:
            return Missing(
                one.client, str(problem) if isinstance(problem, Malformed) else "its reply cannot be read."
            )

    def _read(self, one: _Asked, reply: Message) -> Upload | Missing | None:
        """An answer; None if the client will be asked again."""
        if reply.has_error():
            one.problem = f"its node failed: {shown(reply.error.reason, 300)}".rstrip(".")
            if one.tries <= self.patience.retries:
                say(
                    logging.WARNING,
                    f"client {one.client}, round {self._round}: {one.problem}; it is asked again",
                )
                one.message = None
                return None
            return Missing(one.client, f"{one.problem}.")
        upload, receipt = to_upload(
            reply.content, one.client, self._round or 0, self._sizes, self._buffers, self._dtype
        )
        self._check_agreed(upload)
        if receipt is not None:
            upload.state = {RECEIPT: torch.tensor(receipt, dtype=torch.int64)}
        device = self._job.model.vector.device
        upload.update = upload.update.to(device)
        upload.vectors = {name: vector.to(device) for name, vector in upload.vectors.items()}
        upload.buffers = None if upload.buffers is None else upload.buffers.to(device)
        return upload

    def _check_agreed(self, upload: Upload) -> None:
        """How much a client weighs is agreed on once, and not its word in every round."""
        withheld = withholds_samples(self._job.method)
        agreed = 1 if withheld else self._nodes.samples(upload.client)
        if agreed is None:
            agreed = self._said.setdefault(upload.client, upload.samples)
        if upload.samples != agreed:
            raise Malformed(
                f"it says {upload.samples} samples, {agreed} are agreed on. If its data has changed, start the run "
                "again to resume it."
            )
        local = self._job.local
        if local.steps is None and withheld:
            return
        steps = local.steps_for(agreed)
        if upload.steps != steps:
            raise Malformed(f"it says {upload.steps} steps; with what is agreed on it takes {steps}.")

    def _too_few(
        self, clients: Sequence[int], answers: dict[int, Upload | Missing], good: int, minimum: int
    ) -> Iterator[Missing]:
        """Stop, or continue as if no client had answered."""
        reasons = [f"client {a.client}: {a.reason}" for a in answers.values() if isinstance(a, Missing)]
        sentence = f"{good} of {len(clients)} clients answered as they should, {minimum} must"
        if self.patience.too_few == "stop":
            place = "" if self._round is None else f"round {self._round}: "
            raise FedflatError(
                f"{place}{sentence}. {' '.join(reasons)} Start the run again to resume this round; `too-few` "
                "skip would leave these rounds out, `min-replies` asks for fewer."
            )
        say(logging.WARNING, f"the round is left out: {sentence}")
        for client in clients:
            answer = answers.get(client)
            reason = answer.reason if isinstance(answer, Missing) else f"{sentence}: the round is left out."
            yield Missing(client, reason)
