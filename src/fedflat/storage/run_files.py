"""Reading the files of a run: whether it has begun, and what its settings are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import FedflatError, explained
from .formats import check_run
from .metrics_file import read_json

LAST_FINITE = "last_finite.safetensors"

TYPES: dict[str, type] = {
    **dict.fromkeys(("rounds", "seed", "parameters"), int),
    **dict.fromkeys(("notes", "resumed"), list),
    **dict.fromkeys(("federation", "local", "environment", "how"), dict),
}
"""Types of the entries of run.json; an entry may be missing."""


def read_settings(path: str | Path, to_resume: bool = False) -> dict[str, Any]:
    """Read `run.json`; an error if this version cannot read the run, or, with `to_resume`, cannot resume it."""
    file = Path(path) / "run.json"
    if not file.exists():
        raise FedflatError(f"{path} is not a run: there is no {file.name} in it.")
    try:
        with explained(f"{file} cannot be read"):
            settings: dict[str, Any] = read_json(file.read_bytes())
    except ValueError as problem:
        if isinstance(problem, FedflatError):
            raise
        raise FedflatError(f"{file} cannot be read: {problem}.") from None
    if not isinstance(settings, dict):
        raise FedflatError(f"{file} cannot be read: it holds no settings.")
    check_run(Path(path), settings, to_resume)
    for key, kind in TYPES.items():
        if key in settings and (not isinstance(settings[key], kind) or isinstance(settings[key], bool)):
            raise FedflatError(
                f"{file}: '{key}' cannot be {shortened(str(settings[key]), 60)}; was it edited?"
            )
    return settings


def is_begun(path: str | Path) -> bool:
    """Whether the run has finished a round: one that failed before leaves nothing that could be lost."""
    metrics = Path(path) / "metrics.jsonl"
    with explained(f"{path} cannot be read"):
        written = metrics.exists() and metrics.stat().st_size > 0
        return written or any((Path(path) / "checkpoints").glob("round-*.safetensors"))


def difference(was: Any, now: Any, name: str = "") -> str | None:
    """Describe the first setting that changed; keys missing from the old run are ignored."""
    if isinstance(was, dict) and isinstance(now, dict):
        inner = (difference(was[key], now[key], f"{name}.{key}") for key in now if key in was)
        return next((found for found in inner if found is not None), None)
    return None if was == now else f"{name.removeprefix('.')} {was}, not {now}"


def shortened(text: str, most: int = 200) -> str:
    """Cut a text that is too long for a sentence."""
    return text if len(text) <= most else f"{text[:most]} ..."
