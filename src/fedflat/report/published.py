"""The papers' numbers beside ours: a run belongs to a cell of a table if its experiment is the cell's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..experiments.caveats import APART
from ..experiments.presets import PaperCell, Preset, presets
from ..experiments.reproduce import tabulate
from ..experiments.schema import Experiment
from ..experiments.sweep import Cell

Place = tuple[Preset, PaperCell]
"""A cell, and the table that it is in."""


def cells_of(experiment: Mapping[str, Any] | None) -> list[Place]:
    """The cells of the papers' tables whose experiment this is."""
    key = None if experiment is None else _key(experiment)
    return [] if key is None else _known().get(key, [])


def beside_published(members: Sequence[tuple[Path, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Ours beside theirs, for runs of one experiment with different seeds: an entry per cell."""
    experiment = members[0][1]
    places = [place for place in cells_of(experiment) if place[1].published is not None or place[1].note]
    runs = [Cell(str(path), Experiment.model_validate(dict(about)), path) for path, about in members]
    results = tabulate([(cell, runs) for _, cell in places])
    return [
        {
            "preset": preset.key,
            "where": f"{preset.where}, {preset.paper}",
            **result,
            "misprint": cell.misprint,
        }
        for (preset, cell), result in zip(places, results, strict=True)
    ]


def _key(content: Mapping[str, Any]) -> str | None:
    """Experiments of the same numbers, seeds aside, have the same key; None for what is no experiment."""
    try:
        experiment = Experiment.model_validate(dict(content)).with_defaults()
    except ValidationError:
        return None
    return json.dumps(experiment.model_dump(mode="json", exclude=set(APART)), sort_keys=True)


@cache
def _known() -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {}
    for preset in presets():
        for cell in preset.cells():
            key = _key(cell.content)
            if key is not None:
                found.setdefault(key, []).append((preset, cell))
    return found
