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

from ...core.messages import Parts, convert
from ...errors import FedflatError

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


class Place(str):
    """The name of a vector that lies in shared memory."""


class SharedMemory:
    """Named vectors in a mapped file, which goes with the process that made it, or with `close`."""

    def __init__(self, plan: Plan, handle: int | None = None) -> None:
        self.plan, self._handle = plan, handle
        try:
            self._all = torch.from_file(str(plan.path), shared=True, size=plan.elements, dtype=plan.dtype)
        except RuntimeError as problem:
            raise FedflatError(f"Shared memory cannot be opened: {str(problem).splitlines()[0]}.") from None

    @classmethod
    def make(cls, sizes: Mapping[str, int], dtype: torch.dtype) -> SharedMemory:
        """Room for vectors of the given sizes."""
        places, elements = {}, 0
        step = _ALIGNMENT // dtype.itemsize
        for name, size in sizes.items():
            places[name] = (elements, size)
            elements += -(-size // step) * step
        handle, name = _make_file(elements * dtype.itemsize)
        path = Path(f"/proc/{os.getpid()}/fd/{handle}")
        if os.access(
            path, os.R_OK | os.W_OK
        ):  # Linux: no name is needed, so that a crash leaves no file behind
            Path(name).unlink()
            try:
                return cls(Plan(path, dtype, places, elements), handle)
            except FedflatError:
                os.close(handle)
                raise
        os.close(handle)
        return cls(Plan(Path(name), dtype, places, elements))

    def __getitem__(self, name: str) -> Tensor:
        first, size = self.plan.places[name]
        return self._all[first : first + size]

    def store(self, parts: Parts, slot: object) -> Parts:
        """Write a message's vectors into a slot, and return the message with their places instead."""

        def aside(place: str, vector: Tensor) -> Tensor:
            return vector.clone() if self._holds(vector, but=f"{slot} {place}") else vector

        def write(place: str, vector: Tensor) -> Place:
            self[f"{slot} {place}"].copy_(vector)
            return Place(f"{slot} {place}")

        # a vector that was received under another name lies where the next may be written: it is copied first
        return convert(convert(parts, Tensor, aside), Tensor, write)

    def load(self, parts: Parts, device: torch.device | str) -> Parts:
        """Put the vectors back into a message that `store` returned; on the CPU they lie here still."""
        return convert(parts, Place, lambda _, place: self[place].to(device))

    def _holds(self, vector: Tensor, but: str) -> bool:
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


def _make_file(size: int) -> tuple[int, str]:
    """A file of a size, its handle and its name: in memory-backed storage, or else in the temporary folder.

    In containers memory-backed storage can be tiny. All of the room is taken at once: a file with holes that has none
    later on ends the process that writes to it, with no exception.
    """
    problem: OSError | None = None
    for place in (_SHARED_MEMORY, None):
        if place is not None and not (_is_roomy(place, size)):
            continue
        try:
            handle, name = tempfile.mkstemp(prefix="fedflat-", suffix=".vectors", dir=place)
        except OSError as refused:
            problem = refused
            continue
        try:
            (os.posix_fallocate if hasattr(os, "posix_fallocate") else _stretch)(handle, 0, size)
            return handle, name
        except OSError as refused:
            problem = refused
            os.close(handle)
            Path(name).unlink()
    assert problem is not None
    raise FedflatError(
        f"Worker processes share {size / 1e6:,.1f} MB, for which there is room neither in {_SHARED_MEMORY} nor in "
        f"the temporary folder ({problem.strerror}). Make room, set TMPDIR to a folder that has it, or use fewer "
        "workers or engine='inprocess'."
    )


def _stretch(handle: int, start: int, size: int) -> None:
    os.ftruncate(handle, size)


def _is_roomy(place: Path, needed: int) -> bool:
    usable = place.is_dir() and os.access(place, os.W_OK)
    return usable and shutil.disk_usage(place).free > 2 * needed
