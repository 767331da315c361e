"""Datasets, partitions and federations."""

from __future__ import annotations

from ..errors import FedflatError, nearest
from .federation import Federation
from .partitions import Partition, parse_partition


def federate(
    dataset: str, partition: str | Partition = "iid", clients: int = 10, seed: int = 0
) -> Federation:
    """A named dataset, dealt out to clients."""
    from .digits import load_digits

    loaders = {"digits": load_digits}
    if dataset not in loaders:
        raise FedflatError(f"There is no dataset '{dataset}'.{nearest(dataset, loaders)}")
    if clients < 1:
        raise FedflatError(f"A federation needs at least one client, not {clients}.")
    if isinstance(partition, str):
        partition = parse_partition(partition)
    train, test = loaders[dataset]()
    indices = partition.split(train[1].numpy(), clients, seed)
    return Federation.from_indices(train, indices, test, name=dataset)
