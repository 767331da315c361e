"""Running an experiment, from the start or from where it was stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ..data.federation import Federation
from ..data.on_nodes import as_on_nodes, is_on_nodes
from ..data.protocols import PROTOCOLS
from ..engines.base import Engine
from ..errors import FedflatError
from ..storage.metrics_file import read_metrics
from ..storage.run_files import read_settings
from ..training.callbacks import Callback
from ..training.trackers import Trackers
from ..training.train import Run, train
from .baselines import NoTraffic, Parts
from .build import make_federation, make_local, make_participation, make_ray
from .files import load_experiment
from .schema import Experiment


def run_experiment(
    experiment: Experiment,
    out: str | Path | None = None,
    federation: Federation | None = None,
    callbacks: Sequence[Callback] = (),
    **arguments: Any,
) -> Run:
    """Train as an experiment with one seed says.

    Args:
        experiment: what to train, and how.
        out: a directory for the run.
        federation: spares loading the data, if it is there already.
        callbacks: objects that look on.
        arguments: of `train`, that no experiment has: `resume`, `on_round`, `stop`, `notes`, ...
    """
    if isinstance(experiment.seed, list):
        raise FedflatError(f"This is one run: choose one of the seeds {experiment.seed}.")
    filled = experiment.with_defaults()
    seed = experiment.seed
    federation = federation or make_federation(filled, seed)
    filled = experiment.with_defaults(len(federation))
    parts = Parts(
        federation,
        filled.method,
        make_local(filled.local),
        make_participation(filled.participation),
        _engine(filled, seed),
        filled.settings(),
    )
    if filled.baseline is not None:
        parts, callbacks = parts.as_baseline(filled.baseline), [NoTraffic(), *callbacks]
    trackers = [Trackers(filled.trackers, filled.to_dict(), out)] if filled.trackers else []
    return train(
        parts.federation,
        filled.model or "mlp",
        parts.method,
        parts.local,
        parts.participation,
        engine=parts.engine,
        out=out,
        callbacks=[*trackers, *callbacks],
        experiment=filled.to_dict(),
        **parts.settings,
        **arguments,
    )


def _engine(filled: Experiment, seed: int) -> str | Engine:
    return (filled.engine or usual_engine(filled)) if filled.ray is None else make_ray(filled, seed)


def usual_engine(experiment: Experiment) -> str:
    """Worker processes where it pays: the papers' datasets are known to be large enough."""
    small = experiment.dataset == "digits" or experiment.dataset not in PROTOCOLS
    return "inprocess" if small else "workers"


def experiment_of(run: str | Path, to_run: bool = False) -> Experiment:
    """The experiment that a run directory holds; unless it is `to_run`, this machine need not be able to run it."""
    path = Path(run) / "experiment.yaml"
    if not path.exists() or (Path(run) / "run.json").exists():
        read_settings(run, to_resume=to_run)  # before keys that another version may have
    if not path.exists():
        raise FedflatError(
            f"{run} was not started from the command line or an experiment: resume it in Python, with the same "
            f"arguments and train(..., out='{run}', resume=True); the weights of a finished one are in its "
            "model.safetensors."
        )
    experiment = load_experiment(path, to_run=to_run)
    settings = read_settings(run) if (Path(run) / "run.json").exists() else {}
    if is_on_nodes(settings):  # whatever an older version wrote
        experiment = Experiment.model_validate(as_on_nodes(experiment.to_dict(), settings.get("model")))
    return experiment


def is_done(run: str | Path, rounds: int | None = None) -> bool:
    """Whether a run directory holds a finished run, of at least this many rounds."""
    if not (Path(run) / "model.safetensors").exists():
        return False
    settings = read_settings(run)
    if rounds is None and "rounds" not in settings:
        raise FedflatError(f"{Path(run) / 'run.json'} does not say how many rounds there are; was it edited?")
    return "finished" in settings and len(read_metrics(run)) >= (rounds or settings["rounds"])


@contextmanager
def stopping_at_round_end(announce: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: once ends the run after the round, twice at once."""
    asked, here = False, os.getpid()

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if os.getpid() != here:  # a worker that has just been forked: this process decides
            return
        if asked:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        asked = True
        announce()

    try:
        before: Any = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread: whoever is decides
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
