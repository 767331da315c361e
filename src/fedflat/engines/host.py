"""What runs in every process of an engine that has several: a model and the data, for packed messages."""

from __future__ import annotations

from ..core.evaluation import score_batches
from ..core.messages import Parts, pack_upload, unpack_download
from ..core.metrics import Partials
from ..errors import FedflatError
from .base import Job


class Host:
    """Runs clients and tests models; it keeps nothing of them, so any host can take any client."""

    def __init__(self, job: Job, device: str) -> None:
        self._job = job
        self._model = job.model.copy(device)
        self._federation = job.federation.to(self._model.vector.dtype, device)
        self._training = job.client_round(self._model)

    def run(self, parts: Parts) -> Parts:
        """Run a client's round."""
        client, download, state = unpack_download(parts)
        try:
            upload = self._training.run(client, self._federation.client(client), download, state)
        except FedflatError:
            raise
        except Exception as problem:
            place = f"client {client}, round {download.round}"
            raise FedflatError(f"{place}: training failed: {_said(problem)}") from problem
        return pack_upload(upload)

    def score(self, parts: Parts, share: range) -> Partials:
        """Score a model on some batches of the test set."""
        tested, test = parts["model"], self._federation.test
        assert test is not None
        try:
            self._model.write_buffers(tested.get("buffers"))
            return score_batches(self._model, tested["w"], test, self._job.loss, self._job.metrics, share)
        except Exception as problem:
            raise FedflatError(f"Testing the model failed: {_said(problem)}") from problem


def _said(problem: Exception) -> str:
    return f"{type(problem).__name__}: {next(iter(str(problem).strip().splitlines()), '')}"
