"""A search for good settings: trials are ordinary runs, judged on validation samples, and the study is resumable."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..core.monitor import Monitor
from ..errors import FedflatError, explained, require
from ..storage.files import replace_file
from ..storage.metrics_file import read_metrics
from ..training.callbacks import Callback
from .changes import changed, split_values
from .compare import monitor_of
from .files import make_experiment
from .parsing import parse_value
from .run import is_done, run_experiment
from .sweep import STOPPED, Cell, run_cells

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

    from ..training.record import RoundRecord
    from ..training.train import Run
    from .schema import Experiment

VALIDATION = 0.1
"""The part of every client's training samples that trials are judged on, unless the experiment says another."""
TRIALS = 20
"""How many there are, unless something else is said; of a grid, all."""
CHOSEN_ON_VALIDATION = (
    "Settings are chosen on samples held out of the clients' training data; no trial has seen the test set."
)
"""What a person must know about the result; kept with the study."""


class Range(NamedTuple):
    """Where a setting is searched: between two numbers, or among some values."""

    low: float
    high: float
    log: bool
    choices: tuple[Any, ...] = ()

    @property
    def ends(self) -> tuple[Any, ...]:
        """The first value and the last, with which an experiment can be checked before anything runs."""
        return self.choices or (self.low, self.high)


def parse_range(text: str) -> Range:
    """`0.01:1`, `0.01:1:log`, or a list of values such as `1,5,10`."""
    if ":" not in text:
        choices = tuple(split_values(text))
        if len(choices) < 2:
            raise FedflatError(f"'{text}' leaves nothing to search: write 0.01:1:log or 1,5,10.")
        return Range(0, 0, False, choices)
    low, high, *rest = (parse_value(part) for part in text.split(":"))
    numbers = isinstance(low, int | float) and isinstance(high, int | float)
    if not numbers or low >= high or rest not in ([], ["log"]) or (rest and low <= 0):
        raise FedflatError(f"'{text}' is not a range: write 0.01:1, 0.01:1:log or 1,5,10.")
    return Range(low, high, bool(rest))


@dataclass(frozen=True)
class Found:
    """What a search has found."""

    settings: dict[str, Any]
    validation: float
    """the monitored metric on the validation part, the mean of the last tests"""
    test: float | None
    """the metric on the test set of the chosen settings, trained on all training samples; None without a test set"""
    trial: int
    trials: int
    monitor: str = "accuracy"
    """the name of the metric"""
    chosen_on: str = "validation"
    note: str = CHOSEN_ON_VALIDATION


class TuningWatcher(Protocol):
    """Whom a search tells about its progress."""

    def round(self, run: str, done: int, of: int, value: float | None) -> None:
        """A trial, or the chosen run, has done this many of its rounds; the last one's value, where it was tested."""

    def finished(self, trial: int, value: float | str | None, settings: Mapping[str, Any]) -> None:
        """A trial has ended: with a value, "failed", or None if it was ended early."""


def tune(
    content: Mapping[str, Any],
    ranges: Mapping[str, Range],
    trials: int | None,
    out: Path,
    last: int = 10,
    seed: int = 0,
    source: str = "The experiment",
    watcher: TuningWatcher | None = None,
    stop: Callable[[], bool] = lambda: False,
    jobs: int = 1,
) -> Found:
    """The best settings after `trials` trials in all, by the monitored metric on the validation part.

    What counts is the mean of its last tests; whether larger is better comes from the metric. Trials that do badly
    early are ended early (median pruning). Where all ranges are lists of values, trials are the combinations of the
    grid, each once. Called again, a study is resumed, with the trials that an interruption cut
    off. With one job it is the study that it would have been; several finish in an order that nobody knows before.
    At the end the best settings are trained once more on all training samples, in a run of their own, which is tested
    once on the test set. The result is kept in `best.json`, beside the study.
    """
    require("optuna", "optuna", "tune", "Tuning")
    watcher = watcher or _Nobody()
    content = changed(content, {"seed": seed})
    held_out = {"test": False, "validation": content.get("validation") or VALIDATION}
    for end in (0, -1):
        make_experiment(changed(content, {key: range_.ends[end] for key, range_ in ranges.items()}), source)
    with explained(f"{out} cannot be written"):
        out.mkdir(parents=True, exist_ok=True)

    from .study import COMPLETE, grid_of, open_study, trials_left

    said = {"chosen on": "validation", "note": CHOSEN_ON_VALIDATION, "experiment": json.dumps(content)}
    study = open_study(out, ranges, seed, said)
    combinations = len(grid_of(ranges))
    wanted = min(trials or combinations, combinations) if combinations else trials or TRIALS
    search = _Search(study, last, watcher)

    def cells() -> Iterator[Cell]:
        for trial in trials_left(study, ranges, wanted):
            experiment = make_experiment(changed(content, {**trial.params, **held_out}), source)
            yield search.begin(trial, experiment, out)

    if jobs > 1:
        run_cells(cells(), jobs, search, stop)
    else:
        for cell in cells():
            _run_here(cell, search, stop)
            if stop():
                break
    if stop():
        raise KeyboardInterrupt
    if not study.get_trials(states=(COMPLETE,)):
        raise FedflatError(f"No trial in {out} ran to its end; see its log, or widen the ranges.")
    best, monitor = study.best_trial, monitor_of_study(out)
    experiment = make_experiment(changed(content, best.params), source)
    test = _test_once(experiment, out / f"chosen-{best.number}", watcher, stop)
    value = monitor.sign * study.best_value
    found = Found(dict(best.params), value, test, best.number, len(study.trials), monitor.name)
    replace_file(out / "best.json", (json.dumps(asdict(found), indent=2) + "\n").encode())
    return found


def monitor_of_study(out: Path) -> Monitor:
    """The metric that a study's runs are compared by."""
    return next((monitor_of(file.parent) for file in sorted(out.glob("trial-*/run.json"))), Monitor())


def _test_once(
    experiment: Experiment, place: Path, watcher: TuningWatcher, stop: Callable[[], bool]
) -> float | None:
    """Train the chosen settings on all training samples, and test the last round's model on the test set."""
    rounds = experiment.with_defaults().rounds or 1
    experiment = experiment.model_copy(update={"validation": None, "eval_every": rounds})
    if not is_done(place, rounds):

        def tell(record: RoundRecord) -> None:
            watcher.round(place.name, record.index + 1, rounds, monitor_of(place).of(record.row()))

        run = run_experiment(experiment, place, resume=True, stop=stop, keep_states=False, on_round=tell)
        if len(run.history) < rounds:
            raise KeyboardInterrupt
    return monitor_of(place).of(read_metrics(place)[-1])


class _Nobody:
    """Hears nothing."""

    def round(self, *news: object) -> None:
        """Nothing."""

    def finished(self, *news: object) -> None:
        """Nothing."""


class _Search:
    """Between runs and the study: reports tests, ends what does badly early, and writes down what came of trials.

    Studies maximise: where a smaller value is better, they have its negative.
    """

    def __init__(self, study: Study, last: int, watcher: TuningWatcher) -> None:
        self._study, self._last, self._watcher = study, last, watcher
        self._trials: dict[str, Trial] = {}
        self._reported: dict[str, set[int]] = {}
        self._pruned: set[str] = set()

    def begin(self, trial: Trial, experiment: Experiment, out: Path) -> Cell:
        """The run of a trial."""
        cell = Cell(f"trial-{trial.number}", experiment, out / f"trial-{trial.number}")
        known = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        self._trials[cell.name], self._reported[cell.name] = trial, set(known)
        return cell

    def round(self, cell: Cell, done: int, value: float | None) -> bool:
        """Report a test; whether the run is to end there."""
        if cell.name in self._pruned:
            return True
        self._watcher.round(cell.name, done, cell.experiment.with_defaults().rounds or 1, value)
        trial, reported = self._trials[cell.name], self._reported[cell.name]
        if value is not None and done - 1 not in reported:
            trial.report(monitor_of(cell.out).sign * value, done - 1)
            reported.add(done - 1)
        if trial.should_prune():
            self._pruned.add(cell.name)
        return cell.name in self._pruned

    def finished(self, cell: Cell, problem: str | None) -> None:
        """Write down what came of a trial; one that was interrupted is left as it is."""
        from .study import COMPLETE, FAIL, PRUNED

        trial, pruned = self._trials[cell.name], cell.name in self._pruned
        value: float | str | None = None
        if pruned:
            self._study.tell(trial, state=PRUNED)
        elif problem == STOPPED:
            return
        else:
            monitor = monitor_of(cell.out)
            tests = [] if problem else [monitor.judged(row) for row in read_metrics(cell.out)]
            late = [test for test in tests if test is not None][-self._last :]
            if late:
                value = sum(late) / len(late)
                self._study.tell(trial, monitor.sign * value, COMPLETE)
            else:
                value = "failed"
                self._study.tell(trial, state=FAIL)
        self._watcher.finished(trial.number, value, trial.params)


class _Reporting(Callback):
    """Tells a search of every round of a run in this process."""

    def __init__(self, search: _Search, cell: Cell) -> None:
        self._search, self._cell = search, cell

    def begin(self, run: Run) -> None:
        self._monitor = run.monitor
        # an interruption may have come between a round and its report, or between a report and what follows from it
        for row in run.history:
            if self._search.round(self._cell, row["index"] + 1, self._monitor.judged(row)):
                raise _Ended

    def round(self, record: RoundRecord) -> bool:
        return self._search.round(self._cell, record.index + 1, self._monitor.judged(record.row()))


class _Ended(Exception):
    """A trial has nothing left to do."""


def _run_here(cell: Cell, search: _Search, stop: Callable[[], bool]) -> None:
    """Run a trial in this process."""
    rounds, problem = cell.experiment.with_defaults().rounds or 1, None
    try:
        if not is_done(cell.out, rounds):
            run = run_experiment(
                cell.experiment,
                cell.out,
                callbacks=[_Reporting(search, cell)],
                resume=True,
                stop=stop,
                keep_states=False,
            )
            problem = STOPPED if len(run.history) < rounds else None
    except _Ended:
        problem = STOPPED
    except FedflatError as said:
        problem = str(said)
    search.finished(cell, problem)
