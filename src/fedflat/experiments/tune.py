"""A search for good settings with Optuna: every trial is an ordinary run, and the study is resumable."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..core.monitor import Monitor
from ..errors import FedflatError, MissingExtra, explained
from ..storage.files import replace_file
from ..training.callbacks import Callback
from ..training.record import RoundRecord
from ..training.train import Run
from .changes import changed, split_values
from .compare import monitor_of
from .files import make_experiment
from .parsing import parse_value
from .run import run_experiment

CHOSEN_ON_TEST = (
    "Settings are chosen by test accuracy, so the best accuracy is optimistic. Before you report a number, test "
    "these settings on data that the search has not seen."
)
"""What a person must know about the result; kept with the study."""

STARTUP = 5
"""Trials that run to their end before any is ended early."""


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


def tune(
    content: Mapping[str, Any],
    ranges: Mapping[str, Range],
    trials: int,
    out: Path,
    last: int = 10,
    seed: int = 0,
    source: str = "The experiment",
    on_trial: Callable[[int, float | str | None, Mapping[str, Any]], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Any], float]:
    """The best settings and their monitored metric, the mean of the last tests, after `trials` trials in all.

    What is made better is the metric on the test set (`CHOSEN_ON_TEST`). Trials that do badly early are ended early
    (median pruning). Called again, a study goes on; the trial that an interruption cut off is run again. `on_trial`
    is told a trial's number, its value ("failed", or None if it was ended early) and its settings. The result is
    kept in `best.json`, beside the study.
    """
    try:
        import optuna
    except ImportError:
        raise MissingExtra("optuna", "tune", "Tuning") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for end in (0, -1):
        make_experiment(changed(content, {key: range_.ends[end] for key, range_ in ranges.items()}), source)
    with explained(f"{out} cannot be written"):
        out.mkdir(parents=True, exist_ok=True)
    try:
        study = optuna.create_study(
            storage=f"sqlite:///{(out / 'study.db').resolve()}",
            study_name="fedflat",
            direction="maximize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP),
        )
        # a study that goes on must not draw again what it drew first
        study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
        study.set_user_attr("chosen on", "test set")
        study.set_user_attr("note", CHOSEN_ON_TEST)
    except Exception as problem:  # of the database, whose package is Optuna's choice
        raise FedflatError(f"{out / 'study.db'} cannot be used: {str(problem).splitlines()[0]}") from problem
    for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
        study.enqueue_trial(trial.params)
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)

    def objective(trial: Any) -> float:
        chosen = {key: _suggest(trial, key, range_) for key, range_ in ranges.items()}
        experiment = make_experiment(changed(content, {**chosen, "seed": seed}), source)
        place, pruning = out / f"trial-{trial.number}", Pruning(trial)
        try:
            run = run_experiment(
                experiment, place, callbacks=[pruning], resume=True, stop=stop, keep_states=False
            )
            if stop():
                raise KeyboardInterrupt
        except KeyboardInterrupt:  # it counts as failed then: these settings come again
            study.enqueue_trial(trial.params)
            raise
        if len(run.history) < (experiment.with_defaults().rounds or 1):
            raise optuna.TrialPruned
        late = pruning.values[-last:]
        return sum(late) / len(late)

    def told(study: Any, trial: Any) -> None:
        if on_trial is not None:
            ended = {optuna.trial.TrialState.FAIL: "failed", optuna.trial.TrialState.PRUNED: None}
            value = None if trial.value is None else monitor_of_study(out).sign * trial.value
            on_trial(trial.number, ended.get(trial.state, value), trial.params)

    finished = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    done = len(study.get_trials(states=finished))
    if done < trials:
        study.optimize(objective, n_trials=trials - done, callbacks=[told], catch=(FedflatError,))
    if not study.get_trials(states=(optuna.trial.TrialState.COMPLETE,)):
        raise FedflatError(f"No trial in {out} ran to its end; see its log, or widen the ranges.")
    best, monitor = study.best_trial, monitor_of_study(out)
    value = monitor.sign * study.best_value
    found = {
        "settings": best.params,
        monitor.name: value,
        "trial": best.number,
        "trials": len(study.get_trials(states=finished)),
        "chosen on": "test set",
        "note": CHOSEN_ON_TEST,
    }
    replace_file(out / "best.json", (json.dumps(found, indent=2) + "\n").encode())
    return dict(best.params), value


def monitor_of_study(out: Path) -> Monitor:
    """The metric that a study's runs are compared by."""
    return next((monitor_of(file.parent) for file in sorted(out.glob("trial-*/run.json"))), Monitor())


class Pruning(Callback):
    """Reports every test to a trial of Optuna, which ends runs that do badly early."""

    def __init__(self, trial: Any) -> None:
        self._trial = trial
        self.values: list[float] = []
        """of the monitored metric; negative where a smaller one is better, since studies maximise"""

    def begin(self, run: Run) -> None:
        self._monitor = run.monitor

    def round(self, record: RoundRecord) -> bool:
        value = self._monitor.of(vars(record))
        if value is not None:
            self.values.append(self._monitor.sign * value)
            self._trial.report(self.values[-1], record.index)
        return bool(self._trial.should_prune())


def _suggest(trial: Any, key: str, range_: Range) -> Any:
    if range_.choices:
        return trial.suggest_categorical(key, list(range_.choices))
    if isinstance(range_.low, int) and isinstance(range_.high, int):
        return trial.suggest_int(key, range_.low, range_.high, log=range_.log)
    return trial.suggest_float(key, range_.low, range_.high, log=range_.log)
