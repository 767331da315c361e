"""Dealing samples out by the clients' class proportions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ...errors import FedflatError
from .base import Partition, hands

NOTHING = 1e-300
"""A total weight below this counts as zero: products with it would be rounded away."""


def proportions(alpha: float, parts: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` draws from `Dir(α 1)` over `parts` parts."""
    return rng.dirichlet(
        np.full(parts, np.clip(alpha, 1e-300, 1e12)), size=count
    )  # beyond, it would overflow


def random_turns(clients: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Every client `size` times, in random order."""
    return rng.permutation(np.repeat(np.arange(clients), size))


def deal(
    priors: np.ndarray, classes: Sequence[np.ndarray], turns: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """At each turn a client draws a class from its prior and takes a sample of it; no sample goes twice.

    Classes that are used up are dropped and the priors renormalised; a client none of whose classes is left takes
    any sample that is.
    """
    pools = [pool.tolist() for pool in classes]
    left = np.array([len(pool) for pool in pools])
    scales: dict[int, list[float]] = {}  # the clients' cumulative weights of the classes that are left
    rows = []
    for client, draw in zip(turns.tolist(), rng.random(len(turns)).tolist(), strict=True):
        if client not in scales:
            scales[client] = np.cumsum(np.where(left > 0, priors[client], 0.0)).tolist()
        scale = scales[client]
        if scale[-1] < NOTHING:
            scale = list(accumulate(map(len, pools)))
        chosen = bisect_right(scale, draw * scale[-1])
        rows.append(pools[chosen].pop())
        if not pools[chosen]:
            left[chosen] = 0
            scales.clear()
    return hands(turns, np.array(rows), len(priors))


def deal_refilling(
    priors: np.ndarray, classes: Sequence[np.ndarray], size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """As `deal` at random turns, but a class that is used up starts again from its first sample."""
    clients = len(priors)
    owners, rows = [], []
    for pool, wanted in zip(classes, rng.multinomial(size, priors).T, strict=True):
        owners.append(rng.permutation(np.repeat(np.arange(clients), wanted)))
        rows.append(np.resize(rng.permutation(pool), len(owners[-1])))
    return hands(np.concatenate(owners), np.concatenate(rows), clients)


def deal_single_classes(
    partition: Partition, classes: Sequence[np.ndarray], clients: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Client i owns samples of class `i mod C` only; clients of the same class share it evenly."""
    result: list[np.ndarray] = [np.empty(0, np.int64)] * clients
    for number, pool in enumerate(classes[:clients]):
        sharing = range(number, clients, len(classes))
        if len(pool) < len(sharing):
            raise FedflatError(
                f"{partition}: client {sharing[len(pool)]} gets no sample, since its class has {len(pool)} for "
                f"{len(sharing)} clients; use fewer clients."
            )
        for client, part in zip(sharing, np.array_split(rng.permutation(pool), len(sharing)), strict=True):
            result[client] = np.sort(part)
    return result
