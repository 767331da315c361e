"""What the schema of experiments cannot see: names, parameters, what does not go together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import FedflatError
from .problems import Problem
from .schema import Experiment


def check(experiment: Experiment, to_run: bool = True) -> list[Problem]:
    """What the schema cannot see: names, parameters, and what does not go together."""
    problems: list[Problem] = []

    def attempt(place: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except FedflatError as problem:
            problems.append(Problem(tuple(place.split(".")), str(problem)))
            return None

    from ..core.metrics import make_metric
    from ..data.augmentation import find_augmentation
    from ..engines.base import make_engine
    from ..methods.text import as_method
    from ..storage.client_store import parse_size
    from ..storage.environment import check_device
    from ..training.losses import parse_loss
    from .build import (
        OF_A_FOLDER,
        OF_A_TABLE,
        check_dataset,
        check_fits,
        check_model,
        make_local,
        make_participation,
        make_partition,
        make_ray,
    )

    filled = experiment.with_defaults()
    if attempt("dataset", lambda: check_dataset(experiment)):
        for key in (*OF_A_TABLE, *OF_A_FOLDER):
            attempt(key, partial(check_fits, experiment, key))
    attempt("model", lambda: check_model(filled.model or "mlp"))
    if to_run:
        attempt("device", lambda: check_device(experiment.device))
    attempt("method", lambda: as_method(experiment.method))
    partition = attempt("partition", lambda: make_partition(experiment.partition))
    if experiment.augment is not None:
        attempt("augment", lambda: find_augmentation(str(experiment.augment)))
    if experiment.local.epochs is not None and experiment.local.steps is not None:
        problems.append(Problem(("local", "steps"), "give epochs or steps, not both."))
    else:
        attempt("local", lambda: make_local(filled.local))
    participation = attempt("participation", lambda: make_participation(filled.participation))
    if participation is not None and partition is not None and filled.clients is not None:
        attempt("participation", lambda: participation.check(filled.clients, filled.rounds))
    if to_run and experiment.engine is not None:
        attempt("engine", lambda: make_engine(str(experiment.engine)))
    if to_run and experiment.ray is not None:
        attempt("ray", lambda: make_ray(experiment, 0))
    if experiment.state_memory is not None:
        attempt("state_memory", lambda: parse_size(str(experiment.state_memory)))
    if experiment.measure:
        from ..flatness.recording import wanted

        attempt("measure", lambda: wanted(experiment.measure))
    if experiment.metrics or experiment.monitor != "auto":
        from ..training.evaluation import make_monitor

        attempt("metrics", lambda: [make_metric(one) for one in experiment.metrics])
        if experiment.monitor != "auto":
            attempt("monitor", lambda: make_monitor(make_metric(experiment.monitor)))
    attempt("loss", lambda: parse_loss(experiment.loss))
    if experiment.trackers:
        from ..training.trackers import check_trackers

        attempt("trackers", lambda: check_trackers(experiment.trackers))
    seeds = experiment.seed if isinstance(experiment.seed, list) else [experiment.seed]
    if not seeds:
        problems.append(Problem(("seed",), "the list is empty; give at least one."))
    if len(set(seeds)) < len(seeds):
        problems.append(Problem(("seed",), f"{seeds} has a seed twice; keep one."))
    return problems
