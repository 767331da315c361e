"""What taking part is compared with: every client alone, or all data in one place, with as many local steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..client.optimisers import LocalOptimiser
from ..core.evaluation import BATCH, evaluate
from ..core.messages import Download, Upload
from ..core.metrics import BatchOutputs, Partials, Score
from ..data.federation import Federation, Shard
from ..engines.base import Engine, Finished, Job
from ..engines.inprocess import InProcess
from ..errors import FedflatError
from ..methods.method import Method
from ..methods.text import MethodLike, as_method
from ..server.participation import Everyone, Participation
from ..training.callbacks import RoundObserver
from ..training.record import RoundRecord
from .schema import Experiment

LOCAL, POOLED = "local", "pooled"
AT_THE_END = 10**12
"""Rounds between tests that only the last round is tested after."""


def run_name(experiment: Experiment) -> str:
    """What a run is called beside others: its baseline, or its method."""
    return experiment.baseline or as_method(experiment.method).name


@dataclass
class Parts:
    """What `train` is given that a baseline changes."""

    federation: Federation
    method: MethodLike
    local: LocalOptimiser
    participation: Participation
    engine: str | Engine
    settings: dict[str, Any]

    def as_baseline(self, kind: str) -> Parts:
        """For a baseline by name, with as many local steps as the clients take together.

        local: every client does what it does in the federation, in the rounds in which it takes part and with the
            same batches, but always goes on from its own last model.
        pooled: one client has all samples, and takes the mean number of steps of all clients of a round together.
        """
        if kind == LOCAL:
            settings = {**self.settings, "buffers": "local"}
            if settings.get("validation"):
                raise FedflatError(
                    "baseline: local and validation do not go together: no model of the server's is tested. Leave "
                    "one out."
                )
            if self.federation.test_owners is None:
                settings["eval_every"] = AT_THE_END  # every model is tested on the whole test set
            return replace(self, method=Method(LOCAL), engine=Alone(), settings=settings)
        steps = pooled_steps(self.federation, self.local, self.participation, self.settings)
        return replace(
            self,
            federation=self.federation.pooled(),
            method=Method(POOLED),
            local=replace(self.local, epochs=None, steps=steps),
            participation=Everyone(),
        )


def pooled_steps(
    federation: Federation, local: LocalOptimiser, participation: Participation, settings: dict[str, Any]
) -> int:
    """The local steps of all active clients of a round together, the mean over rounds."""
    seed, rounds = settings["seed"], settings["rounds"]
    if settings.get("validation"):
        federation = federation.with_validation(settings["validation"], seed)
    steps = [local.steps_for(size) for size in federation.sizes]
    active = [participation.choose(round, len(steps), seed) for round in range(rounds)]
    total = sum(steps[client] for clients in active for client in clients)
    return max(1, round(total / int(rounds)))


class NoTraffic(RoundObserver):
    """Takes out of every record what a federation would have sent."""

    may_lag = True

    def close(self, record: RoundRecord) -> None:
        record.vectors_down = record.vectors_up = record.bytes_down = record.bytes_up = 0


class Alone(InProcess):
    """Clients that never meet: each goes on from its own last model, which it keeps, and is tested with it.

    What the server averages meanwhile is used by nobody.
    """

    def open(self, job: Job) -> None:
        super().open(job)
        self._first = job.model.vector.clone(), job.model.read_buffers()
        self._state: Callable[[int], dict[str, Tensor]] = lambda client: {}

    def uploads(
        self,
        clients: Sequence[int],
        download: Callable[[int], Download],
        state: Callable[[int], dict[str, Tensor]],
    ) -> Iterator[Upload]:
        """One client at a time, from its own model."""
        self._state = state
        for client in clients:
            kept = dict(state(client))
            start = kept.pop("model", self._first[0])
            message = replace(download(client), start=start)
            upload = self._training.run(client, self._job.federation.client(client), message, kept)
            yield replace(upload, state={**upload.state, "model": start + upload.update})

    def model_of(self, client: int) -> tuple[Tensor, Tensor | None]:
        """A client's own model, with its buffers."""
        kept = self._state(client)
        return kept.get("model", self._first[0]), kept.get("buffers", self._first[1])

    def evaluate(self, w: Tensor, buffers: Tensor | None) -> Finished:
        """Every client's own model: on its own test samples where it has some, else all on the whole test set."""
        federation = self._job.federation
        test, owners = federation.test, federation.test_owners
        assert test is not None
        return Finished(self._on_all(test) if owners is None else self._on_own(test, owners))

    def _on_own(self, test: Shard, owners: Tensor) -> Score:
        """Every test sample by the model of the client that it belongs to."""
        job, places = self._job, []
        outputs: list[Tensor] = []
        for client in sorted(set(owners.tolist())):
            rows = (owners == client).nonzero().flatten()
            w, buffers = self.model_of(client)
            job.model.write_buffers(buffers)
            own = test.at(rows)
            with job.model.at(w), job.model.evaluating(), torch.no_grad():
                outputs += [job.model.outputs(inputs) for inputs, _ in own.batches(BATCH)]
            places.append(rows)
        order = torch.cat(places)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        every, found = torch.cat(outputs)[inverse], Partials()
        for number, first in enumerate(range(0, len(test), BATCH)):
            _, targets = test.stored(first, first + BATCH)
            groups = test.group_numbers(first, BATCH)
            batch = BatchOutputs(number, every[first : first + BATCH], targets, groups, job.loss)
            found = job.metrics.merge(found, job.metrics.score(batch))
        return job.metrics.compute(found)

    def _on_all(self, test: Shard) -> Score:
        """Every model on the whole test set: means by the clients' samples, and by class a list for each."""
        job = self._job
        sizes = job.federation.sizes
        scores: list[Score] = []
        for client in range(len(sizes)):
            w, buffers = self.model_of(client)
            job.model.write_buffers(buffers)
            scores.append(evaluate(job.model, w, test, job.loss, job.metrics))
        weighed = list(zip(scores, sizes, strict=True))
        means: Score = {
            name: sum(score[name] * size for score, size in weighed) / sum(sizes)
            for name in scores[0]
            if all(isinstance(score[name], int | float) for score in scores)
        }
        if scores[0].get("accuracy_by_class") is not None:
            means["accuracy_by_class"] = [score["accuracy_by_class"] for score in scores]
        return means
