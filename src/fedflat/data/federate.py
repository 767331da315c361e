"""Datasets by name, partitioned over clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import FedflatError, nearest
from .augmentation import Images, Pipeline, find_augmentation
from .dataset import Dataset
from .federation import Federation
from .partitions import ByDomain, ByUser, Partition, parse_partition
from .preprocessing import describe_preprocessing
from .protocols import protocol_for


def dataset_names() -> list[str]:
    """The datasets that are known by name."""
    from .catalogue import SOURCES

    return ["digits", *SOURCES]


def load_dataset(name: str, data: str | Path | None = None, download: bool = False) -> Dataset:
    """A dataset by name, from `data`, from `FEDFLAT_DATA`, or from the usual caches."""
    from .catalogue import SOURCES, digits
    from .loading import load

    name = name.replace("_", "-").lower()
    if name == "digits":
        return digits()
    if name not in SOURCES:
        raise FedflatError(f"There is no dataset '{name}'.{nearest(name, dataset_names())}")
    return load(SOURCES[name], data, download)


def federate(
    dataset: str | Path | Dataset,
    partition: str | Partition = "iid",
    clients: int | None = None,
    seed: int = 0,
    augment: str | None = None,
    data: str | Path | None = None,
    download: bool = False,
) -> Federation:
    """Partition a dataset over clients.

    Args:
        dataset: a name, or what `read_table`, `read_images` or `from_torch` gave.
        partition: how samples are partitioned, such as `Dirichlet(0.1)` or `"dirichlet:0.1"`.
        clients: how many; by default all users or domains for partitions by them, else what is usual.
        seed: of the partition.
        augment: how training images are augmented; None is what is usual for the dataset.
        data: the directory to look for the dataset in.
        download: whether it may be downloaded if it is not there.
    """
    if isinstance(dataset, str | Path):
        _refuse_paths(Path(dataset))
        dataset = load_dataset(str(dataset), data, download)
    if not isinstance(dataset, Dataset):
        raise FedflatError(
            f"federate() takes a dataset by name, or what read_table, read_images or from_torch gives, not a "
            f"{type(dataset).__name__}. Arrays that are partitioned already make a Federation(clients=[(x, y), ...])."
        )
    if isinstance(partition, str):
        partition = parse_partition(partition)
    if not hasattr(partition, "split"):
        raise FedflatError(f'partition must be such as Dirichlet(0.1) or "dirichlet:0.1", not {partition!r}.')
    if clients is None and not isinstance(partition, ByUser | ByDomain):
        clients = protocol_for(dataset.name).clients
    if clients is not None and not isinstance(clients, int):
        raise FedflatError(f"clients={clients!r}: give a whole number.")
    if clients is not None and clients < 1:
        raise FedflatError(f"A federation needs at least one client, not {clients}.")
    dealt = partition.split(dataset.labels, clients, seed, dataset.groups)
    federation = Federation.from_indices(
        dataset.train,
        dealt if dataset.rows is None else [dataset.rows[positions] for positions in dealt],
        dataset.test,
        dataset.classes,
        dataset.name,
        _augmented(dataset, augment),
        dataset.vocabulary,
    )
    federation.task = dataset.task
    federation.note, federation.caveats = dataset.note, dataset.caveats
    federation.preprocessing = describe_preprocessing(dataset, dealt)
    names = federation.preprocessing.get("clients")
    if names is not None:
        federation.client_names = tuple(names)
        if dataset.test_groups is not None:
            federation.test_owners = _owners(dataset, names)
    if dataset.test_groups is not None:
        federation.set_test_groups(dataset.test_groups, dataset.group_names)
    return federation


def _owners(dataset: Dataset, names: Sequence[str]) -> Tensor | None:
    """The client of every test sample; None where one belongs to nobody who trains."""
    client = {name: number for number, name in enumerate(names)}
    assert dataset.test_groups is not None
    by_group = np.array([client.get(name, -1) for name in dataset.group_names])
    owners = by_group[dataset.test_groups]
    return None if (owners < 0).any() else torch.from_numpy(owners)


def _refuse_paths(path: Path) -> None:
    """A person's own file or folder is read first, since there is more to say about it."""
    if path.is_file() or path.suffix in (".csv", ".parquet"):
        raise FedflatError(f"Read {path} first: federate(read_table('{path}', target=...), ...).")
    if path.is_dir() and path.name.replace("_", "-").lower() not in dataset_names():
        raise FedflatError(f"Read {path} first: federate(read_images('{path}'), ...).")


def _augmented(dataset: Dataset, augment: str | None) -> Pipeline:
    chosen = find_augmentation(augment or dataset.augmentation)
    if isinstance(dataset.pipeline, Images):
        return replace(dataset.pipeline, augmentation=chosen)
    if chosen.random:
        raise FedflatError(f"{dataset.name} has no stored images to augment; leave out augment='{augment}'.")
    return dataset.pipeline
