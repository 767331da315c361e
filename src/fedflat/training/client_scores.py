"""Every client's own numbers: the global model on the test samples that belong to each, in clients.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..core.evaluation import evaluate
from ..engines.base import Job
from ..errors import FedflatError, explained
from ..storage.client_scores import FILE, cut_client_scores, score_line
from .callbacks import RoundObserver
from .evaluation import score_row

if TYPE_CHECKING:
    from .record import RoundRecord
    from .train import Run

ModelOf = Callable[[int], tuple[Tensor, Tensor | None]]
"""From a client to the model that it is tested with, and its buffers."""


class ClientScores(RoundObserver):
    """Tests every client on its own held-out samples every few rounds, and after the last."""

    may_lag = True

    def __init__(
        self, directory: Path | None, every: int, job: Job, on: str, model_of: ModelOf | None
    ) -> None:
        if directory is None:
            raise FedflatError("clients_every: name a directory for what is found, out=... (--out).")
        if job.federation.test is None or job.federation.test_owners is None:
            raise FedflatError(
                "clients_every: nobody knows which test sample is whose. A table with a client_column says so, and a "
                "folder of client folders, partitioned by-user; so does a validation part."
            )
        self._file, self._every, self._job, self._on = directory / FILE, every, job, on
        self._model_of = model_of

    def begin(self, run: Run) -> None:
        self._rounds = run.settings.rounds
        cut_client_scores(self._file, len(run.history))

    def close(self, record: RoundRecord) -> None:
        done = record.index + 1
        if done % self._every and done != self._rounds:
            return
        server, federation = record.server, self._job.federation
        test, owners = federation.test, federation.test_owners
        assert test is not None
        assert owners is not None
        lines: list[bytes] = []
        for client in sorted(set(owners.tolist())):
            w, buffers = self._model_of(client) if self._model_of else (server.delivered, server.buffers)
            self._job.model.write_buffers(buffers)
            own = test.at((owners == client).nonzero().flatten())
            score = evaluate(self._job.model, w, own, self._job.loss, self._job.metrics)
            row: dict[str, Any] = {"index": record.index, "client": federation.name_of(client)}
            lines.append(score_line({**row, "on": self._on, "samples": len(own), **score_row(score)}))
        with explained(f"{self._file} cannot be written"), self._file.open("ab") as file:
            file.write(b"".join(lines))
