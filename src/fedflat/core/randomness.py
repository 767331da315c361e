"""All randomness of a run, drawn from counter-based generators keyed by what it is for.

A draw depends on `(seed, purpose, round, client)` and on nothing else: not on the engine, the number of
workers, the order in which clients are processed, or on how often the run was interrupted.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_seeding = threading.RLock()
"""Torch's own generators belong to the whole process: threads take turns with them."""


def _after_fork() -> None:
    """In a new process no thread holds the lock, whoever did where it comes from."""
    global _seeding
    _seeding = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def key(seed: int, purpose: str, *place: int) -> int:
    """128 bits that identify one stream of random numbers."""
    text = ":".join([str(int(seed)), purpose, *(str(int(p)) for p in place)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def generator(seed: int, purpose: str, *place: int) -> np.random.Generator:
    """A Philox generator for one purpose in one place, usually `(round, client)`."""
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, *place)))


@contextmanager
def torch_seeded(seed: int, purpose: str, *place: int) -> Iterator[None]:
    """Seed torch's own generators inside the block (initial weights, dropout), restore them after it.

    Another thread waits here until the block is left: two trainings in one process take turns, client by client.
    """
    number = key(seed, purpose, *place) % 2**63
    with _seeding:
        generators = [torch.default_generator, *torch.cuda.default_generators]
        before = [each.get_state() for each in generators]
        for each in generators:
            each.manual_seed(number)  # not torch.manual_seed: that formats a stack trace every time
        try:
            yield
        finally:
            for each, state in zip(generators, before, strict=True):
                each.set_state(state)
