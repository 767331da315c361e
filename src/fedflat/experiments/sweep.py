"""A grid of experiments, several at a time: methods, values of settings, seeds. What is done is skipped."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import FedflatError
from .experiment import Experiment
from .reading import changed, make_experiment

POLL = 0.2
"""Seconds between looks at what the processes report."""


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    name: str
    experiment: Experiment
    out: Path


def grid(
    content: Mapping[str, Any],
    out: str | Path,
    methods: Sequence[Any] = (),
    settings: Mapping[str, Sequence[Any]] | None = None,
    seeds: Sequence[int] = (0,),
    source: str = "The experiment",
) -> list[Cell]:
    """Every combination, each in a directory named after what makes it differ."""
    settings = settings or {}
    cells: dict[str, Cell] = {}
    values = list(settings.values())
    for method in methods or [None]:
        for combination in itertools.product(*values):
            chosen = dict(zip(settings, combination, strict=True))
            start = dict(content) if method is None else {**content, "method": method}
            varied = {key: value for key, value in chosen.items() if len(settings[key]) > 1}
            parts = [slug(str(method))] if method is not None else []
            parts += [slug(f"{key.split('.')[-1]}={value}") for key, value in varied.items()]
            for seed in seeds:
                experiment = make_experiment(changed(start, {**chosen, "seed": seed}), source)
                name = "/".join([*parts, f"seed-{seed}"])
                if name in cells:
                    raise FedflatError(f"The sweep has two runs called {name}; give every value once.")
                cells[name] = Cell(name, experiment, Path(out) / name)
    return list(cells.values())


def slug(text: str) -> str:
    """A text as the name of a directory."""
    return "".join(c if c.isalnum() or c in "-.=" else "_" for c in text.lower()).strip("_")


class Watcher(Protocol):
    """Whom a sweep tells about its progress."""

    def round(self, cell: Cell, done: int, accuracy: float | None) -> None:
        """A run has done so many rounds."""

    def finished(self, cell: Cell, problem: str | None) -> None:
        """A run has ended: well, or with a sentence that says why not."""


def run_cells(
    cells: Sequence[Cell],
    jobs: int,
    watcher: Watcher,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, str]:
    """Run what is not done yet, `jobs` at a time, each in a process of its own; sentences for those that failed.

    With several jobs each runs its clients in its own process, unless the experiment names an engine.
    """
    by_name = {cell.name: cell for cell in cells}
    context = multiprocessing.get_context("spawn")
    news: Any = context.Manager().Queue()
    stopping = context.Event()
    failed: dict[str, str] = {}
    with ProcessPoolExecutor(jobs, context, _prepare, (stopping,)) as pool:
        waiting: dict[Future[str | None], Cell] = {
            pool.submit(_run_cell, cell, news, jobs > 1): cell for cell in cells
        }
        while waiting:
            ended, _ = wait(waiting, timeout=POLL, return_when=FIRST_COMPLETED)
            while not news.empty():
                name, done, accuracy = news.get()
                watcher.round(by_name[name], done, accuracy)
            for future in ended:
                cell = waiting.pop(future)
                try:
                    problem = future.result()
                except BrokenProcessPool:
                    problem = "its process died; the system may have run out of memory. Sweep again to go on."
                if problem is not None:
                    failed[cell.name] = problem
                watcher.finished(cell, problem)
            if stop() and not stopping.is_set():
                stopping.set()
                for future in list(waiting):
                    if future.cancel():
                        del waiting[future]
    return failed


_stopping: Any = None


def _prepare(stopping: Any) -> None:
    """In every process of a sweep: the parent decides what an interruption means, and one thread each."""
    global _stopping
    _stopping = stopping
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _orphaned() -> bool:
    """Whether the process that runs the sweep is gone."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


def _run_cell(cell: Cell, news: Any, alone: bool) -> str | None:
    """One run, from its last checkpoint if it has one; a sentence if it fails."""
    from .running import is_done, run_experiment

    experiment = cell.experiment.filled()
    if alone and experiment.engine is None:
        experiment = experiment.model_copy(update={"engine": "inprocess"})
    rounds = experiment.rounds or 1
    try:
        if _orphaned():
            return "the sweep was killed."
        if is_done(cell.out, rounds):
            news.put((cell.name, rounds, None))
            return None
        run_experiment(
            experiment,
            cell.out,
            resume=True,
            on_round=lambda r: news.put((cell.name, r.index + 1, r.accuracy)),
            stop=lambda: _stopping.is_set() or _orphaned(),
        )
    except FedflatError as problem:
        return str(problem)
    except (EOFError, ConnectionError):  # nobody listens any longer
        return "the sweep was killed."
    except Exception as problem:  # a defect in one run must not end the others
        return f"{type(problem).__name__}: {problem}"
    return None
