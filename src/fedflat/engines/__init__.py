"""Where clients run. An engine takes a round's clients and yields their uploads in client order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..data.federation import Federation
from ..errors import FedflatError, nearest
from ..evaluation import LossFunction, Score
from ..flat import FlatModel
from ..local_sgd import LocalSGD
from ..messages import Download, Missing, Upload
from ..method import Method


@dataclass(frozen=True)
class Job:
    """What stays the same in every round."""

    federation: Federation
    model: FlatModel
    method: Method
    sgd: LocalSGD
    loss: LossFunction
    seed: int
    buffers: str


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

    def evaluate(self, w: Tensor, buffers: Tensor | None) -> Score:
        """Evaluate a model on the federation's test set."""

    def close(self) -> None:
        """Let go of what `open` took."""


@runtime_checkable
class TestsMeanwhile(Protocol):
    """An engine that can test a model while it runs clients."""

    def evaluate_meanwhile(self, w: Tensor, buffers: Tensor | None) -> Callable[[], Score]:
        """Begin to evaluate a model, which may change at once; what is returned waits for the score."""


def make_engine(engine: str | Engine) -> Engine:
    """An engine from its name, such as `inprocess`, `workers`, `workers:3` or `ray`."""
    if not isinstance(engine, str):
        return engine
    from .inprocess import InProcess
    from .ray import Ray
    from .workers import Workers

    known: dict[str, type[Engine]] = {"inprocess": InProcess, "workers": Workers, "ray": Ray}
    name, colon, count = engine.partition(":")
    if name not in known:
        raise FedflatError(f"There is no engine '{name}'.{nearest(name, known)}")
    if not colon:
        return known[name]()
    if name == "inprocess" or not count.isdecimal() or int(count) < 1:
        raise FedflatError(
            f"engine '{engine}' is not possible: write inprocess, workers or workers:3, ray or ray:3."
        )
    return Workers(int(count)) if name == "workers" else Ray(actors=int(count))
