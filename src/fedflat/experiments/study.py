"""The study of a search, in Optuna's words: one database, which an interruption leaves as it was."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, Trial, TrialState

from ..core.randomness import key
from ..errors import FedflatError

STARTUP = 5
"""Trials that run to their end before any is ended early."""
COMPLETE, PRUNED, FAIL = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL


class Keyed(optuna.samplers.BaseSampler):
    """Draws every value from `(seed, trial, name)` and the trials before it, also in a resumed study.

    By tree-structured Parzen estimators; of a grid, trial k is its k-th combination.
    """

    def __init__(self, seed: int, grid: Sequence[Mapping[str, Any]]) -> None:
        self._seed, self._grid = seed, grid

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        if self._grid:
            return self._grid[trial.number][param_name]
        seed = key(self._seed, f"tune {param_name}", trial.number) % 2**32
        sampler = optuna.samplers.TPESampler(seed=seed)
        return sampler.sample_independent(study, trial, param_name, param_distribution)


def open_study(
    out: Path, ranges: Mapping[str, Any], seed: int, attributes: Mapping[str, str]
) -> optuna.Study:
    """The study that a directory holds, or a new one."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(
            storage=_storage(out),
            study_name="fedflat",
            direction="maximize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP),
            sampler=Keyed(seed, grid_of(ranges)),
        )
        searched = {name for trial in study.trials for name in trial.distributions}
        other = study.user_attrs.get("experiment", attributes["experiment"]) != attributes["experiment"]
        if not other:
            for name, value in attributes.items():
                study.set_user_attr(name, value)
    except Exception as problem:  # of the database, whose package is Optuna's choice
        raise FedflatError(f"{out / 'study.db'} cannot be used: {str(problem).splitlines()[0]}") from problem
    if searched - set(ranges):
        raise FedflatError(
            f"{out} holds a search for {', '.join(sorted(searched))}. Search for these, or choose another directory "
            "with --out."
        )
    if other:
        raise FedflatError(
            f"{out} holds a search with another experiment or seed. Choose another directory with --out."
        )
    return study


def read_study(out: Path) -> list[FrozenTrial]:
    """The trials of the study that a directory holds."""
    file = out / "study.db"
    if not file.exists():
        raise FedflatError(f"There is no study in {out}: `fedflat tune` makes one.")
    try:
        return optuna.load_study(study_name="fedflat", storage=_storage(out)).trials
    except Exception as problem:  # of the database, whose package is Optuna's choice
        raise FedflatError(f"{file} cannot be read: {str(problem).splitlines()[0]}") from problem


def _storage(out: Path) -> str:
    return f"sqlite:///{(out / 'study.db').resolve()}"


def grid_of(ranges: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination, where all ranges are lists of values; else none."""
    if not all(range_.choices for range_ in ranges.values()):
        return []
    combinations = itertools.product(*(range_.choices for range_ in ranges.values()))
    return [dict(zip(ranges, one, strict=True)) for one in combinations]


def trials_left(study: optuna.Study, ranges: Mapping[str, Any], trials: int) -> Iterator[Trial]:
    """The trials that an interruption cut off, then new ones, until there are `trials` in all."""
    distributions = {name: _distribution(range_) for name, range_ in ranges.items()}
    for begun in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        trial = Trial(study, begun._trial_id)
        for name, distribution in distributions.items():
            trial._suggest(name, distribution)  # what was drawn already is not drawn again
        yield trial
    while len(study.get_trials(deepcopy=False)) < trials:
        yield study.ask(distributions)


def _distribution(range_: Any) -> BaseDistribution:
    if range_.choices:
        return CategoricalDistribution(range_.choices)
    if isinstance(range_.low, int) and isinstance(range_.high, int):
        return IntDistribution(range_.low, range_.high, log=range_.log)
    return FloatDistribution(range_.low, range_.high, log=range_.log)
