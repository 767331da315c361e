"""Uploads where they enter: what makes one bad, and what is done to one that is too long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.finite import is_as_finite, is_finite
from ..core.messages import Upload
from ..errors import FedflatError

if TYPE_CHECKING:
    from .server import Server


class RejectedUpload(FedflatError):
    """An upload that must not touch the model, with the client, the round and the reason."""


def fault_of(upload: Upload, server: Server) -> str | None:
    """Find why an upload must be refused; None if it is good."""
    if upload.round != server.round:
        return f"the upload belongs to round {upload.round}; this is round {server.round}."
    if not 0 <= upload.client < server.clients or upload.client in server.heard:
        return (
            "it has answered already."
            if upload.client in server.heard
            else "there is no client of this number."
        )
    vectors: Mapping[str, object] = {"update": upload.update, **upload.vectors}
    missing = [name for name in server.method.up if name not in upload.vectors]
    if missing:
        return f"the upload lacks '{missing[0]}', which {server.method.name} needs."
    unknown = [name for name in upload.vectors if name not in server.method.up]
    if unknown:
        return f"the upload holds '{unknown[0]}', which {server.method.name} does not know."
    for name, vector in vectors.items():
        if not isinstance(vector, Tensor) or vector.shape != server.w.shape:
            shape = tuple(vector.shape) if isinstance(vector, Tensor) else type(vector).__name__
            return f"'{name}' has shape {shape}, expected {tuple(server.w.shape)}."
        if vector.dtype != server.w.dtype:
            return f"'{name}' has type {vector.dtype}, expected {server.w.dtype}."
        if not is_finite(vector):
            return f"'{name}' holds NaN or infinite values."
    if not (0 < upload.samples < math.inf and 0 < upload.steps < math.inf):
        return f"{upload.samples} samples and {upload.steps} steps: both must be positive."
    if upload.buffers is not None:
        expected = None if server.buffers is None else server.buffers.shape
        if upload.buffers.shape != expected:
            return f"its buffers have shape {tuple(upload.buffers.shape)}, expected {expected}."
        if not is_as_finite(upload.buffers, server.buffers):
            return "its buffers hold NaN or infinite values."
        if server.rules is not None and server.buffers is not None:
            return server.rules.fault(upload.buffers, server.buffers, upload.steps)
    return None


def bounded_vector(upload: Upload, name: str, server: Server) -> Tensor:
    """Find what a norm bound is about: a vector by name, or how far the buffers' statistics went."""
    if name != "buffers":
        return upload.update if name == "update" else upload.vectors[name]
    if upload.buffers is None or server.buffers is None:
        return server.w.new_zeros(1)
    change = torch.where(upload.buffers == server.buffers, 0.0, upload.buffers - server.buffers)
    return change if server.rules is None else server.rules.statistics(change)


def within_bounds(upload: Upload, server: Server) -> tuple[Upload, str | None]:
    """Shorten what is longer than allowed, or say why the upload must be refused."""
    for name, bound in server.norm_bounds.now.items():
        vector = bounded_vector(upload, name, server)
        length = length_of(vector)
        if length <= bound:
            continue
        if not server.clips:
            return upload, f"'{name}' has length {length:.4g}, more than {bound:.4g}."
        place = f"client {upload.client}, round {upload.round}"
        server.clipped.append(f"{place}: '{name}' had length {length:.4g}, clipped to {bound:.4g}.")
        shortened = vector * (bound / length)
        if name == "update":
            upload = replace(upload, update=shortened)
        elif name != "buffers":
            upload = replace(upload, vectors={**upload.vectors, name: shortened})
        elif upload.buffers is not None:
            upload = replace(upload, buffers=upload.buffers - (vector - shortened))
    return upload, None


def owned(upload: Upload) -> Upload:
    """Copy an upload into memory of its own."""
    vectors = {name: vector.clone() for name, vector in upload.vectors.items()}
    buffers = None if upload.buffers is None else upload.buffers.clone()
    return replace(upload, update=upload.update.clone(), vectors=vectors, buffers=buffers, borrowed=False)


def length_of(vector: Tensor) -> float:
    """`‖v‖₂` in double precision: a sum of squares of large float32 entries overflows."""
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64).item())
