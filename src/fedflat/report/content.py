"""All that the page shows, as plain values: runs, groups of seeds, splits, papers' numbers, and what is missing."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.monitor import Monitor
from ..data.on_nodes import what_is_known
from ..errors import FedflatError, shortened
from ..experiments.by_client import client_accuracies, spread, worst_clients
from ..experiments.compare import Group, Mean, compare
from .commands import how_to_repeat
from .measured import landscape_of, measure_run
from .published import beside_published
from .reading import RunFiles, fingerprint, look_for_runs, read_run
from .series import columns, rounded, rounded_all
from .splits import Splits

FORMAT = 1
"""Of what the page reads."""
TOTALS = ("bytes_down", "bytes_up", "forward", "backward", "seconds")
Left = dict[str, str]
"""Runs that are left out, and why."""


class Content:
    """Runs under some places, read again only where they have changed."""

    def __init__(
        self,
        places: Sequence[str | Path],
        last: int = 10,
        target: float | None = None,
        splits: bool = True,
    ) -> None:
        self._places, self._last, self._target = places, last, target
        self._splits = Splits() if splits else None
        self._read: dict[Path, tuple[Any, RunFiles | FedflatError]] = {}
        self._made: dict[Path, tuple[RunFiles, tuple[dict[str, Any], dict[str, Any]]]] = {}
        self._page: dict[str, Any] = {}
        self._as_of: Any = None

    def page(self) -> dict[str, Any]:
        """What the page shows now."""
        paths = look_for_runs(self._places)
        as_of = [(path, fingerprint(path)) for path in paths]
        if as_of != self._as_of:
            self._page, self._as_of = self._make(paths), as_of
        return self._page

    def _make(self, paths: Sequence[Path]) -> dict[str, Any]:
        from .. import __version__

        runs: list[RunFiles] = []
        left: Left = {}
        for path in paths:
            found = self._run(path)
            if isinstance(found, RunFiles):
                runs.append(found)
            else:
                left[str(path)] = str(found)
        grouped = _groups(runs, self._last, self._target)
        return {
            "format": FORMAT,
            "version": __version__,
            "made": time.strftime("%Y-%m-%d %H:%M"),
            "last": self._last,
            "monitor": _monitor(grouped),
            "target": self._target,
            "left": [{"path": path, "why": why} for path, why in left.items()],
            "runs": [self._shown(run, grouped) for run in runs],
            "groups": [_group_shown(group) for group in grouped.values()],
            "published": _published(runs, grouped),
            "splits": [] if self._splits is None else self._splits.shown(),
        }

    def _run(self, path: Path) -> RunFiles | FedflatError:
        now = fingerprint(path)
        if self._read.get(path, (None,))[0] != now:
            self._read[path] = (now, self._sound(path))
        return self._read[path][1]

    def _sound(self, path: Path) -> RunFiles | FedflatError:
        """A run, if a page of it alone can be made: what is odd about one must not spoil the page of the others."""
        try:
            run = read_run(path)
            grouped = _groups([run], self._last, self._target)
            made = [self._shown(run, grouped), _published([run], grouped)]
            json.dumps(made, ensure_ascii=False, allow_nan=False).encode()
        except FedflatError as problem:
            return problem
        except Exception as problem:
            why = f"{type(problem).__name__}: {problem}"
            return FedflatError(f"{path} cannot be shown ({shortened(why)}); was it edited?")
        return run

    def _measured(self, run: RunFiles) -> tuple[dict[str, Any], dict[str, Any]]:
        """Flatness and landscape, made once for what is on disk: both may add a note."""
        if self._made.get(run.path, (None,))[0] is not run:
            self._made[run.path] = (run, (measure_run(run), landscape_of(run)))
        return self._made[run.path][1]

    def _shown(self, run: RunFiles, grouped: Mapping[str, Group]) -> dict[str, Any]:
        group = next((key for key, found in grouped.items() if run.path in found.runs), str(run.path))
        alone = _summary(compare([run.path], self._last, self._target)[0]) if group in grouped else {}
        seed = (run.described or {}).get("seed")
        measured = self._measured(run)
        return {
            "id": str(run.path),
            "group": group,
            "name": grouped[group].name if group in grouped else str(run.path),
            "method": str(run.settings.get("method") or (run.described or {}).get("method") or "unknown"),
            "seed": seed if isinstance(seed, int) else None,
            "rounds": run.rounds,
            "done": len(run.rows),
            "finished": run.finished,
            "tested_by_clients": run.by_clients,
            "monitor": Monitor.of_run(run.settings).to_dict(),
            "on_nodes": run.on_nodes,
            "notes": [*run.notes, *_worst(run)],
            "caveats": run.caveats,
            "summary": {**alone, **_totals(run.rows), **_ends(run.rows)},
            **columns(run.rows),
            "config": {key: _text(value) for key, value in (run.described or {}).items()},
            "flatness": measured[0],
            "landscape": measured[1],
            "split": None if self._splits is None else self._split(self._splits, run),
            "repeat": how_to_repeat(run),
        }

    def _split(self, splits: Splits, run: RunFiles) -> str | None:
        return (
            splits.elsewhere(what_is_known(run.settings, run.rows))
            if run.on_nodes
            else splits.of(run.experiment)
        )


def _groups(runs: Sequence[RunFiles], last: int, target: float | None) -> dict[str, Group]:
    """Runs that differ in their seed alone, by a name for each group; those that nothing describes are in none."""
    paths = [run.path for run in runs if run.described is not None and _comparable(run)]
    groups = compare(paths, last, target) if paths else []
    return {f"{number}: {group.name}": group for number, group in enumerate(groups)}


def _monitor(grouped: Mapping[str, Group]) -> dict[str, Any]:
    """The metric that runs are compared by; without a name of its own where they differ in it."""
    found = list(dict.fromkeys(group.monitor for group in grouped.values())) or [Monitor()]
    one = found[0] if len(found) == 1 else Monitor("monitored metric", True, False)
    key = one.name if one.name in ("accuracy", "loss") else f"metrics.{one.name}"
    return {**one.to_dict(), "title": one.title, "key": key}


def _comparable(run: RunFiles) -> bool:
    """Whether the metrics on disk are those that were found sound: some rounds, or an empty file."""
    file = run.path / "metrics.jsonl"
    return bool(run.rows) or (file.exists() and file.stat().st_size == 0)


def _group_shown(group: Group) -> dict[str, Any]:
    return {"name": group.name, "runs": [str(path) for path in group.runs], "summary": _summary(group)}


def _summary(group: Group) -> dict[str, Any]:
    """The statistics of `fedflat compare`: means with deviations over seeds."""
    means: dict[str, Mean] = {
        "last": group.last,
        "best": group.best,
        "worst_decile": group.worst_decile,
        "rounds_to": group.rounds_to,
        "seconds_to": group.seconds_to,
        "megabytes_to": group.megabytes_to,
    }
    within = None if group.within is None else rounded(group.within)
    return {"within": within, **{name: rounded_all(mean) for name, mean in means.items()}}


def _worst(run: RunFiles) -> list[str]:
    """The spread over clients, and those that fare worst by name, where they have test samples of their own."""
    found = client_accuracies(run.path) if run.rows else {}
    if len(found) < 2:
        return []
    mean, deviation, _ = spread(found)
    named = ", ".join(f"{name} {found[name]:.1%}" for name in worst_clients(found, 3))
    told = f"Clients on their own samples: {mean:.1%} in the mean, deviation {deviation:.1%}; the lowest {named}."
    return [told]


def _totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: rounded(sum(row.get(name) or 0 for row in rows), 6) for name in TOTALS}


def _ends(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last accuracy and losses."""

    def last(name: str) -> float | None:
        found = next((row[name] for row in reversed(rows) if row.get(name) is not None), None)
        return None if found is None else rounded(found)

    return {name: last(name) for name in ("accuracy", "loss", "train_loss")}


def _published(runs: Sequence[RunFiles], grouped: Mapping[str, Group]) -> list[dict[str, Any]]:
    """Ours beside the papers' numbers, group by group."""
    experiments = {run.path: run.experiment for run in runs}
    entries = []
    for key, group in grouped.items():
        members = [(path, about) for path in group.runs if (about := experiments[path]) is not None]
        if members:
            entries += [{"group": key, **entry} for entry in beside_published(members)]
    rest = {str(run.path) for run in runs if not run.finished}
    unfinished = {key for key, group in grouped.items() if rest & set(map(str, group.runs))}
    return [rounded_all({**entry, "unfinished": entry["group"] in unfinished}) for entry in entries]


def _text(value: Any) -> str:
    return "" if value is None else str(value)
