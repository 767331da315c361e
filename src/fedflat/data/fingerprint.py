"""A number that changes with a federation's data: inputs, targets, who owns what, and the test set."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING
from zlib import crc32

from torch import Tensor

from ..core.vector_memory import memory

if TYPE_CHECKING:
    from .federation import Federation

MOST = 2 * 2**30
"""Bytes of an array that are read; of a larger one, blocks that are evenly spaced."""
BLOCK = 2**20
"""Bytes that are read at a time."""


def fingerprint(federation: Federation) -> str:
    """Eight digits; a resumed run must have them again."""
    return f"{checksum(federation.arrays()):08x}"


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number that changes with types, shapes and entries."""
    total = 0
    for tensor in tensors:
        total = crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        if tensor.numel() == 0:
            continue
        rows = max(1, BLOCK * len(tensor) // tensor.nbytes)
        step = math.ceil(tensor.nbytes / MOST)
        for first in range(0, len(tensor), rows * step):
            total = crc32(memory(tensor[first : first + rows].cpu().contiguous()), total)
    return total
