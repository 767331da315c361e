"""What a run directory has for the page, with a sentence for everything that is missing from it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..errors import FedflatError, explained
from ..experiments.compare import describe
from ..formats import RUN
from ..rundirectory import read_metrics, read_settings

FILES = ("run.json", "metrics.jsonl", "experiment.yaml", "flatness.json", "landscape.json")
"""All that is read of a run."""

MEASURED_FORMAT = 1
"""Of flatness.json and landscape.json."""


@dataclass(frozen=True)
class RunFiles:
    """A run as it is on disk."""

    path: Path
    settings: Mapping[str, Any]
    """run.json"""
    rows: Sequence[Mapping[str, Any]]
    """metrics.jsonl"""
    experiment: Mapping[str, Any] | None
    """experiment.yaml"""
    described: Mapping[str, Any] | None
    """what the run is, with dotted keys; None where nothing on disk says it"""
    flatness: Mapping[str, Any]
    landscape: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)
    """what is missing, for a person to read"""

    @property
    def rounds(self) -> int | None:
        """How many there are to be."""
        found = (self.experiment or {}).get("rounds") or self.settings.get("rounds")
        return found if isinstance(found, int) else None

    @property
    def finished(self) -> bool:
        """Whether all rounds are done."""
        return bool(self.rows) and "finished" in self.settings and len(self.rows) >= (self.rounds or 1)


def look_for_runs(places: Sequence[str | Path]) -> list[Path]:
    """The run directories among some places and below them, those without a finished round among them."""
    found: list[Path] = []
    for place in map(Path, places):
        if not place.is_dir():
            raise FedflatError(f"There is no directory {place}.")
        for folder, inner, files in os.walk(place):
            inner.sort()
            if "run.json" in files or "metrics.jsonl" in files:
                found.append(Path(folder))
                inner.clear()  # what a run keeps per client can be a million files
    return list(dict.fromkeys(found))


def fingerprint(path: Path) -> tuple[tuple[int, int] | None, ...]:
    """Changes when a file of the run does."""
    return tuple(_stamp(path / name) for name in FILES)


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        about = file.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size


def read_run(path: Path) -> RunFiles:
    """A run with whatever is sound of it; an error if it is of a version that cannot be read."""
    notes: list[str] = []
    settings = _mapping(path / "run.json", notes)
    if settings.get("format", 0) != RUN and settings:
        read_settings(path)  # refuses what is newer
        if not isinstance(settings.get("format"), int):
            notes.append(f"run.json does not say which format it has; read as format {RUN}.")
    if not settings and not (path / "run.json").exists():
        notes.append("There is no run.json: versions, and when it ran, are unknown.")
    experiment = _experiment(path, notes)
    rows = _rows(path, notes)
    files = RunFiles(
        path,
        settings,
        rows,
        experiment,
        _described(path, settings, experiment),
        _measured(path / "flatness.json", "measures", notes),
        _measured(path / "landscape.json", "losses", notes),
        notes,
    )
    if rows and not files.finished:
        notes.append(f"Not finished: {len(rows)} of {files.rounds or 'unknown'} rounds.")
    return files


def _experiment(path: Path, notes: list[str]) -> Mapping[str, Any] | None:
    file = path / "experiment.yaml"
    if not file.exists():
        notes.append(
            "There is no experiment.yaml: it was started in Python, so its split cannot be shown and no command "
            "repeats it."
        )
        return None
    try:
        content = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as problem:
        notes.append(f"experiment.yaml cannot be read: {_first_line(problem)}.")
        return None
    if not isinstance(content, dict):
        notes.append("experiment.yaml is no experiment; was it edited?")
        return None
    return content


def _rows(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not (path / "metrics.jsonl").exists():
        notes.append("No round is finished yet.")
        return []
    try:
        rows = read_metrics(path)
    except FedflatError as problem:
        notes.append(f"{problem} Its curves are left out.")
        return []
    if not all(_is_round(row) for row in rows):
        notes.append("metrics.jsonl has lines that are no rounds; was it edited? Its curves are left out.")
        return []
    if not rows:
        notes.append("No round is finished yet.")
    elif all(row.get("accuracy") is None for row in rows):
        notes.append("No round was tested yet: there is no accuracy.")
    return rows


def _is_round(row: Any) -> bool:
    """Whether a row has what comparing relies on."""
    if not isinstance(row, dict) or not isinstance(row.get("index"), int):
        return False
    numbers = (row.get(name) for name in ("accuracy", "seconds", "bytes_down", "bytes_up"))
    clients = row.get("client_accuracy")
    return all(n is None or isinstance(n, int | float) for n in numbers) and (
        clients is None
        or (isinstance(clients, dict) and isinstance(clients.get("worst_decile"), int | float))
    )


def _described(
    path: Path, settings: Mapping[str, Any], experiment: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    broken = experiment is None and (path / "experiment.yaml").exists()
    return None if broken or not (experiment or settings) else describe(path)


def _measured(file: Path, needed: str, notes: list[str]) -> Mapping[str, Any]:
    """A file of measurements; empty where there is none, or none that can be read."""
    content = _mapping(file, notes)
    if not content:
        return {}
    if content.get("format") != MEASURED_FORMAT:
        notes.append(f"{file.name} was written by another version of fedflat and is left out.")
        return {}
    if not isinstance(content.get(needed), dict):
        notes.append(f"{file.name} has no {needed} and is left out; was it edited?")
        return {}
    return content


def _mapping(file: Path, notes: list[str]) -> Mapping[str, Any]:
    """A JSON file; empty, with a note, where it cannot be read."""
    if not file.exists():
        return {}
    try:
        with explained(f"{file.name} cannot be read"):
            content = json.loads(file.read_bytes())
    except (FedflatError, ValueError) as problem:
        notes.append(f"{file.name} cannot be read: {_first_line(problem)}.".replace("..", "."))
        return {}
    if not isinstance(content, dict):
        notes.append(f"{file.name} is not what fedflat writes; was it edited?")
        return {}
    return content


def _first_line(problem: Exception) -> str:
    return str(problem).splitlines()[0] if str(problem) else type(problem).__name__
