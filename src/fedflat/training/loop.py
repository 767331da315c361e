"""The rounds of a run: choose clients, let an engine run them, fold what they return, evaluate, record."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..core.evaluation import evaluate
from ..core.finite import is_finite, is_spoiled, likely_cause
from ..core.messages import Download, Missing
from ..core.metrics import Score
from ..data.federation import Federation
from ..engines.base import Engine, Future, Job
from ..errors import Diverged, FedflatError
from ..server.participation import Participation
from ..server.server import NOT_UNDONE, Server
from ..server.uploads import RejectedUpload
from ..storage.client_store import ClientStore
from ..storage.run_directory import RunDirectory
from .callbacks import Callbacks
from .class_mix import ClassMix
from .evaluation import one_class_only, plain_values, score_row
from .record import RoundRecord
from .settings import TrainingSettings

PATIENCE = {"stop": 3, "restore": 10}
"""Rounds in a row that may come to nothing, without a finite upload or undone, before the run ends."""


@dataclass
class _Told:
    """What is remembered of a good upload until the round is closed."""

    loss: float
    samples: int
    report: dict[str, float]
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """what the client keeps"""


@dataclass
class TrainingLoop:
    """What rounds need, and how they go."""

    job: Job
    server: Server
    store: ClientStore
    """what the clients keep"""
    engine: Engine
    participation: Participation
    settings: TrainingSettings
    callbacks: Callbacks
    history: list[dict[str, Any]]
    """a row for every round so far"""
    directory: RunDirectory | None = None
    stop: Callable[[], bool] | None = None
    overlap: bool | None = None
    """whether a round's model may be tested while the next one trains; None: where no callback could tell"""
    whole: Federation | None = None
    """the data before a validation part was held out, with the test set"""
    _told: bool = False
    """whether a person knows that uploads are refused"""
    _lost: int = 0
    """rounds in a row that came to nothing"""

    def run(self) -> None:
        """Take the rounds that are left."""
        settings = self.settings
        if len(self.history) >= settings.rounds:
            return
        self._mix = ClassMix.of(self.job.federation)
        if not is_finite(self.server.w):
            raise FedflatError(
                "The model holds NaN or infinite weights before the first round: give finite ones."
            )
        if self.server.buffers is not None and bool(self.server.buffers.isnan().any()):
            raise FedflatError(
                "The model holds NaN in a buffer before the first round, which no average passes: give it numbers, "
                "or make it a plain attribute where training leaves it as it is."
            )
        for row in reversed(self.history):
            self._lost += bool(row.get("undone"))
            if row["clients"] and not row.get("undone"):
                break
        late: tuple[RoundRecord, Future] | None = None
        """a round whose model is tested while the next one trains"""
        try:
            self.engine.open(self.job)
            for index in range(len(self.history), settings.rounds):
                last, stopping = index == settings.rounds - 1, False
                try:
                    record = self._train(index)
                except FedflatError:
                    if late is not None:  # it did happen, though its test did not come to an end
                        self._tell_of(late[0])
                    raise
                for observer in self.callbacks.observers:
                    observer.close(record)
                if late is not None:
                    self._score(late[0], late[1].result())
                    stopping = self._tell_of(late[0])
                    late = None
                if self.job.federation.test is not None and (last or (index + 1) % settings.eval_every == 0):
                    tested = self.server.delivered if settings.evaluate == "server" else self.server.average
                    if last:
                        self.callbacks.working("testing the last model")
                    score = self.engine.evaluate(tested, self.server.buffers)
                    if not score.done() and not (last or stopping) and self._can_wait(index + 1):
                        late = record, score
                        continue
                    self._score(record, score.result())
                if last and settings.validation is not None:
                    self._test_once(record)
                stopping |= self._tell_of(record)
                if self._keep(index + 1, last, stopping):
                    return
        finally:
            self.engine.close()

    def _can_wait(self, done: int) -> bool:
        """Whether nothing depends on a round's test before the next one is trained."""
        overlap = self.overlap
        if overlap is None:
            overlap = self.callbacks.may_lag and self.stop is None
        due = self.directory is not None and self.directory.due(done)
        return overlap and not due and not (self.stop is not None and self.stop())

    def _train(self, index: int) -> RoundRecord:
        """One round, from the server through the clients to the server."""
        began = time.perf_counter()
        server, observers = self.server, self.callbacks.observers
        record = RoundRecord(index, [], server, lr=self.job.local.lr_in(index))
        server.open(index, record.lr, self.job.local.rate_sum)
        for observer in observers:
            observer.open(index)

        def download(client: int) -> Download:
            message = server.download(client)
            record.count_down(message)
            return message

        active = self.participation.choose(index, len(self.job.federation), self.job.seed)
        good: dict[int, _Told] = {}
        refused: list[tuple[int, str]] = []
        spoiled = False
        """whether an upload was refused because it is not finite"""
        for done, upload in enumerate(self.engine.uploads(active, download, self.store.get), start=1):
            self.callbacks.working(f"client {done:,} of {len(active):,}")
            if isinstance(upload, Missing):
                record.rejected.append(f"client {upload.client}, round {index}: {upload.reason}")
                continue
            record.count_up(upload)
            record.dropped += [f"client {upload.client}, round {index}: {note}" for note in upload.notes]
            try:
                server.receive(upload)
            except RejectedUpload as rejection:
                if self.settings.on_bad_upload == "stop":
                    raise
                refused.append((upload.client, str(rejection)))
                spoiled = spoiled or is_spoiled(upload, server.buffers)
                continue
            for observer in observers:
                observer.receive(upload)
            told = _Told(upload.loss, upload.samples, dict(upload.report))
            if self.store.budget is None:  # what a client keeps counts when the round does
                told.state = {n: v.clone() if upload.borrowed else v for n, v in upload.state.items()}
            else:
                self.store.put(upload.client, upload.state, copy=upload.borrowed)
            good[upload.client] = told
        server.close()
        cause = self._cause(record.lr, {client: told.loss for client, told in good.items()}, refused)
        for client, sentence in [*server.refused, *self._undone(good)]:
            if self.settings.on_bad_upload == "stop":
                raise RejectedUpload(sentence)
            refused.append((client, sentence))
            good.pop(client)
        record.rejected += [sentence for _, sentence in refused]
        if refused and not self._told:
            self._tell(refused, len(active))
        self._judge(record, spoiled, cause)
        self._pass_on(server.notices)
        if self.store.budget is None:
            for client, told in good.items():
                self.store.put(client, told.state, copy=False)
        record.clients = list(good)
        losses = [(told.loss, server.weigh(told.samples)) for told in good.values()]
        # one client that says nothing of its loss does not hide the others'
        losses = [one for one in losses if one[0] == one[0]] or losses
        record.sum_up(losses, {client: told.report for client, told in good.items() if told.report})
        record.scalars, record.clipped = server.scalars(), list(server.clipped)
        record.seconds = time.perf_counter() - began - sum(observer.seconds for observer in observers)
        return record

    def _undone(self, good: Iterable[int]) -> list[tuple[int, str]]:
        """All good uploads of a round that does not count, with the reason."""
        server = self.server
        if server.undone is None:
            return []
        if self.store.budget is not None and self.job.method.cost.client:
            raise Diverged(f"round {server.round}: {server.undone} {NOT_UNDONE}")
        late = {client for client, _ in server.refused}
        return [
            (client, f"client {client}, round {server.round}: the round is undone, since {server.undone}")
            for client in good
            if client not in late
        ]

    def _judge(self, record: RoundRecord, spoiled: bool, cause: str) -> None:
        """End the run where a round came to nothing because numbers are no longer finite, or count these rounds."""
        server = self.server
        found = server.undone or ("every upload holds NaN or infinite values." if spoiled else None)
        if server.accepted:
            self._lost = 0
            return
        if found is None:
            return
        self._lost += 1
        record.undone = f"{found} {cause}"
        if server.undone is not None and self.settings.on_divergence == "stop":
            raise Diverged(
                f"round {record.index}: {record.undone} With on_divergence='restore' it is undone, and the "
                "run goes on."
            )
        if self._lost >= min(PATIENCE[self.settings.on_divergence], self.settings.rounds):
            raise Diverged(
                f"round {record.index}: {record.undone} {self._lost} rounds in a row came to nothing."
            )
        if self.directory is not None:
            self.directory.log(f"undone: round {record.index}: {record.undone}")

    def _tell(self, refused: list[tuple[int, str]], active: int) -> None:
        """Warn of the first refused uploads: a run that says nothing is not searched for them."""
        self._told = True
        (client, sentence), count = refused[0], len(refused)
        reason = ""
        if "NaN" in sentence:
            reason = (
                " Its data holds NaN or infinite values: fill or drop them."
                if self._has_spoiled_data(client)
                else " A lower lr may help."
            )
        warnings.warn(
            f"{sentence}{reason} {'All' if count == active else f'{count} of'} {active} uploads of the round are "
            "left out; `rejected` in the history has every one, and on_bad_upload='stop' ends the run at the first.",
            stacklevel=5,
        )

    def _cause(self, lr: float, losses: dict[int, float], refused: list[tuple[int, str]]) -> str:
        """What the most likely reason is, if the round comes to nothing."""
        if not losses and refused and self._has_spoiled_data(refused[0][0]):
            return f"The data of client {refused[0][0]} holds NaN or infinite values: fill or drop them."
        return likely_cause(lr, losses)

    def _has_spoiled_data(self, client: int) -> bool:
        """Whether a client's inputs hold NaN or infinite values, as far as they are here."""
        with contextlib.suppress(FedflatError):
            inputs, _ = self.job.federation.client(client).stored()
            return inputs.is_floating_point() and not is_finite(inputs)
        return False

    def _pass_on(self, notices: list[str]) -> None:
        """Say what mechanisms want a person to know."""
        for sentence in notices:
            warnings.warn(sentence, stacklevel=5)
            if self.directory is not None:
                self.directory.log(sentence)

    def _score(self, record: RoundRecord, score: Score) -> None:
        """Write down what a test of the round's model found."""
        if self.settings.validation is not None:
            by_class = score.get("accuracy_by_class")
            spread = self._mix.spread(by_class) if self._mix and by_class else None
            record.validation = {**score_row(score), "client_accuracy": spread}
            return
        self._pass_on(self._note(record, score, self.job.federation.test_group_names))

    def _note(self, record: RoundRecord, score: Score, group_names: Sequence[str]) -> list[str]:
        """Write down what a test on the test set found; sentences that a person should know."""
        further = dict(score)
        record.accuracy, record.loss = further.pop("accuracy", None), further.pop("loss", None)
        by_class, by_group = further.pop("accuracy_by_class", None), further.pop("accuracy_by_group", None)
        if by_group is not None:
            record.accuracy_by_group = dict(zip(group_names, by_group, strict=True))
        record.client_accuracy = self._mix.spread(by_class) if self._mix and by_class else None
        counts = further.pop("class-counts", None)
        record.metrics = plain_values(further)
        if record.index == self.settings.rounds - 1 and counts is not None:
            return one_class_only(**counts)
        return []

    def _test_once(self, record: RoundRecord) -> None:
        """Use the test set after the last round, where rounds were tested on a validation part."""
        job, server = self.job, self.server
        if self.whole is None or self.whole.test is None:
            return
        job.model.write_buffers(server.buffers)
        tested = server.delivered if self.settings.evaluate == "server" else server.average
        score = evaluate(job.model, tested, self.whole.test, job.loss, job.metrics)
        self._pass_on(self._note(record, score, self.whole.test_group_names))

    def _tell_of(self, record: RoundRecord) -> bool:
        """Write down what happened in a round; whether a callback ends the run."""
        self.history.append(record.row())
        return self.callbacks.round(record)

    def _keep(self, done: int, last: bool, stopping: bool) -> bool:
        """Write a checkpoint, if one is due; whether to stop here."""
        stopping = stopping or (self.stop is not None and self.stop())
        if self.directory is not None and (
            self.directory.keep_states if last else stopping or self.directory.due(done)
        ):
            self.callbacks.working("writing a checkpoint")
            self.directory.checkpoint(self.server, self.store, done)
        return stopping
