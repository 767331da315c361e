"""A convolution that is quick on small images.

Deep in a residual network an image is a few pixels, and a padded 3x3 kernel multiplies mostly zeros there: 8/9 of
its work on one pixel, 5/9 on 2x2. PyTorch's library for the CPU does that work all the same, and its gradient for
the weights takes up to twenty times as long again. `Conv2d` computes with one matrix product per tap of the kernel,
over those pixels that the tap meets, and not at all for a tap that meets none. It is otherwise PyTorch's:
parameters, their names and initial values, and every number to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

# Where that is quicker, measured on one core with batches of 10 to 500 samples:
CHANNELS = 128 * 128
"""from so many inputs times outputs on the arithmetic outweighs the calls"""
PIXELS = 4
"""up to so many pixels of the output image, in every pass"""
PIXELS_FOR_WEIGHTS = 64
"""up to so many, for the gradient of the weights"""


class Conv2d(nn.Conv2d):
    """`nn.Conv2d`, by matrix products per tap where that is quicker: many channels, a small image, the CPU."""

    channels_last = True
    """how a flat model lays out the kernel: convolutions are then quicker at any size"""

    def forward(self, x: Tensor) -> Tensor:
        """The convolution."""
        geometry = self._geometry(x)
        if geometry is None:
            return super().forward(x)
        y = _apply(convolve, x, self.weight, geometry)
        # a tensor of its own: what follows may change it in place, which autograd forbids for a view
        return y.clone() if self.bias is None else y + self.bias.view(-1, 1, 1)

    def _geometry(self, x: Tensor) -> Geometry | None:
        """How kernel and image meet; None where PyTorch's convolution is to be taken."""
        padding = self.padding
        if x.device.type != "cpu" or x.dim() != 4 or self.in_channels * self.out_channels < CHANNELS:
            return None
        if (
            isinstance(padding, str)
            or self.padding_mode != "zeros"
            or self.groups > 1
            or max(self.dilation) > 1
        ):
            return None
        geometry = _geometry(tuple(x.shape[2:]), self.kernel_size, self.stride, padding)
        return geometry if 0 < geometry.pixels <= PIXELS_FOR_WEIGHTS else None


@dataclass(frozen=True)
class Geometry:
    """How a kernel moves over an image; every size is (height, width)."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """The size of the output image."""
        sides = zip(self.image, self.kernel, self.stride, self.padding, strict=True)
        return tuple(max(0, (n + 2 * padding - k) // stride + 1) for n, k, stride, padding in sides)

    @cached_property
    def pixels(self) -> int:
        """The number of output pixels."""
        return self.outputs[0] * self.outputs[1]

    @cached_property
    def taps(self) -> list[tuple[Any, Any, Any]]:
        """For every tap that meets the image: where its weights are, the inputs it meets, the outputs they go to."""
        every = slice(None)
        return [
            ((every, row, column), (every, upper, left), (every, top, start))
            for row, upper, top in self._along(0)
            for column, left, start in self._along(1)
        ]

    @cached_property
    def few(self) -> bool:
        """Whether products per tap are the quicker way for inputs and outputs too."""
        return self.pixels <= PIXELS or len(self.taps) == 1

    def _along(self, axis: int) -> list[tuple[int, slice, slice]]:
        size, outputs, stride = self.image[axis], self.outputs[axis], self.stride[axis]
        meetings = []
        for tap in range(self.kernel[axis]):
            shift = tap - self.padding[axis]  # output o meets input o * stride + shift
            first = max(0, -(shift // stride))
            last = min(outputs - 1, (size - 1 - shift) // stride)
            if first <= last:
                inputs = slice(first * stride + shift, last * stride + shift + 1, stride)
                meetings.append((tap, inputs, slice(first, last + 1)))
        return meetings


_geometry = lru_cache(Geometry)


def convolve(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """The outputs."""
    if not geometry.few:
        return torch.conv2d(x, w, None, geometry.stride, geometry.padding)
    x, w = _pixels(x), _pixels(w)
    y = x.new_zeros(len(x), *geometry.outputs, len(w))
    for weights, inputs, outputs in geometry.taps:
        part = y[outputs]
        part += (_rows(x[inputs]) @ w[weights].mT).view(part.shape)
    return y.permute(0, 3, 1, 2)


def gradient_for_inputs(dy: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """The gradient for the inputs, from the one for the outputs."""
    if not geometry.few:
        shape = (len(dy), w.shape[1], *geometry.image)
        dx: Tensor = conv2d_input(shape, w, dy, geometry.stride, geometry.padding)  # type: ignore[no-untyped-call]
        return dx
    dy, w = _pixels(dy), _pixels(w)
    dx = dy.new_zeros(len(dy), *geometry.image, w.shape[-1])
    for weights, inputs, outputs in geometry.taps:
        part = dx[inputs]
        part += (_rows(dy[outputs]) @ w[weights]).view(part.shape)
    return dx.permute(0, 3, 1, 2)


def gradient_for_weights(dy: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
    """The gradient for the weights, from the one for the outputs."""
    dy, x = _pixels(dy), _pixels(x)
    complete = len(geometry.taps) == geometry.kernel[0] * geometry.kernel[1]
    new = dy.new_empty if complete else dy.new_zeros
    dw = new(dy.shape[-1], *geometry.kernel, x.shape[-1])
    for weights, inputs, outputs in geometry.taps:
        torch.mm(_rows(dy[outputs]).mT, _rows(x[inputs]), out=dw[weights])
    return dw.permute(0, 3, 1, 2)


def _pixels(images: Tensor) -> Tensor:
    """The channels last."""
    return images.permute(0, 2, 3, 1)


def _rows(pixels: Tensor) -> Tensor:
    """One pixel a row."""
    return pixels.flatten(0, 2)


_transforming: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


class _Convolution(torch.autograd.Function):
    """`operation(a, b, geometry)`, one of the three above.

    Each is linear in a and in b, and its gradients are given by the other two: derivatives exist to any order.
    """

    @staticmethod
    def forward(operation: Callable[..., Tensor], a: Tensor, b: Tensor, geometry: Geometry) -> Tensor:
        return operation(a, b, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.operation, a, b, ctx.geometry = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[None, Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        for_a, for_b = {
            convolve: ((gradient_for_inputs, d, b), (gradient_for_weights, d, a)),
            gradient_for_inputs: ((convolve, d, b), (gradient_for_weights, a, d)),
            gradient_for_weights: ((convolve, b, d), (gradient_for_inputs, a, d)),
        }[ctx.operation]
        # `apply` takes as long as a small product: without it where nobody differentiates or batches the result
        final = not (torch.is_grad_enabled() or _transforming())
        run = _Convolution.forward if final else _apply
        _, needs_a, needs_b, _ = ctx.needs_input_grad
        da = run(*for_a, ctx.geometry) if needs_a else None
        db = run(*for_b, ctx.geometry) if needs_b else None
        return None, da, db, None

    @staticmethod
    def jvp(ctx: Any, _: None, da: Tensor | None, db: Tensor | None, __: None) -> Tensor:
        a, b = ctx.saved_tensors
        parts = [_apply(ctx.operation, da, b, ctx.geometry)] if da is not None else []
        parts += [_apply(ctx.operation, a, db, ctx.geometry)] if db is not None else []
        return torch.stack(parts).sum(dim=0)

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], operation: Any, a: Tensor, b: Tensor, geometry: Geometry
    ) -> tuple[Tensor, int]:
        pairs = zip(_slices(a, dims[1], info.batch_size), _slices(b, dims[2], info.batch_size), strict=True)
        return torch.stack([_apply(operation, *pair, geometry) for pair in pairs]), 0


_apply: Callable[..., Tensor] = _Convolution.apply


def _slices(tensor: Tensor, dim: int | None, number: int) -> Sequence[Tensor]:
    return [tensor] * number if dim is None else tensor.unbind(dim)
