"""A convolution that is quick on the CPU.

Small images go through one matrix product per tap (`taps`), large ones with many channels through fewer
multiplications (`winograd`), all others through PyTorch's own convolution. It is otherwise PyTorch's: parameters,
their names and initial values, and every number to rounding.

Which way is the quickest depends on the processor, and the last bits depend on the way. So a layer decides by a table
and never by a clock; which column of the table it goes by is settled where it is made, and goes with it to other
processes and machines. PyTorch's layer is taken wherever nothing was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .taps import Taps
from .winograd import Winograd


@dataclass(frozen=True)
class Limits:
    """Where other ways than PyTorch's are quicker, forward and backward together."""

    weights: int
    """`winograd` from this many weights,"""
    tiles: int
    """this many tiles of a batch"""
    products: int
    """and this many tiles times weights on;"""
    channels: int
    """else `taps` from this many inputs times outputs on"""
    pixels: int
    """and up to this many pixels of the output image"""


TABLE = {
    # EPYC, batches of 10 to 500 samples.
    "AVX2": Limits(64 * 64 * 9, tiles=40, products=100 * 64 * 64 * 9, channels=128 * 128, pixels=64),
    # PyTorch's convolution gains more from wide registers than Winograd's transforms do. How much faster than it
    # Winograd is, on EPYC and on Intel: 0.7 to 1.3 and 0.55 to 0.91 up to 64 channels, 1.2 to 2.4 and 1.2 to 1.9 from
    # 256 on (between them Intel was not measured); on EPYC with fewer than 80 tiles 0.7 to 1.8. Taps are 1.2 to 7
    # times faster up to 4 pixels from 256 channels on, else 0.6 to 1.4. `python -m benchmarks convolutions` measures.
    "AVX512": Limits(256 * 256 * 9, tiles=80, products=80 * 256 * 256 * 9, channels=256 * 256, pixels=4),
}
"""By what `torch.backends.cpu.get_cpu_capability` says; measured on one core."""
PLAIN = "plain"
"""The column of PyTorch's own convolution at any shape."""


def column_here() -> str:
    """The column of this machine's processor."""
    found: str = torch.backends.cpu.get_cpu_capability()
    return found if found in TABLE else PLAIN


class Conv2d(nn.Conv2d):
    """`nn.Conv2d`, by the quickest of three ways."""

    channels_last = True
    """how a flat model lays out the kernel, by whichever way: convolutions are then quicker at any size"""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.column = column_here()
        """of the table; kept in copies, also those in other processes"""

    def forward(self, x: Tensor) -> Tensor:
        """The convolution."""
        way = self._way(x)
        if way is None:
            return super().forward(x)
        y = _apply("convolve", x, self.weight, way)
        # a tensor of its own: what follows may change it in place, which autograd forbids for a view
        return y.clone() if self.bias is None else y + self.bias.view(-1, 1, 1)

    def _way(self, x: Tensor) -> Taps | Winograd | None:
        """How it is computed; None where PyTorch's convolution is to be taken."""
        limits, padding = TABLE.get(self.column), self.padding
        if limits is None or x.device.type != "cpu" or x.dim() != 4:
            return None
        if x.dtype not in (torch.float32, torch.float64):
            return None
        if (
            isinstance(padding, str)
            or self.padding_mode != "zeros"
            or self.groups > 1
            or max(self.dilation) > 1
        ):
            return None
        winograd, taps = _ways(tuple(x.shape[2:]), self.kernel_size, self.stride, padding)
        if winograd is not None and winograd.saves:
            tiles, weights = len(x) * winograd.tiles[0] * winograd.tiles[1], self.weight.numel()
            if tiles >= limits.tiles and weights >= limits.weights and tiles * weights >= limits.products:
                return winograd
        many = self.in_channels * self.out_channels >= limits.channels
        return taps if many and 0 < taps.pixels <= limits.pixels else None


def column_of(module: nn.Module) -> str | None:
    """The column that a module's convolutions go by; None where it has none of these."""
    return next((layer.column for layer in module.modules() if isinstance(layer, Conv2d)), None)


def set_column(module: nn.Module, column: str | None) -> None:
    """Let a module's convolutions go by a column; one that the table does not have is PyTorch's own layer."""
    for layer in module.modules():
        if column is not None and isinstance(layer, Conv2d):
            layer.column = column


def set_recorded(module: nn.Module, settings: Mapping[str, Any]) -> None:
    """Let a module's convolutions go by the column that a run began with, as its `run.json` says."""
    # runs that say nothing are from when there was one column for every processor
    set_column(module, (settings.get("convolutions") or {}).get("column", "AVX2"))


def count_ways(module: nn.Module, sample: Tensor, samples: int) -> dict[str, Any] | None:
    """How a module's convolutions are computed, for `run.json`: their column, and how many of them go which way.

    `sample` is a batch of one, and counted is for a batch of that size; None where the module has none of these.
    """
    column = column_of(module)
    if column is None:
        return None
    counts = {"plain": 0, "taps": 0, "winograd": 0}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, Conv2d)
        way = layer._way(inputs[0].expand(samples, *inputs[0].shape[1:]))
        counts["plain" if way is None else type(way).__name__.lower()] += 1

    hooks = [m.register_forward_pre_hook(note) for m in module.modules() if isinstance(m, Conv2d)]
    try:
        with torch.no_grad():
            module(sample)
    finally:
        for hook in hooks:
            hook.remove()
    return {"column": column, "samples": samples, **counts}


@lru_cache
def _ways(
    image: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...]
) -> tuple[Winograd | None, Taps]:
    fits = Winograd.fits(image, kernel, stride, padding)
    return Winograd(image, kernel[0], padding) if fits else None, Taps(image, kernel, stride, padding)


_transforming: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


class _Convolution(torch.autograd.Function):
    """`operation(a, b)`, one of the three that a way has.

    Each is linear in a and in b, and its gradients are given by the other two: derivatives exist to any order.
    """

    @staticmethod
    def forward(operation: str, a: Tensor, b: Tensor, way: Taps | Winograd) -> Tensor:
        result: Tensor = getattr(way, operation)(a, b)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.operation, a, b, ctx.way = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[None, Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        _, needs_a, needs_b, _ = ctx.needs_input_grad
        # `apply` takes as long as a small product: without it where nothing differentiates or batches the result
        final = not (torch.is_grad_enabled() or _transforming())
        if final and needs_a and needs_b and ctx.operation == "convolve":
            return None, *ctx.way.gradients(d, a, b), None
        for_a, for_b = {
            "convolve": (("gradient_for_inputs", d, b), ("gradient_for_weights", d, a)),
            "gradient_for_inputs": (("convolve", d, b), ("gradient_for_weights", a, d)),
            "gradient_for_weights": (("convolve", b, d), ("gradient_for_inputs", a, d)),
        }[ctx.operation]
        run = _Convolution.forward if final else _apply
        da = run(*for_a, ctx.way) if needs_a else None
        db = run(*for_b, ctx.way) if needs_b else None
        return None, da, db, None

    @staticmethod
    def jvp(ctx: Any, _: None, da: Tensor | None, db: Tensor | None, __: None) -> Tensor:
        a, b = ctx.saved_tensors
        parts = [_apply(ctx.operation, da, b, ctx.way)] if da is not None else []
        parts += [_apply(ctx.operation, a, db, ctx.way)] if db is not None else []
        return torch.stack(parts).sum(dim=0)

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], operation: str, a: Tensor, b: Tensor, way: Taps | Winograd
    ) -> tuple[Tensor, int]:
        pairs = zip(_slices(a, dims[1], info.batch_size), _slices(b, dims[2], info.batch_size), strict=True)
        return torch.stack([_apply(operation, *pair, way) for pair in pairs]), 0


_apply: Callable[..., Tensor] = _Convolution.apply


def _slices(tensor: Tensor, dim: int | None, number: int) -> Sequence[Tensor]:
    return [tensor] * number if dim is None else tensor.unbind(dim)
