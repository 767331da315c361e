"""The versions of what a run leaves on disk: which can be gone on with, which only read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import FedflatError

RUN = 1
"""Of a run directory. Raise it when a reader of old ones would stumble; docs/experiments.md says what else to do."""
CHECKPOINT = "1"
"""Of a file in `checkpoints/`. Raise it when the content of checkpoints changes."""
TABLE = 1
"""Of a file in `state/`. Raise it when tables or slots change."""


class OtherFormat(FedflatError):
    """What was written by another version of fedflat, and is sound: nothing to pass over or to remove."""


def check_run(path: Path, settings: Mapping[str, Any], to_go_on: bool) -> None:
    """Whether a run directory can be read; or gone on with, for which its format must be this one."""
    found, writer = settings.get("format"), _writer(settings)
    if isinstance(found, int) and found > RUN:
        raise OtherFormat(
            f"{path} was written by a newer version of fedflat{writer}: it has format {found}, and this version "
            f"knows {RUN}. Use that version; its metrics.jsonl and model.safetensors can be read by any program."
        )
    if not to_go_on or found == RUN:
        return
    if not isinstance(found, int) or isinstance(found, bool):
        raise OtherFormat(
            f"{path / 'run.json'} does not say which format the run has, so that it cannot be gone on with. Was it "
            f'edited? A run of this version says "format": {RUN}. It can still be compared and shown.'
        )
    raise OtherFormat(
        f"{path} was written by an older version of fedflat{writer}: it has format {found}, and this version goes on "
        f"with {RUN}. Go on with that version, or start anew; it can still be compared and shown."
    )


def check_file(path: Path, found: object, known: object) -> None:
    """Whether a checkpoint or a table is of this version."""
    if found != known:
        raise OtherFormat(
            f"{path} was written by another version of fedflat: it has format {found}, and this version knows "
            f"{known}. Go on with that version."
        )


def _writer(settings: Mapping[str, Any]) -> str:
    resumed = settings.get("resumed")
    places = [settings, *(resumed if isinstance(resumed, list) else ())]
    environment = places[-1].get("environment") if isinstance(places[-1], Mapping) else None
    version = environment.get("fedflat") if isinstance(environment, Mapping) else None
    return f", {version}" if version else ""
