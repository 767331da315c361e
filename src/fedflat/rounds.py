"""The rounds of a run: choose clients, let an engine run them, fold what they return, evaluate, record."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .engines import Engine, Job, TestsMeanwhile
from .errors import FedflatError
from .evaluation import ClassMix, Score
from .messages import Download, Missing
from .participation import Participation
from .round import Round
from .rundirectory import RunDirectory
from .server import RejectedUpload, Server
from .store import ClientStore

if TYPE_CHECKING:
    from .flatness.recording import Recording


@dataclass
class Rounds:
    """What rounds need, and how they go."""

    job: Job
    server: Server
    store: ClientStore
    """what the clients keep"""
    engine: Engine
    participation: Participation
    rounds: int
    evaluate: str = "server"
    eval_every: int = 1
    overlap: bool | None = None
    """whether a round's model may be tested while the next one trains; None: where nobody could tell"""
    on_bad_upload: str = "skip"
    on_round: Callable[[Round], None] | None = None
    stop: Callable[[], bool] | None = None
    recording: Recording | None = None
    directory: RunDirectory | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    """a row for every round so far"""
    _told: bool = False
    """whether a person knows that uploads are refused"""

    def run(self) -> None:
        """Take the rounds that are left."""
        if len(self.history) >= self.rounds:
            return
        self._mix = ClassMix.of(self.job.federation)
        late: tuple[Round, Callable[[], Score]] | None = None
        """a round whose model is tested while the next one trains"""
        try:
            self.engine.open(self.job)
            for index in range(len(self.history), self.rounds):
                last = index == self.rounds - 1
                try:
                    record = self._train(index, last)
                except FedflatError:
                    if late is not None:  # it did happen, though its test did not come to an end
                        self._tell_of(late[0])
                    raise
                if self.recording is not None:
                    record.measures = self.recording.finish(self.server)
                if late is not None:
                    self._score(late[0], late[1]())
                    self._tell_of(late[0])
                    late = None
                if self.job.federation.test is not None and (last or (index + 1) % self.eval_every == 0):
                    tested = self.server.w if self.evaluate == "server" else self.server.average
                    if isinstance(self.engine, TestsMeanwhile) and not last and self._can_wait(index + 1):
                        late = record, self.engine.evaluate_meanwhile(tested, self.server.buffers)
                        continue
                    self._score(record, self.engine.evaluate(tested, self.server.buffers))
                self._tell_of(record)
                if self._keep(index + 1, last):
                    return
        finally:
            self.engine.close()

    def _can_wait(self, done: int) -> bool:
        """Whether nothing depends on a round's test before the next one is trained."""
        overlap = self.overlap
        if overlap is None:
            overlap = self.on_round is None and self.stop is None
        due = self.directory is not None and self.directory.due(done)
        return overlap and not due and not (self.stop is not None and self.stop())

    def _train(self, index: int, last: bool) -> Round:
        """One round, from the server through the clients to the server."""
        began = time.perf_counter()
        server, recording = self.server, self.recording
        record = Round(index, [], server, lr=self.job.sgd.lr_in(index))
        server.open(index, record.lr)
        if recording is not None:
            recording.open(server, index, last)

        def download(client: int) -> Download:
            message = server.download(client)
            record.count_down(message)
            return message

        active = self.participation.choose(index, len(self.job.federation), self.job.seed)
        losses: list[tuple[float, float]] = []
        reports: dict[int, dict[str, float]] = {}
        refused: list[tuple[int, str]] = []
        for upload in self.engine.uploads(active, download, self.store.get):
            if isinstance(upload, Missing):
                record.rejected.append(f"client {upload.client}, round {index}: {upload.reason}")
                continue
            record.count_up(upload)
            try:
                server.receive(upload)
            except RejectedUpload as rejection:
                if self.on_bad_upload == "stop":
                    raise
                record.rejected.append(str(rejection))
                refused.append((upload.client, str(rejection)))
                continue
            if recording is not None:
                recording.receive(upload)
            self.store.put(upload.client, upload.state, copy=upload.borrowed)
            record.clients.append(upload.client)
            losses.append((upload.loss, server.weight(upload)))
            if upload.report:
                reports[upload.client] = dict(upload.report)
        if refused and not self._told:
            self._tell(refused, len(active))
        server.close()
        record.sum_up(losses, reports)
        record.scalars, record.clipped = server.scalars(), list(server.clipped)
        record.seconds = time.perf_counter() - began - (recording.seconds if recording is not None else 0.0)
        return record

    def _tell(self, refused: list[tuple[int, str]], active: int) -> None:
        """Warn of the first refused uploads: nobody looks for them in the history of a run that says nothing."""
        self._told = True
        (client, sentence), count = refused[0], len(refused)
        reason = ""
        if "NaN" in sentence:
            spoiled = False
            with contextlib.suppress(FedflatError):  # the data may be elsewhere
                inputs, _ = self.job.federation.client(client).stored()
                spoiled = inputs.is_floating_point() and not math.isfinite(inputs.sum().item())
            reason = " Its data holds such values: fill or drop them." if spoiled else " A lower lr may help."
        warnings.warn(
            f"{sentence}{reason} {'All' if count == active else f'{count} of'} {active} uploads of the round are "
            "left out; `rejected` in the history has every one, and on_bad_upload='stop' ends the run at the first.",
            stacklevel=5,
        )

    def _score(self, record: Round, score: Score) -> None:
        """What a test of the round's model found."""
        record.accuracy, record.loss = score.accuracy, score.loss
        record.client_accuracy = self._mix.spread(score.by_class) if self._mix and score.by_class else None

    def _tell_of(self, record: Round) -> None:
        """Write down what happened in a round."""
        self.history.append(record.row())
        if self.directory is not None:
            self.directory.round(self.history[-1])
        if self.on_round is not None:
            self.on_round(record)

    def _keep(self, done: int, last: bool) -> bool:
        """Make what is there after so many rounds last, if it is time; whether to stop here."""
        stopping = self.stop is not None and self.stop()
        if self.directory is not None and (
            self.directory.keep_states if last else stopping or self.directory.due(done)
        ):
            self.directory.checkpoint(self.server, self.store, done)
        return stopping
