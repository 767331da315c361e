"""The versions of the files of a run: which can be resumed, and which only read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import FedflatError

RUN = 1
"""Version of a run directory. Raise it when older readers would fail; docs/experiments.md says what else to do."""
CHECKPOINT = "1"
"""Version of a file in `checkpoints/`. Raise it when the content of checkpoints changes."""
TABLE = 1
"""Version of a file in `state/`. Raise it when tables or slots change."""


class OtherFormat(FedflatError):
    """A sound file of another version of fedflat: not to be passed over or removed."""


def check_run(path: Path, settings: Mapping[str, Any], to_resume: bool) -> None:
    """Raise if a run directory cannot be read or, with `to_resume`, resumed, which takes this very format."""
    found, writer = settings.get("format"), _writer(settings)
    if isinstance(found, int) and found > RUN:
        raise OtherFormat(
            f"{path} was written by a newer version of fedflat{writer}: it has format {found}, and this version "
            f"knows {RUN}. Use that version; its metrics.jsonl and model.safetensors can be read by any program."
        )
    if not to_resume or found == RUN:
        return
    if not isinstance(found, int) or isinstance(found, bool):
        raise OtherFormat(
            f"{path / 'run.json'} does not say which format the run has, so it cannot be resumed. Was it "
            f'edited? A run of this version says "format": {RUN}. It can still be compared and shown.'
        )
    raise OtherFormat(
        f"{path} was written by an older version of fedflat{writer}: it has format {found}, and this version "
        f"resumes {RUN}. Resume it with that version, or start anew; it can still be compared and shown."
    )


def check_file(path: Path, found: object, known: object) -> None:
    """Raise if a checkpoint or a table is of another version."""
    if found != known:
        raise OtherFormat(
            f"{path} was written by another version of fedflat: it has format {found}, and this version knows "
            f"{known}. Resume with that version."
        )


def _writer(settings: Mapping[str, Any]) -> str:
    resumed = settings.get("resumed")
    places = [settings, *(resumed if isinstance(resumed, list) else ())]
    environment = places[-1].get("environment") if isinstance(places[-1], Mapping) else None
    version = environment.get("fedflat") if isinstance(environment, Mapping) else None
    return f", {version}" if version else ""
