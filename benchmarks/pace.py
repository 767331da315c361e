"""Contenders that take one round when asked, so that all of them are measured in turn, under equal conditions."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

import fedflat as ff
from fedflat.core.allocator import keep_memory

Steps = Callable[[int], None]
"""Takes a number of steps."""


def say(text: str) -> None:
    """Show progress."""
    print(f"  {time.strftime('%H:%M:%S')}  {text}", flush=True)


class _Enough(Exception):
    """Ends a training."""


class Training:
    """A training with fedflat that waits after every round until it is told to continue.

    It runs in a thread of its own. Worker processes inherit the pipes of those that were started before: close
    trainings in reverse order, which `race` does.
    """

    def __init__(
        self, federation: ff.Federation, model: Any, method: str = "fedavg", **settings: Any
    ) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._ended = False
        self._problem: BaseException | None = None
        keep_memory()  # before there is a thread, as in a training without one
        arguments = {"federation": federation, "model": model, "method": method, "rounds": 10**9, **settings}
        self._thread = threading.Thread(target=self._run, kwargs=arguments, daemon=True)
        self._thread.start()

    def _run(self, **settings: Any) -> None:
        self._go.acquire()
        try:
            if not self._ended:
                ff.train(**settings, on_round=self._pause)
        except BaseException as problem:
            self._problem = problem
        self._done.release()

    def _pause(self, round: ff.RoundRecord) -> None:
        if round.rejected:
            raise RuntimeError(round.rejected[0])
        self._done.release()
        self._go.acquire()
        if self._ended:
            raise _Enough

    def round(self) -> float:
        """Take a round; its wall seconds. The first includes all preparations."""
        began = time.perf_counter()
        self._go.release()
        self._done.acquire()
        if self._problem is not None:
            raise self._problem
        return time.perf_counter() - began

    def close(self) -> None:
        """End the training and its processes."""
        self._ended = True
        self._go.release()
        self._thread.join()


class Processes:
    """Processes of one thread each that take the steps of a round between them."""

    def __init__(self, prepare: Callable[[], Steps], steps: int, count: int = 2) -> None:
        context = multiprocessing.get_context("fork")
        self._processes, self._pipes = [], []
        share = max(1, steps // count)
        self.steps = share * count
        """that are really taken"""
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(prepare, share, theirs), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)

    def round(self) -> float:
        """Take the steps of a round; its wall seconds."""
        began = time.perf_counter()
        for pipe in self._pipes:
            pipe.send(None)
        for pipe in self._pipes:
            pipe.recv()
        return time.perf_counter() - began

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
            process.join()


def _serve(prepare: Callable[[], Steps], steps: int, pipe: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    take = prepare()
    with contextlib.suppress(EOFError):
        while True:
            pipe.recv()
            take(steps)
            pipe.send(None)


def race(
    contenders: dict[str, Training | Processes], rounds: int, label: str, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of every round of every contender; they take turns, in the opposite order every other time."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    try:
        for number in range(warm_up + rounds):
            for name in names[:: 1 if number % 2 == 0 else -1]:
                taken = contenders[name].round()
                if number >= warm_up:
                    seconds[name].append(round(taken, 6))
            say(f"{label}: " + (f"{number - warm_up + 1} of {rounds}" if number >= warm_up else "warm"))
    finally:
        for name in reversed(names):
            contenders[name].close()
    return seconds


class Ratio(NamedTuple):
    """One contender's seconds over another's: the median and the quartiles of single rounds."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}–{self.high:.2f})"


def ratio(over: list[float], under: list[float]) -> Ratio:
    """Where both took turns, a round is compared with the one beside it; else with the median of all."""
    beside = under if len(over) == len(under) else [statistics.median(under)] * len(over)
    singles = [a / b for a, b in zip(over, beside, strict=True)]
    low, middle, high = (
        statistics.quantiles(singles, n=4, method="inclusive") if len(singles) > 1 else singles * 3
    )
    return Ratio(middle, low, high)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class Target(NamedTuple):
    """What the project asks for, what was measured, and whether that is enough."""

    wanted: str
    measured: str
    met: bool


@contextlib.contextmanager
def timed(kind: type, methods: Sequence[str], total: list[float]) -> Iterator[None]:
    """Within, the seconds that some methods of a class take are added to the only entry of a list."""
    originals = {name: getattr(kind, name) for name in methods}

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = original(*arguments)
            total[0] += time.perf_counter() - began
            return result

        return call

    try:
        for name, original in originals.items():
            setattr(kind, name, watched(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(kind, name, original)
