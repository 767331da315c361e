"""Tensors as arrays in memory that several processes share, without a copy."""

from __future__ import annotations

import io
import pickle
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.messages import Parts, convert


def to_arrays(parts: Parts) -> Parts:
    """A message with arrays in the place of tensors; on the CPU in the same memory."""
    return convert(parts, Tensor, lambda _, tensor: tensor.detach().cpu().numpy())


def to_tensors(parts: Parts, device: torch.device | str) -> Parts:
    """A message with tensors in the place of arrays; on the CPU in the same memory, which must then only be read."""
    return convert(parts, np.ndarray, lambda _, array: as_tensor(array, device))


def as_tensor(array: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
    """The array's numbers; on the CPU in the same memory, which must then only be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors, and says so
        return torch.from_numpy(array).to(device)


def pack(thing: Any) -> tuple[bytes, list[np.ndarray]]:
    """Something pickled, and beside it the memory of its tensors, every piece once however many tensors view it."""
    from ray import cloudpickle

    memories: dict[tuple[int, torch.dtype], np.ndarray] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, inner: Any) -> Any:
            if type(inner) is not Tensor or inner.device.type != "cpu" or inner.layout != torch.strided:
                return super().reducer_override(inner)
            memory = inner.untyped_storage()
            key = memory.data_ptr(), inner.dtype
            if key not in memories:
                memories[key] = torch.empty(0, dtype=inner.dtype).set_(memory).numpy()
            return _view, (memories[key], inner.shape, inner.stride(), inner.storage_offset())

    pieces: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    Pickler(stream, protocol=5, buffer_callback=pieces.append).dump(thing)
    return stream.getvalue(), [np.frombuffer(piece.raw(), dtype=np.uint8) for piece in pieces]


def unpack(pickled: bytes, pieces: list[np.ndarray]) -> Any:
    """What `pack` was given; its tensors lie in the pieces and must only be read."""
    return pickle.loads(pickled, buffers=pieces)


def _view(memory: np.ndarray, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """A tensor with its order in memory, on which the last bits of a convolution can depend."""
    return as_tensor(memory).as_strided(shape, stride, offset)
