"""Vectors that several processes see: one file mapped by all of them, so that nothing is pickled."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_ALIGNMENT = 64
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Plan:
    """Where each vector lies in the file; small enough to be sent to a process."""

    path: Path
    dtype: torch.dtype
    places: dict[str, tuple[int, int]]
    """first element and number of elements, by name"""
    elements: int


class Arena:
    """Named vectors in a mapped file, which goes with the process that made it, or with `close`."""

    def __init__(self, plan: Plan, handle: int | None = None) -> None:
        self.plan, self._handle = plan, handle
        self._all = torch.from_file(str(plan.path), shared=True, size=plan.elements, dtype=plan.dtype)

    @classmethod
    def make(cls, sizes: Mapping[str, int], dtype: torch.dtype) -> Arena:
        """Room for vectors of the given sizes."""
        places, elements = {}, 0
        step = _ALIGNMENT // dtype.itemsize
        for name, size in sizes.items():
            places[name] = (elements, size)
            elements += -(-size // step) * step
        needed = elements * dtype.itemsize
        handle, name = tempfile.mkstemp(prefix="fedflat-", suffix=".arena", dir=_roomy_directory(needed))
        os.ftruncate(handle, needed)
        path = Path(f"/proc/{os.getpid()}/fd/{handle}")
        if os.access(
            path, os.R_OK | os.W_OK
        ):  # Linux: no name is needed, so that a crash leaves no file behind
            Path(name).unlink()
            return cls(Plan(path, dtype, places, elements), handle)
        os.close(handle)
        return cls(Plan(Path(name), dtype, places, elements))

    def __getitem__(self, name: str) -> Tensor:
        first, size = self.plan.places[name]
        return self._all[first : first + size]

    def holds(self, vector: Tensor, but: str) -> bool:
        """Whether a vector lies here, elsewhere than in one place."""
        own = self._all.untyped_storage().data_ptr()
        return vector.untyped_storage().data_ptr() == own and vector.data_ptr() != self[but].data_ptr()

    def close(self) -> None:
        """Remove the file; processes that still map it keep their view."""
        if self._handle is None:
            self.plan.path.unlink(missing_ok=True)
        else:
            os.close(self._handle)
            self._handle = None


def _roomy_directory(needed: int) -> Path | None:
    """Memory-backed storage if it has ample room (in containers it can be tiny), else the temporary folder."""
    usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
    return _SHARED_MEMORY if usable and shutil.disk_usage(_SHARED_MEMORY).free > 2 * needed else None
