"""The memory of vectors: allocating it, and looking at its bytes."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

OWN_PAGES = 2**16
"""Give a vector pages of its own from this many bytes on."""
MOST_MAPPINGS = 30_000
"""Map at most this many vectors: Linux allows a process about twice as many mappings."""


def new_vector(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate a vector whose memory returns to the system as soon as the vector is gone.

    The usual allocator keeps freed pieces between others still in use: with thousands of vectors that come and go, a
    process grows to twice the size of what it holds.
    """
    count = math.prod(shape)
    if count * dtype.itemsize < OWN_PAGES or _Pages.alive >= MOST_MAPPINGS:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(_Pages(-1, count * dtype.itemsize), dtype=dtype, count=count).view(shape)


class _Pages(mmap.mmap):
    """Memory straight from the system."""

    alive = 0

    def __init__(self, *_: int) -> None:
        _Pages.alive += 1

    def __del__(self) -> None:
        _Pages.alive -= 1


def memory(vector: Tensor) -> memoryview:
    """View the bytes of a vector; they are copied only if it is not contiguous or not on the CPU."""
    return vector.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
