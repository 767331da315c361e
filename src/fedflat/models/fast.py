"""A convolution that is quick on small images.

Deep in a residual network an image is a few pixels, and a padded 3x3 kernel multiplies mostly zeros: 8/9 of its
work on one pixel, 5/9 on 2x2. The CPU's library does that work, and takes several times as long again for the
weights' gradient. `Conv2d` computes there with one matrix product per tap of the kernel, over those pixels that the
tap meets, and not at all for a tap that meets none. It is otherwise PyTorch's: parameters, names, initial values,
and every number to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

LARGEST_MAP = 16
"""Pixels of an output image up to which products per tap are quicker, by measurement: 4x4."""


class Conv2d(nn.Conv2d):
    """`nn.Conv2d`, by matrix products per tap where the output image is small and on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """The convolution."""
        geometry = self._geometry(x)
        if geometry is None:
            return super().forward(x)
        y: Tensor = _Outputs.apply(x, self.weight, geometry)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.view(-1, 1, 1)

    def _geometry(self, x: Tensor) -> Geometry | None:
        """How kernel and image meet, where products per tap are possible and pay."""
        padding = self.padding
        if isinstance(padding, str) or self.padding_mode != "zeros" or self.groups > 1 or x.device.type != "cpu":
            return None
        if x.dim() != 4 or max(self.dilation) > 1:
            return None
        geometry = _geometry(tuple(x.shape[2:]), self.kernel_size, self.stride, padding)
        return geometry if 0 < geometry.pixels <= LARGEST_MAP else None


@dataclass(frozen=True)
class Geometry:
    """How a kernel moves over an image: (height, width) of each."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """The size of the output image."""
        sides = zip(self.image, self.kernel, self.stride, self.padding, strict=True)
        return tuple((n + 2 * padding - k) // stride + 1 for n, k, stride, padding in sides)

    @cached_property
    def pixels(self) -> int:
        """The number of output pixels."""
        return self.outputs[0] * self.outputs[1]

    @cached_property
    def taps(self) -> list[tuple[Any, Any, Any]]:
        """For every tap that meets the image, the places of its weights, of its inputs and of its outputs."""
        every = slice(None)
        return [
            ((every, row, column), (every, above, left), (every, up, along))
            for row, above, up in self._along(0)
            for column, left, along in self._along(1)
        ]

    @cached_property
    def all_meet(self) -> bool:
        """Whether every tap meets the image."""
        return len(self.taps) == self.kernel[0] * self.kernel[1]

    def _along(self, axis: int) -> list[tuple[int, slice, slice]]:
        n, outputs, stride = self.image[axis], self.outputs[axis], self.stride[axis]
        meetings = []
        for tap in range(self.kernel[axis]):
            shift = tap - self.padding[axis]  # output o meets input o * stride + shift
            first = max(0, -(shift // stride))
            count = min(outputs, (n - 1 - shift) // stride + 1) - first
            if count > 0:
                start = first * stride + shift
                inputs = slice(start, start + (count - 1) * stride + 1, stride)
                meetings.append((tap, inputs, slice(first, first + count)))
        return meetings


_geometry = lru_cache(Geometry)


class _Bilinear(torch.autograd.Function):
    """An operation on two tensors, linear in each."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Geometry], output: Tensor) -> None:
        a, b, ctx.geometry = inputs
        ctx.save_for_backward(a, b)


class _Outputs(_Bilinear):
    """`y = w * x`. The gradient of each of the three operations consists of the other two: any order exists."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
        x, w = _pixels(x), _pixels(w)
        y = x.new_zeros(len(x), *geometry.outputs, len(w))
        for weights, inputs, outputs in geometry.taps:
            y[outputs].add_(_rows(x[inputs]).mm(w[weights].mT).view_as(y[outputs]))
        return y.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        of_x, of_w, _ = ctx.needs_input_grad
        return (
            _Inputs.apply(dy, w, ctx.geometry) if of_x else None,
            _Weights.apply(dy, x, ctx.geometry) if of_w else None,
            None,
        )


class _Inputs(_Bilinear):
    """The gradient for the inputs, from that for the outputs and the weights."""

    @staticmethod
    def forward(dy: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
        dy, w = _pixels(dy), _pixels(w)
        dx = dy.new_zeros(len(dy), *geometry.image, w.shape[-1])
        for weights, inputs, outputs in geometry.taps:
            dx[inputs].add_(_rows(dy[outputs]).mm(w[weights]).view_as(dx[inputs]))
        return dx.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dy, w = ctx.saved_tensors
        of_dy, of_w, _ = ctx.needs_input_grad
        return (
            _Outputs.apply(ddx, w, ctx.geometry) if of_dy else None,
            _Weights.apply(dy, ddx, ctx.geometry) if of_w else None,
            None,
        )


class _Weights(_Bilinear):
    """The gradient for the weights, from that for the outputs and the inputs."""

    @staticmethod
    def forward(dy: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
        dy, x = _pixels(dy), _pixels(x)
        new = dy.new_empty if geometry.all_meet else dy.new_zeros
        dw = new(dy.shape[-1], *geometry.kernel, x.shape[-1])
        for weights, inputs, outputs in geometry.taps:
            torch.mm(_rows(dy[outputs]).mT, _rows(x[inputs]), out=dw[weights])
        return dw.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, ddw: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dy, x = ctx.saved_tensors
        of_dy, of_x, _ = ctx.needs_input_grad
        return (
            _Outputs.apply(x, ddw, ctx.geometry) if of_dy else None,
            _Inputs.apply(dy, ddw, ctx.geometry) if of_x else None,
            None,
        )


def _pixels(images: Tensor) -> Tensor:
    """Channels last."""
    return images.permute(0, 2, 3, 1)


def _rows(pixels: Tensor) -> Tensor:
    """One pixel a row."""
    return pixels.flatten(0, 2)
