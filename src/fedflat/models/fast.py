"""A convolution that is quick on the CPU.

Small images go through one matrix product per tap (`taps`), large ones with many channels through fewer
multiplications (`winograd`), all others through PyTorch's own convolution. It is otherwise PyTorch's: parameters,
their names and initial values, and every number to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .taps import Taps
from .winograd import Winograd

# Where which is quicker, measured on one core with batches of 10 to 500 samples:
CHANNELS = 128 * 128
"""from so many inputs times outputs on taps' arithmetic outweighs their calls"""
PIXELS = 64
"""up to so many pixels of the output image"""


class Conv2d(nn.Conv2d):
    """`nn.Conv2d`, by the quickest of three ways."""

    channels_last = True
    """how a flat model lays out the kernel: convolutions are then quicker at any size"""

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
        padding = self.padding
        if x.device.type != "cpu" or x.dim() != 4 or x.dtype not in (torch.float32, torch.float64):
            return None
        if (
            isinstance(padding, str)
            or self.padding_mode != "zeros"
            or self.groups > 1
            or max(self.dilation) > 1
        ):
            return None
        winograd, taps = _ways(tuple(x.shape[2:]), self.kernel_size, self.stride, padding)
        if winograd is not None and winograd.pays(len(x), self.weight.numel()):
            return winograd
        many = self.in_channels * self.out_channels >= CHANNELS
        return taps if many and 0 < taps.pixels <= PIXELS else None


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
        # `apply` takes as long as a small product: without it where nobody differentiates or batches the result
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
