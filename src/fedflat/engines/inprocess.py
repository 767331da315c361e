"""All clients one after the other, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ..core.messages import Download, Upload
from .base import Finished, Job


class InProcess:
    """One model, reused from client to client."""

    def open(self, job: Job) -> None:
        """Build the one local trainer."""
        self._job = job
        self._training = job.client_round(job.model)

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

    def evaluate(self, w: Tensor, buffers: Tensor | None) -> Finished:
        """Here and at once, on the same model."""
        return self._job.evaluate(w, buffers)

    def close(self) -> None:
        """Nothing to let go of."""
