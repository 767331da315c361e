"""A grid of experiments, several at a time: methods, values of settings, seeds. What is done is skipped."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..engines.workers.parent import end_with_parent
from ..errors import FedflatError
from ..storage.run_files import difference
from ..training.settings import TrainingSettings
from .changes import changed, unchanged
from .files import make_experiment
from .problems import Lines
from .schema import Experiment

if TYPE_CHECKING:
    from ..training.record import RoundRecord

POLL = 0.2
"""Seconds between looks at whether to stop."""
HOW = {"rounds", "engine", "ray", "trackers", "data", "download", *TrainingSettings.HOW}
"""What may differ between two runs of the same numbers."""
DIED = "its process died; the system may have run out of memory. Repeat the command to resume."
STOPPED = "stopped"


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    name: str
    experiment: Experiment
    out: Path
    notes: tuple[str, ...] = ()
    """how it differs from a paper's, to keep with it"""


def grid(
    content: Mapping[str, Any],
    out: str | Path,
    methods: Sequence[Any] = (),
    settings: Mapping[str, Sequence[Any]] | None = None,
    seeds: Sequence[int] = (0,),
    source: str = "The experiment",
    lines: Lines | None = None,
) -> list[Cell]:
    """Every combination, each in a directory named after what makes it differ."""
    settings = settings or {}
    cells: dict[str, Cell] = {}
    values = list(settings.values())
    lines = unchanged(lines or {}, [*settings, *(["method"] if methods else [])])
    for method in methods or [None]:
        for combination in itertools.product(*values):
            chosen = dict(zip(settings, combination, strict=True))
            start = dict(content) if method is None else {**content, "method": method}
            varied = {key: value for key, value in chosen.items() if len(settings[key]) > 1}
            parts = [slug(str(method))] if method is not None else []
            parts += [slug(f"{key.split('.')[-1]}={value}") for key, value in varied.items()]
            for seed in seeds:
                experiment = make_experiment(changed(start, {**chosen, "seed": seed}), source, lines)
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

    def round(self, cell: Cell, done: int, value: float | None) -> bool | None:
        """Show how many rounds a run has done, and what it is judged by, where it was tested; True ends it there."""

    def finished(self, cell: Cell, problem: str | None) -> None:
        """A run has ended: well, or with a sentence that says why not."""


def run_cells(
    cells: Iterable[Cell],
    jobs: int,
    watcher: Watcher,
    stop: Callable[[], bool] = lambda: False,
    keep_states: bool = False,
) -> dict[str, str]:
    """Run what is not done yet, `jobs` at a time, each cell taken when it can begin; sentences for those that failed.

    What only resuming a run needs is removed when it is done, unless `keep_states`: all clients' states of all
    runs fill disks. A run that takes its process down fails alone. With several jobs each runs its clients in its own
    process, unless the experiment names an engine.
    """
    waiting, left, stopping, failed = iter(cells), True, False, dict[str, str]()
    busy: list[_Runner] = []
    idle: list[_Runner] = []

    def ended(cell: Cell, problem: str | None) -> None:
        if problem is not None and problem != STOPPED:
            failed[cell.name] = problem
        watcher.finished(cell, problem)

    try:
        while busy or left:
            while left and len(busy) < jobs:
                cell = next(waiting, None)
                if cell is None:
                    left = False
                    break
                done, problem = _look(cell)
                if done:
                    watcher.round(cell, cell.experiment.with_defaults().rounds or 1, None)
                if done or problem is not None:
                    ended(cell, problem)
                    continue
                busy.append(idle.pop() if idle else _Runner(jobs > 1, keep_states))
                busy[-1].run(cell)
            ready = wait([runner.pipe for runner in busy], POLL)
            for runner in [runner for runner in busy if runner.pipe in ready]:
                try:
                    kind, *news = runner.pipe.recv()
                except (EOFError, OSError):
                    kind, news = "died", [DIED]
                if kind == "round":
                    if watcher.round(runner.cell, *news):
                        runner.tell(STOPPED)
                    continue
                busy.remove(runner)
                if kind == "ended":
                    idle.append(runner)
                ended(runner.cell, *news)
            if not stopping and stop():
                stopping, left = True, False
                for runner in busy:
                    runner.tell(None)
    except BaseException:
        for runner in busy:
            runner.process.kill()
        raise
    finally:
        for runner in (*busy, *idle):
            runner.pipe.close()  # an idle one ends when its pipe does
            runner.process.join()
    return failed


class _Runner:
    """A process that does one run after the other."""

    def __init__(self, alone: bool, keep_states: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.cell: Cell
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, alone, keep_states))
        with _deaf():
            self.process.start()
        theirs.close()

    def run(self, cell: Cell) -> None:
        """Begin with a run."""
        self.cell = cell
        self.tell(cell)

    def tell(self, message: Cell | str | None) -> None:
        """What to do next; a word is to end this run, None to end with it.

        If the process has died, that shows when its answer is read.
        """
        with contextlib.suppress(OSError):
            self.pipe.send(message)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started do not hear Ctrl-C: this one decides what it means."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _look(cell: Cell) -> tuple[bool, str | None]:
    """Whether a run is done already; a sentence if what is there is another run."""
    from .run import experiment_of, is_done

    try:
        if not is_done(cell.out, cell.experiment.with_defaults().rounds):
            return False, None
        was, now = (
            e.with_defaults().model_dump(exclude=HOW) for e in (experiment_of(cell.out), cell.experiment)
        )
    except FedflatError as problem:
        return False, str(problem)
    found = difference(was, now)
    if found is None:
        return True, None
    return False, f"{cell.out} holds a run with {found}. Remove it, or choose another directory with --out."


# -- in the process --------------------------------------------------------------------------------


def _serve(pipe: Connection, alone: bool, keep_states: bool) -> None:
    """Do runs until there is nothing left to do, or the parent has gone."""
    end_with_parent()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with contextlib.suppress(EOFError, OSError):
        while (cell := pipe.recv()) is not None:
            if isinstance(cell, str):  # the end of a run that has ended
                continue
            pipe.send(("ended", _run_cell(cell, pipe, alone, keep_states)))


def _run_cell(cell: Cell, pipe: Connection, alone: bool, keep_states: bool) -> str | None:
    """One run, from its last checkpoint if it has one; a sentence if it fails."""
    from .compare import monitor_of
    from .run import run_experiment

    def report(round: RoundRecord) -> None:
        with contextlib.suppress(OSError):  # the parent has gone: then it stops after this round
            pipe.send(("round", round.index + 1, monitor_of(cell.out).judged(round.row())))

    experiment = cell.experiment.with_defaults()
    if alone and experiment.engine is None:
        experiment = experiment.model_copy(update={"engine": "inprocess"})
    try:
        run = run_experiment(
            experiment,
            cell.out,
            resume=True,
            on_round=report,
            stop=pipe.poll,
            keep_states=keep_states,
            overlap=True,
            notes=cell.notes,
        )
    except FedflatError as problem:
        return str(problem)
    except Exception as problem:  # a defect in one run must not end the others
        return f"{type(problem).__name__}: {problem}"
    return STOPPED if len(run.history) < (experiment.rounds or 1) else None
