"""Flatness of the models in run directories: measured, and kept beside the run.

`RUN/flatness.json` has the measures by name, `RUN/landscape.json` the loss around the model.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..composition import as_method
from ..errors import FedflatError, explained
from ..files import replace_file
from ..flatness import MEASURES
from ..flatness.landscape import Data, landscape
from .building import make_sgd
from .model_of import TrainedModel

FORMAT = 1
"""Of both files; raise it when a reader of old ones would stumble."""


def take_measure(
    trained: TrainedModel,
    name: str,
    part: str = "train",
    samples: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One measure of a trained model, as plain values: its numbers by name, the whole result, and how it was taken.

    What is measured of a local round is measured of one with the run's own method and local training, from the model
    on; what the method keeps has its initial value there.
    """
    measure, given = MEASURES[name], dict(settings or {})
    if "method" in measure.defaults and "local" in measure.defaults:  # it trains a round
        own = {
            "method": as_method(trained.experiment.method),
            "local": make_sgd(trained.experiment.filled().local),
        }
        given = own | given
    if measure.federated:
        part, samples = "train", None
    began = time.perf_counter()
    result = measure(trained.model, trained.federation, part, samples, **given)
    label = name if part == "train" else f"{name} ({part})"
    noted = {"part": part, "samples": samples, **{key: str(value) for key, value in given.items()}}
    return {
        "numbers": measure.numbers(result, label),
        "result": plain(result),
        "settings": {**noted, **{k: v for k, v in given.items() if isinstance(v, int | float | str | bool)}},
        "seconds": round(time.perf_counter() - began, 3),
    }


def keep_measures(run: str | Path, round: int, measures: Mapping[str, Any]) -> dict[str, Any]:
    """Write measures to the run directory, beside those that were taken of the same model before."""
    path = Path(run) / "flatness.json"
    before = read_flatness(run)
    kept = before["measures"] if before is not None and before["round"] == round else {}
    content = {"format": FORMAT, "round": round, "measures": {**kept, **measures}}
    replace_file(path, (json.dumps(content) + "\n").encode())
    return content


def read_flatness(run: str | Path) -> dict[str, Any] | None:
    """What `keep_measures` wrote; None where there is nothing."""
    return _read(Path(run) / "flatness.json")


def take_landscapes(
    trained: Mapping[str, TrainedModel],
    parts: Sequence[str] = ("train",),
    reach: float = 1.0,
    points: int = 25,
    dimensions: int = 2,
    samples: int | None = 2000,
    seed: int = 0,
    jobs: int = 1,
) -> dict[str, dict[str, Any]]:
    """The loss around the models of several runs, by run directory; each is written there, and gone on with.

    All are seen along the same random numbers, each on its own run's data.
    """
    found = {}
    for run, one in trained.items():
        data: dict[str, Data] = {}
        for part in parts:
            whole = one.federation.test if part == "test" else one.federation.union()
            if whole is None:
                raise FedflatError(f"{run}: the federation '{one.federation.name}' has no test set.")
            data[part] = whole if samples is None else whole.thinned(samples)
        points_file = Path(run) / "landscape-points.jsonl"
        seen = landscape(
            {"model": one.model}, data, reach, points, dimensions, seed, jobs=jobs, keep=points_file
        )
        content = {
            "format": FORMAT,
            "round": one.round,
            "seed": seed,
            "reach": reach,
            "samples": {part: len(shard) for part, shard in data.items()},
            "axes": [axis.tolist() for axis in seen.axes],
            "losses": {part: plain(losses) for part, losses in seen.losses["model"].items()},
        }
        replace_file(Path(run) / "landscape.json", (json.dumps(content) + "\n").encode())
        with explained(f"{points_file} cannot be removed"):
            points_file.unlink(missing_ok=True)
        found[run] = content
    return found


def read_landscape(run: str | Path) -> dict[str, Any] | None:
    """What `take_landscapes` wrote; None where there is nothing."""
    return _read(Path(run) / "landscape.json")


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        with explained(f"{path} cannot be read"):
            content: dict[str, Any] = json.loads(path.read_text())
    except ValueError as problem:
        raise FedflatError(f"{path} cannot be read: {problem}.") from None
    if content.get("format", 0) > FORMAT:
        raise FedflatError(f"{path} was written by a newer version of fedflat; use that one to read it.")
    return content


def plain(value: Any) -> Any:
    """Dataclasses, tuples and arrays as what JSON knows; NaN and infinity as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
