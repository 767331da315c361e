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

from ..errors import FedflatError, explained
from ..flatness import MEASURES
from ..flatness.landscape import Data, landscape
from ..methods.text import as_method
from ..storage.files import replace_file
from ..storage.metrics_file import read_json
from .build import make_local
from .load_run import TrainedModel
from .run_state import run_state

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

    What is measured of a local round is measured of the run's next one, with all clients, with what its server and
    its clients keep, and at that round's learning rate. A `method` among the settings has its own first round from
    the model on instead. Which it was is noted under `trained`.
    """
    measure, given = MEASURES[name], dict(settings or {})
    if measure.federated:
        part, samples = "train", None
    began = time.perf_counter()
    own, about = _round_of(trained, given) if "after" in measure.defaults else ({}, None)
    result = measure(trained.model, trained.federation, part, samples, loss=trained.loss, **{**own, **given})
    label = name if part == "train" else f"{name} ({part})"
    return {
        "numbers": measure.numbers(result, label),
        "result": plain(result),
        "settings": {"part": part, "samples": samples, **plain(given)},
        **({} if about is None else {"trained": about}),
        "seconds": round(time.perf_counter() - began, 3),
    }


def _round_of(trained: TrainedModel, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a measure is told of the round that it trains, and the same for people to read."""
    experiment = trained.experiment.with_defaults()
    own: dict[str, Any] = {"local": make_local(experiment.local), "seed": experiment.seed}
    state, index = "initial", 0
    if "method" not in given:
        own["after"] = after = run_state(trained)
        index = after.round
        kept = any((trained.run / "checkpoints").glob("round-*.safetensors"))
        state = "the run's" if kept else "none is needed"
    method = as_method(given.get("method", experiment.method))
    about = {
        "method": f"{method.name}: {method}",
        "local": str(own["local"]),
        "lr": own["local"].lr_in(index),
        "round": index,
        "state": state,
    }
    return own, about


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
    return _read(Path(run) / "flatness.json", ("round", "measures"))


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
    """The loss around the models of several runs, by run directory; each is written there, and resumed.

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
            {"model": one.model},
            data,
            reach,
            points,
            dimensions,
            seed,
            loss=one.loss,
            jobs=jobs,
            keep=points_file,
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
    return _read(Path(run) / "landscape.json", ("round", "seed", "axes", "losses"))


def _read(path: Path, needed: Sequence[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        with explained(f"{path} cannot be read"):
            content = read_json(path.read_bytes())
    except ValueError as problem:
        if isinstance(problem, FedflatError):
            raise
        raise FedflatError(f"{path} cannot be read: {problem}.") from None
    if not isinstance(content, dict) or not isinstance(content.get("format", 0), int):
        raise FedflatError(f"{path} is not what fedflat writes; was it edited? Remove it to measure anew.")
    if content.get("format", 0) > FORMAT:
        raise FedflatError(f"{path} was written by a newer version of fedflat; use that one to read it.")
    if missing := [key for key in needed if key not in content]:
        raise FedflatError(f"{path} has no {missing[0]}; was it edited? Remove it to measure anew.")
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
