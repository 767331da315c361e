"""What a run directory has for the page, with a sentence for everything that is missing from it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data.on_nodes import as_on_nodes, is_on_nodes
from ..errors import FedflatError, explained
from ..experiments.compare import describe
from ..experiments.parsing import read_mapping
from ..storage.client_reports import are_reported, with_client_reports
from ..storage.formats import RUN, OtherFormat
from ..storage.metrics_file import read_json, read_metrics
from ..storage.run_files import read_settings

FILES = ("run.json", "metrics.jsonl", "clients.jsonl", "experiment.yaml", "flatness.json", "landscape.json")
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
    """metrics.jsonl; with what clients reported, where the server has tested nothing"""
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
    def on_nodes(self) -> bool:
        """Whether the data is on the clients' own nodes."""
        return is_on_nodes(self.settings)

    @property
    def by_clients(self) -> bool:
        """Whether accuracy and loss are what clients reported."""
        return are_reported(self.rows)

    @property
    def caveats(self) -> list[str]:
        """What to know before comparing it with a paper."""
        found = self.settings.get("notes")
        return [str(sentence) for sentence in found] if isinstance(found, list) else []

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
    settings = _settings(path, notes)
    if settings and not isinstance(settings.get("format"), int):
        notes.append(f"run.json does not say which format it has; read as format {RUN}.")
    if not settings and not (path / "run.json").exists():
        notes.append("There is no run.json: versions, and when it ran, are unknown.")
    experiment = _experiment(path, notes)
    if experiment is not None and is_on_nodes(settings):
        experiment = as_on_nodes(experiment, settings.get("model"))
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
        if isinstance(sentence := settings.get("diverged"), str):
            notes.append(f"It diverged: {sentence}")
    return files


def _settings(path: Path, notes: list[str]) -> Mapping[str, Any]:
    """run.json; empty, with a note, where it is damaged, and an error where it is of a newer version."""
    if not (path / "run.json").exists():
        return {}
    try:
        return read_settings(path)
    except OtherFormat:
        raise
    except FedflatError as problem:
        notes.append(_first_line(problem).removeprefix(f"{path}{os.sep}"))
        return {}


def _experiment(path: Path, notes: list[str]) -> Mapping[str, Any] | None:
    file = path / "experiment.yaml"
    if not file.exists():
        notes.append(
            "There is no experiment.yaml: it was started in Python, so its split cannot be shown and no command "
            "repeats it."
        )
        return None
    try:
        return read_mapping(file)
    except FedflatError as problem:
        reason = _first_line(problem).removeprefix(str(file)).lstrip(":, ")
        notes.append(f"experiment.yaml cannot be read: {reason}")
        return None


def _rows(path: Path, notes: list[str]) -> Sequence[Mapping[str, Any]]:
    if not (path / "metrics.jsonl").exists():
        notes.append("No round is finished yet.")
        return []
    try:
        rows: Sequence[dict[str, Any]] = read_metrics(path)
    except FedflatError as problem:
        notes.append(f"{problem} Its curves are left out.")
        return []
    rows = with_client_reports(rows)
    if not rows:
        notes.append("No round is finished yet.")
    elif all(row.get("accuracy") is None for row in rows):
        notes.append("No round was tested yet: there is no accuracy.")
    return rows


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
            content = read_json(file.read_bytes())
    except (FedflatError, ValueError) as problem:
        notes.append(f"{file.name} cannot be read: {_first_line(problem)}.".replace("..", "."))
        return {}
    if not isinstance(content, dict):
        notes.append(f"{file.name} is not what fedflat writes; was it edited?")
        return {}
    return content


def _first_line(problem: Exception) -> str:
    return str(problem).splitlines()[0] if str(problem) else type(problem).__name__
