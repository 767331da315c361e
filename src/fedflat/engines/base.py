"""Where clients run. An engine takes a round's clients and yields their uploads in client order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ..client.optimisers import LocalOptimiser
from ..client.round import ClientRound
from ..core.evaluation import evaluate
from ..core.flat import FlatModel
from ..core.messages import Download, Missing, Upload
from ..core.metrics import LossFunction, Metrics, Score
from ..data.federation import Federation
from ..errors import FedflatError, nearest
from ..methods.method import Method

MOST_DIGITS = 5
"""Of a number of workers."""


@dataclass(frozen=True)
class Job:
    """What stays the same in every round."""

    federation: Federation
    model: FlatModel
    method: Method
    local: LocalOptimiser
    loss: LossFunction
    seed: int
    buffers: str
    measured: bool = False
    """whether measures look at the local updates, so that uploads must have them as they were trained"""
    oracle: str = "auto"
    """how gradients are computed: the fastest exact way for the model, or always by `"autograd"`"""
    metrics: Metrics = field(default_factory=Metrics)
    """what a test measures"""

    @property
    def each(self) -> frozenset[str]:
        """Names of the vectors of which every client receives its own."""
        return frozenset(name for contract in self.method.contracts for name in contract.each)

    def client_round(self, model: FlatModel) -> ClientRound:
        """What runs clients' rounds on a model, which may be a copy of the job's."""
        return ClientRound(
            model,
            self.method,
            self.local,
            self.loss,
            self.seed,
            self.buffers,
            self.measured,
            self.oracle,
        )

    def evaluate(self, w: Tensor, buffers: Tensor | None) -> Finished:
        """Evaluate a model on the federation's test set, in this process."""
        assert self.federation.test is not None
        self.model.write_buffers(buffers)
        return Finished(evaluate(self.model, w, self.federation.test, self.loss, self.metrics))


class Future(Protocol):
    """A score that may still be computed."""

    def done(self) -> bool:
        """Whether it is there."""

    def result(self) -> Score:
        """Wait for it."""


@dataclass(frozen=True)
class Finished:
    """A score that is there."""

    score: Score

    def done(self) -> bool:
        """Whether it is there."""
        return True

    def result(self) -> Score:
        """The score."""
        return self.score


class Engine(Protocol):
    """Runs clients' rounds somewhere."""

    def open(self, job: Job) -> None:
        """Prepare; called once, before the first round."""

    def uploads(
        self,
        clients: Sequence[int],
        download: Callable[[int], Download],
        state: Callable[[int], dict[str, Tensor]],
    ) -> Iterator[Upload | Missing]:
        """Run the clients and yield their uploads in the order of `clients`, one by one.

        In the place of a client that the engine gave up waiting for, `Missing` says why.
        """

    def evaluate(self, w: Tensor, buffers: Tensor | None) -> Future:
        """Begin to evaluate a model on the federation's test set; the vectors may change as soon as this returns.

        An engine may do so while it runs the next round's clients. The result is waited for before the next test.
        """

    def close(self) -> None:
        """Let go of what `open` took."""


_busy: set[int] = set()
"""The engines that run a training now."""
_taking = threading.Lock()


@contextmanager
def taken(engine: Engine) -> Iterator[None]:
    """Have an engine for one training alone: it holds one job, one model and one set of processes."""
    with _taking:
        if id(engine) in _busy:
            name = type(engine).__name__
            raise FedflatError(
                f"This {name} object runs another training already. Give each its own: {name}(...), or "
                f"engine='{name.lower()}'."
            )
        _busy.add(id(engine))
    try:
        yield
    finally:
        with _taking:
            _busy.discard(id(engine))


def make_engine(engine: str | Engine) -> Engine:
    """An engine from its name, such as `inprocess`, `workers`, `workers:3` or `ray`."""
    if not isinstance(engine, str):
        return engine
    from .inprocess import InProcess
    from .ray.engine import Ray
    from .workers.engine import Workers

    known: dict[str, type[Engine]] = {"inprocess": InProcess, "workers": Workers, "ray": Ray}
    name, colon, count = engine.partition(":")
    if name not in known:
        raise FedflatError(f"There is no engine '{name}'.{nearest(name, known)}")
    if not colon:
        return known[name]()
    if name == "inprocess" or not count.isdecimal() or len(count) > MOST_DIGITS or int(count) < 1:
        raise FedflatError(
            f"engine '{engine}' is not possible: write inprocess, workers or workers:3, ray or ray:3."
        )
    return Workers(int(count)) if name == "workers" else Ray(actors=int(count))
