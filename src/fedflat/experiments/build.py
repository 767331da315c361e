"""From what an experiment says to the things it means."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..client.optimisers import OPTIMISERS, LocalOptimiser
from ..data.catalogue import SOURCES
from ..data.dataset import Dataset
from ..data.federate import dataset_names, federate, load_dataset
from ..data.federation import Federation
from ..data.loading import fetch, locate
from ..data.on_nodes import GO_ON, ON_NODES
from ..data.own import read_images, read_table
from ..data.partitions import Partition, parse_partition
from ..data.partitions.text import partition_from_parts
from ..data.standin import SHAPES, stand_in
from ..engines.ray.engine import Ray
from ..errors import FedflatError, nearest, shortened
from ..models import model_names
from ..server.participation import Bernoulli, Everyone, Participation, Schedule, Uniform
from .schema import Experiment, LocalSection


def make_local(local: LocalSection) -> LocalOptimiser:
    """The clients' optimiser."""
    kind = OPTIMISERS[local.optimiser]
    own = {field.name: field.metadata.get("optional") for field in fields(kind)}
    given = local.model_dump(exclude={"optimiser"}, exclude_none=True)
    for name in given.keys() - own.keys():
        if given.pop(name) != type(local).model_fields[name].default:
            raise FedflatError(f"{name} is no setting of the optimiser {local.optimiser}; leave it out.")
    words = {name: value for name, value in given.items() if isinstance(value, str) and value == own[name]}
    return kind(**{**given, **dict.fromkeys(words)})


def make_participation(given: int | str | list[list[int]] | None) -> Participation:
    """Who takes part."""
    if given is None or given == "everyone":
        return Everyone()
    if isinstance(given, int):
        return Uniform(given)
    if isinstance(given, list):
        return Schedule(given)
    name, _, value = given.partition(":")
    try:
        if name == "uniform":
            return Uniform(int(value))
        if name == "bernoulli":
            return Bernoulli(float(value))
    except ValueError:
        pass
    raise FedflatError(
        f"'{given}' is not possible: write a number of clients, everyone, bernoulli:0.1 or a list of clients "
        "for every round."
    )


def make_ray(experiment: Experiment, seed: int) -> Ray:
    """The engine ray, as its section says."""
    name, _, count = (experiment.engine or "").partition(":")
    if name != "ray" or experiment.ray is None:
        raise FedflatError(
            "these are settings of the engine ray: choose it as well, engine: ray (--engine ray)."
        )
    settings = experiment.ray.model_dump()
    if count.isdecimal():
        settings["actors"] = int(count)
    by_nodes = settings.pop("data") == "nodes"
    return Ray(**settings, data=partial(make_federation, experiment, seed) if by_nodes else None)


def make_partition(given: str | dict[str, Any]) -> Partition:
    """Make a partition from its text or its parts."""
    if isinstance(given, str):
        return parse_partition(given)
    if not isinstance(given.get("name"), str):
        raise FedflatError("say which partition it is: {name: dirichlet, alpha: 0.1}.")
    return partition_from_parts(given)


def check_dataset(experiment: Experiment) -> bool:
    """Whether the dataset exists, without reading it; an error where there is none."""
    name = experiment.dataset
    path = Path(name)
    if name == ON_NODES:
        return True
    check_path(name)
    if path.is_file() and experiment.target is None:
        raise FedflatError(
            f"which column of {path} is to be predicted? Say it with target (--target COLUMN)."
        )
    if path.exists() or name.replace("_", "-").lower() in dataset_names():
        return True
    if path.suffix in (".csv", ".parquet"):
        raise FedflatError(f"there is no file {path}.")
    if len(path.parts) > 1:
        raise FedflatError(f"there is no file or folder {path}.")
    raise FedflatError(f"there is no dataset '{name}'.{nearest(name, dataset_names())}")


def check_path(name: str) -> None:
    """Whether the system can look for the file at all: a name may be too long, or hold what none may."""
    try:
        os.stat(name)
    except ValueError:
        raise FedflatError(f"{name!r} is no name of a file: take the character \\0 out.") from None
    except OSError as problem:
        if problem.errno in (errno.ENAMETOOLONG, errno.EACCES, errno.ELOOP):
            raise FedflatError(f"{shortened(name)} cannot be read: {problem.strerror}.") from None


OF_A_TABLE = ("target", "client_column", "features", "categorical", "numeric", "missing")
OF_A_FOLDER = ("image_size", "client_folders")


def check_fits(experiment: Experiment, key: str) -> None:
    """Whether a key that says how to read a person's own data goes with the dataset."""
    path = Path(experiment.dataset)
    given = getattr(experiment, key)
    if (
        given is not None
        and given is not False
        and not (path.is_file() if key in OF_A_TABLE else path.is_dir())
    ):
        kind = "a csv or Parquet file" if key in OF_A_TABLE else "a folder of images"
        raise FedflatError(f"this goes with {kind}, and {experiment.dataset} is none; leave it out.")


def check_model(name: str) -> None:
    """Check that the model exists."""
    bare = name.partition(":")[0]
    if bare not in model_names():
        raise FedflatError(f"there is no model '{bare}'.{nearest(bare, model_names())}")


def read_dataset(
    name: str,
    data: str | Path | None = None,
    download: bool = False,
    target: str | None = None,
    client_column: str | None = None,
    features: Sequence[str] | None = None,
    image_size: int | None = None,
    client_folders: bool = False,
    test: float | str | None = None,
    **preparation: Any,
) -> Dataset:
    """A named dataset, or a person's own file or folder; `preparation` is what else `read_table` takes."""
    check_path(name)
    path = Path(name)
    if path.is_file():
        if target is None:
            raise FedflatError(f"Which column of {path} is to be predicted? Say it with --target COLUMN.")
        given = {key: value for key, value in {"test": test, **preparation}.items() if value is not None}
        return read_table(path, target, client_column, features, **given)
    if path.is_dir() and (path.name != name or name.replace("_", "-").lower() not in dataset_names()):
        if isinstance(test, str):
            raise FedflatError(
                f"test_per_client: {path} has no column '{test}'; give a fraction such as 0.2."
            )
        return read_images(path, image_size, clients=client_folders, test=0.2 if test is None else test)
    if path.suffix in (".csv", ".parquet"):
        raise FedflatError(f"There is no file {path}.")
    if test is not None:
        raise FedflatError(f"test_per_client: {name} has a test set of its own; leave it out.")
    return load_dataset(name, data, download)


def fetch_missing(experiments: Iterable[Experiment]) -> None:
    """Download what experiments may download and this machine lacks: once, before runs begin at the same time."""
    for name, data in dict.fromkeys((e.dataset, e.data) for e in experiments if e.download):
        source = SOURCES.get(name.replace("_", "-").lower())
        if source is not None and not Path(name).exists() and locate(source, data) is None:
            fetch(source)


def make_federation(experiment: Experiment, seed: int) -> Federation:
    """The dataset, partitioned."""
    if experiment.dataset == ON_NODES:
        raise FedflatError(
            "The data of this experiment is on the clients' own nodes, and cannot be looked at here: only "
            f"{GO_ON} trains on it."
        )
    experiment = experiment.with_defaults()
    dataset = _dataset(experiment)
    partition = make_partition(experiment.partition)
    augment = experiment.augment
    return federate(dataset, partition, experiment.clients, seed, augment)


STAND_IN_SAMPLES = 2000


def _dataset(experiment: Experiment) -> Dataset:
    """The dataset; where it is not there and that is allowed, one in its shape."""
    name, tests = experiment.dataset, experiment.test_samples
    lacking = name in SHAPES and locate(SOURCES[name], experiment.data) is None
    if experiment.stand_in and lacking and not experiment.download:
        return stand_in(name, STAND_IN_SAMPLES, tests or STAND_IN_SAMPLES // 4)
    dataset = read_dataset(
        name,
        experiment.data,
        experiment.download,
        experiment.target,
        experiment.client_column,
        experiment.features,
        experiment.image_size,
        bool(experiment.client_folders),
        experiment.test_per_client,
        categorical=experiment.categorical,
        numeric=experiment.numeric,
        missing=experiment.missing,
        task=experiment.task if experiment.task in ("classification", "regression") else None,
    )
    if tests is None or len(dataset.test[1]) <= tests:
        return dataset
    chosen = torch.linspace(0, len(dataset.test[1]) - 1, tests, dtype=torch.float64).long()
    inputs, targets = dataset.test
    groups = None if dataset.test_groups is None else dataset.test_groups[chosen.numpy()]
    return replace(dataset, test=(inputs[chosen], targets[chosen]), test_groups=groups)
