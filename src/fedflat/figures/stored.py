"""What run directories hold of trained models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FedflatError
from ..experiments.flatness_of import read_flatness, read_landscape
from ..flatness.landscape import Landscape
from .trials import Place, by_place, gather


def results(
    runs: Place | Sequence[Place], measure: str, part: str, option: str
) -> dict[str, list[Mapping[str, Any]]]:
    """A measure's result by experiment, one for every seed."""
    label = measure if part == "train" else f"{measure} ({part})"
    found: dict[str, list[Mapping[str, Any]]] = {}
    for trials in gather(runs):
        for run in trials.places:
            taken = (read_flatness(run) or {"measures": {}})["measures"].get(label)
            if taken is None:
                more = "" if part == "train" else f" --part {part}"
                raise FedflatError(
                    f"{run} has no {label} yet. Measure it: `fedflat flatness {run} {option}{more}`."
                )
            found.setdefault(trials.name, []).append(taken["result"])
    return found


def stored_landscape(runs: Place | Sequence[Place]) -> Landscape:
    """The landscapes of several runs as one, if they were computed on the same grid and directions."""
    axes: list[list[float]] | None = None
    seed, first = None, Path()
    losses: dict[str, dict[str, np.ndarray]] = {}
    for name, run in by_place(runs).items():
        content = read_landscape(run)
        if content is None:
            raise FedflatError(f"{run} has no landscape yet. Compute it: `fedflat landscape {run}`.")
        if axes is None:
            axes, seed, first = content["axes"], content["seed"], run
        if content["axes"] != axes or content["seed"] != seed:
            raise FedflatError(
                f"The landscapes of {first} and {run} cannot be compared: their grids or directions differ. Compute "
                f"them in one way: `fedflat landscape {first} {run}`."
            )
        losses[name] = {part: np.array(values, dtype=float) for part, values in content["losses"].items()}
    return Landscape(tuple(np.array(axis) for axis in axes or []), losses)
