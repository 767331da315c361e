"""Runs as figures take them: experiments by name, each with one history per seed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..core.monitor import Monitor
from ..errors import FedflatError
from ..experiments.compare import compare, describe, find_runs, monitor_of
from ..methods.named import METHODS
from ..storage.client_reports import are_reported, with_client_reports
from ..storage.metrics_file import read_metrics

if TYPE_CHECKING:
    from ..training.train import Run

History = Sequence[Mapping[str, Any]]
"""One row per round, as `run.history` and `metrics.jsonl` have them."""
Place: TypeAlias = str | Path
Source: TypeAlias = "Place | Run | History"
Runs: TypeAlias = "Place | Sequence[Place] | Mapping[str, Source | Sequence[Source]]"
"""Run directories or directories that hold some; or what to draw by the name that it shall have, one or several
seeds of it: directories, histories, or what `train` returned."""


@dataclass(frozen=True)
class Trials:
    """The same experiment with different seeds."""

    name: str
    histories: list[History]
    places: list[Path]
    """the directories, of what was read from one"""

    monitor: Monitor = field(default_factory=Monitor)
    """the metric that they are compared by"""

    @property
    def by_clients(self) -> bool:
        """Whether accuracy and loss are what clients reported, where the server has no test set."""
        return any(map(are_reported, self.histories))


def gather(runs: Runs) -> list[Trials]:
    """What to draw, in the order given; of directories, runs that differ in their seed alone are one."""
    if isinstance(runs, Mapping):
        found = [_named(name, source) for name, source in runs.items()]
    else:
        several = runs if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
        groups = compare(find_runs([_place(one) for one in several]))
        found = [
            Trials(written(group.name), _read(group.counted), group.counted, group.monitor)
            for group in groups
        ]
    if not found:
        raise FedflatError("There is nothing to draw: give at least one run.")
    return found


def written(name: str) -> str:
    """A name with methods as their papers spell them: FedAvg, not fedavg."""
    return re.sub(r"[\w-]+", lambda word: _spellings().get(word[0].replace("-", "_"), word[0]), name)


@cache
def _spellings() -> dict[str, str]:
    return {name: make().name for name, make in METHODS.items()}


def by_place(runs: Runs) -> dict[str, Path]:
    """Every single directory by its name; the seed is part of it where there are several."""
    found: dict[str, Path] = {}
    for trials in gather(runs):
        for place in trials.places:
            many = len(trials.places) > 1
            found[f"{trials.name}, seed {describe(place).get('seed', '?')}" if many else trials.name] = place
    return found


def _named(name: str, source: Any) -> Trials:
    several = isinstance(source, Sequence) and not isinstance(source, str) and not _is_history(source)
    histories: list[History] = []
    places: list[Path] = []
    monitors: list[Monitor] = []
    for one in source if several else [source]:
        if isinstance(one, str | Path):
            places += find_runs([one])
            monitors += map(monitor_of, places)
        elif not _is_history(one) and not hasattr(one, "history"):
            raise _unnamed(one)
        else:
            histories.append(one if _is_history(one) else one.history)
            monitors += [] if _is_history(one) else [one.monitor]
    monitor = monitors[0] if monitors else Monitor()
    return Trials(name, [*map(with_client_reports, histories), *_read(places)], places, monitor)


def monitored_by_all(trials: Sequence[Trials]) -> Monitor:
    """The metric that all are compared by; an error where they differ in it."""
    found = list(dict.fromkeys(one.monitor for one in trials))
    if len(found) > 1:
        named = ", ".join(f"{one.name} by {one.monitor.name}" for one in trials)
        raise FedflatError(f"These runs are compared by different metrics: {named}. Draw them apart.")
    return found[0]


def _place(given: Any) -> Place:
    if not isinstance(given, str | Path):
        raise _unnamed(given)
    return given


def _unnamed(given: Any) -> FedflatError:
    return FedflatError(
        "Give what to draw by name, such as {'FedSAM': run}, or directories of runs, "
        f"not {type(given).__name__}."
    )


def _is_history(source: Any) -> bool:
    return isinstance(source, Sequence) and all(isinstance(row, Mapping) for row in source)


def _read(places: Sequence[Path]) -> list[History]:
    return [with_client_reports(read_metrics(place)) for place in places]
