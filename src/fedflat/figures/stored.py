"""What run directories hold of trained models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..data.on_nodes import ON_NODES, no_data
from ..errors import FedflatError
from ..experiments.compare import describe, leave_out
from ..experiments.measure_run import read_flatness, read_landscape
from ..flatness.landscape import Landscape
from .trials import Place, by_place, gather

Made = TypeVar("Made")


def results(
    runs: Place | Sequence[Place],
    measure: str,
    part: str,
    option: str,
    make: Callable[[Mapping[str, Any]], Made],
) -> dict[str, list[Made]]:
    """A measure's results by experiment, one for every seed, each made of the plain values in a file."""
    label = measure if part == "train" else f"{measure} ({part})"
    found: dict[str, list[Made]] = {}
    problems: list[FedflatError] = []

    def read(run: Path) -> Made | None:
        taken = (read_flatness(run) or {"measures": {}})["measures"].get(label)
        return None if taken is None else make(taken["result"])

    for trials in gather(runs):
        for run in trials.places:
            made = _attempt(run / "flatness.json", read)
            if isinstance(made, FedflatError):
                problems.append(made)
                continue
            if made is None:
                refuse_without_data(run)
                more = "" if part == "train" else f" --part {part}"
                raise FedflatError(
                    f"{run} has no {label} yet. Measure it: `fedflat flatness {run} {option}{more}`."
                )
            found.setdefault(trials.name, []).append(made)
    _tell(problems, everything=not found)
    return found


def _attempt(file: Path, read: Callable[[Path], Made | None]) -> Made | FedflatError | None:
    """What a run's file holds, or what is wrong with it: the other runs can be drawn without."""
    try:
        return read(file.parent)
    except FedflatError as problem:
        return problem if str(file.parent) in str(problem) else FedflatError(f"{file}: {problem}")
    except (LookupError, TypeError, ValueError, AttributeError):
        return FedflatError(f"{file} is not what fedflat writes; was it edited? Remove it to measure anew.")


def _tell(problems: Sequence[FedflatError], everything: bool) -> None:
    """What is left out; an error where nothing is left to be drawn."""
    if everything and problems:
        raise problems[0]
    for problem in problems:
        leave_out(problem)


def refuse_without_data(run: Path) -> None:
    """An error where nothing can be measured here, since the data is on the clients' own nodes."""
    if describe(run).get("dataset") == ON_NODES:
        raise no_data(run)


def stored_landscape(runs: Place | Sequence[Place]) -> Landscape:
    """The landscapes of several runs as one, if they were computed on the same grid and directions."""
    axes: list[list[float]] | None = None
    seed, first = None, Path()
    losses: dict[str, dict[str, np.ndarray]] = {}
    problems: list[FedflatError] = []
    for name, run in by_place(runs).items():
        content = _attempt(run / "landscape.json", _read_grid)
        if isinstance(content, FedflatError):
            problems.append(content)
            continue
        if content is None:
            refuse_without_data(run)
            raise FedflatError(f"{run} has no landscape yet. Compute it: `fedflat landscape {run}`.")
        if axes is None:
            axes, seed, first = content["axes"], content["seed"], run
        if content["axes"] != axes or content["seed"] != seed:
            raise FedflatError(
                f"The landscapes of {first} and {run} cannot be compared: their grids or directions differ. Compute "
                f"them in one way: `fedflat landscape {first} {run}`."
            )
        losses[name] = content["losses"]
    _tell(problems, everything=not losses)
    return Landscape(tuple(np.array(axis) for axis in axes or []), losses)


def _read_grid(run: Path) -> dict[str, Any] | None:
    """A stored landscape with its losses as arrays."""
    content = read_landscape(run)
    if content is None:
        return None
    losses = {part: np.array(values, dtype=float) for part, values in content["losses"].items()}
    shape = tuple(np.array(axis, dtype=float).size for axis in content["axes"])
    if not losses or any(values.shape != shape for values in losses.values()):
        raise ValueError("losses that fit no grid")
    return {**content, "losses": losses}
