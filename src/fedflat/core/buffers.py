"""A module's persistent buffers as one vector of floats, from which whole numbers come back exactly.

    all buffers, in the module's order | what rounding left of large whole numbers | what that left again

Three floats of 24 bits hold 64. A counter of BatchNorm is one float, which counts 16 million batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..errors import FedflatError

COUNTER = "num_batches_tracked"
EXACT = 2
"""Bytes of whole numbers that a float of any type holds."""


class Buffers:
    """Where a module keeps its persistent buffers; a module may put another tensor there at any time."""

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[dict[str, Tensor | None], str]] = []
        seen: set[int] = set()
        for held, name, buffer, _ in _all_buffers(module, persistent=True):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                self._places.append((held, name))

    def tensors(self) -> list[Tensor]:
        """All of them as they are now."""
        return [buffer for held, name in self._places if (buffer := held[name]) is not None]

    def read(self, dtype: torch.dtype) -> Tensor | None:
        """All as one vector; None where there are none."""
        tensors = [buffer.detach() for buffer in self.tensors()]
        if not tensors:
            return None
        pieces = [tensor.reshape(-1).to(dtype) for tensor in tensors]
        wide = [number for number, tensor in enumerate(tensors) if self._is_wide(number, tensor)]
        left = [tensors[number].reshape(-1).to(torch.int64) for number in wide]
        parts = [pieces[number] for number in wide]
        for _ in range(2):
            left = [rest - part.to(torch.int64) for rest, part in zip(left, parts, strict=True)]
            parts = [rest.to(dtype) for rest in left]
            pieces += parts
        return torch.cat(pieces)

    def write(self, values: Tensor) -> None:
        """Put back what `read` gave, or an average of it, of which whole numbers are rounded."""
        tensors = [buffer.detach() for buffer in self.tensors()]
        sizes = [tensor.numel() for tensor in tensors]
        wide = [number for number, tensor in enumerate(tensors) if self._is_wide(number, tensor)]
        rests = [sizes[number] for number in wide] * 2
        if len(values) == sum(sizes):  # of a run of an earlier version
            wide, rests = [], []
        pieces = torch.split(values, sizes + rests)
        for number, tensor in enumerate(tensors):
            parts = [pieces[number]]
            if number in wide:
                parts += pieces[len(sizes) + wide.index(number) :: len(wide)]
            tensor.copy_(_value(parts, tensor).view(tensor.shape))

    def _is_wide(self, number: int, tensor: Tensor) -> bool:
        whole = not tensor.is_floating_point() and tensor.element_size() > EXACT
        return whole and self._places[number][1] != COUNTER


def _value(parts: list[Tensor], like: Tensor) -> Tensor:
    """The sum of a number's parts, as exact as the tensor that it is for."""
    if len(parts) == 1:
        return parts[0] if like.is_floating_point() else parts[0].round()
    wholes = [part.trunc() for part in parts]  # a float of 64 bits could not hold their sum
    rest = sum(((p - w).double() for p, w in zip(parts, wholes, strict=True)), torch.zeros(()))
    return torch.stack([*(w.to(torch.int64) for w in wholes), rest.round().to(torch.int64)]).sum(dim=0)


class Unsent:
    """Buffers that are not persistent. They do not travel, so training has to leave them as they are."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {n: b.detach().clone() for _, _, b, n in _all_buffers(module, persistent=False)}

    def check(self) -> None:
        """Refuse a module that has changed one; one of another shape than before is taken for a table that grew."""
        for _, _, buffer, name in _all_buffers(self._module, persistent=False):
            before = self._before.get(name)
            if before is None or before.shape != buffer.shape or before.dtype != buffer.dtype:
                self._before[name] = buffer.detach().clone()
            elif bool(
                ((before != buffer) & ((before == before) | (buffer == buffer))).any()
            ):  # NaN is NaN here
                raise FedflatError(
                    f"{type(self._module).__name__} changes its buffer '{name}' in training, which is neither sent "
                    "nor kept, so that results would depend on who trains which client: register it without "
                    "persistent=False, or make it a plain attribute if nothing depends on it."
                )


def check_numbers(module: nn.Module, dtype: torch.dtype) -> None:
    """Refuse what a dense vector of floats would silently lose a part of: complex, sparse and too large numbers."""
    name, largest = type(module).__name__, torch.finfo(dtype).max
    named = [("parameter", n, p) for n, p in module.named_parameters()]
    for kind, place, tensor in [*named, *(("buffer", n, b) for n, b in module.named_buffers())]:
        if tensor.is_complex():
            raise FedflatError(
                f"{name} has the complex {kind} '{place}', and models here are of real numbers: keep its real and "
                "imaginary part, with torch.view_as_real, and join them in forward."
            )
        if tensor.layout != torch.strided:
            raise FedflatError(
                f"{name} has the sparse {kind} '{place}', and vectors here are dense: make it dense with to_dense(), "
                "or a plain attribute if training leaves it as it is."
            )
        if tensor.is_floating_point() and torch.finfo(tensor.dtype).max > largest:
            beyond = tensor.detach().abs()
            if bool(((beyond > largest) & beyond.isfinite()).any()):
                raise FedflatError(
                    f"{name} has numbers above {largest:.2g} in its {kind} '{place}', which {dtype} cannot hold: "
                    "give dtype=torch.float64, or smaller ones."
                )


def _all_buffers(
    module: nn.Module, persistent: bool
) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor, str]]:
    """Where every buffer is kept, under which name there, what it is, and its name in the whole module."""
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and (name not in child._non_persistent_buffers_set) == persistent:
                yield child._buffers, name, buffer, f"{prefix}.{name}" if prefix else name
