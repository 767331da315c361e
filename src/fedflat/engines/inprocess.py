"""All clients one after the other, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ..client.round import ClientRound
from ..core.evaluation import Score, evaluate
from ..core.messages import Download, Upload
from .base import Job


class InProcess:
    """One model, reused from client to client."""

    def open(self, job: Job) -> None:
        """Build the one local trainer."""
        self._job = job
        self._training = ClientRound(
            job.model, job.method, job.sgd, job.loss, job.seed, job.buffers, job.measured
        )

    def uploads(
        self,
        clients: Sequence[int],
        download: Callable[[int], Download],
        state: Callable[[int], dict[str, Tensor]],
    ) -> Iterator[Upload]:
        """One client at a time."""
        for client in clients:
            shard = self._job.federation.client(client)
            yield self._training.run(client, shard, download(client), state(client))

    def evaluate(self, w: Tensor, buffers: Tensor | None) -> Score:
        """Here, on the same model."""
        job = self._job
        assert job.federation.test is not None
        job.model.write_buffers(buffers)
        return evaluate(job.model, w, job.federation.test, job.loss)

    def close(self) -> None:
        """Nothing to let go of."""
