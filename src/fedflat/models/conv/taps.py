"""Convolutions of small images, by one matrix product per tap of the kernel.

Deep in a residual network an image is a few pixels, and a padded 3x3 kernel multiplies mostly zeros there: 8/9 of
its work on one pixel, 5/9 on 2x2. PyTorch's library for the CPU does that work all the same, and its gradient for
the weights takes up to twenty times as long again. Here a tap is a product over those pixels that it meets, and a tap
that meets none is nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.grad import conv2d_input

PIXELS = 4
"""of the output image, up to which that is quicker in every pass; with more, for the weights' gradient only"""


@dataclass(frozen=True)
class Taps:
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

    def convolve(self, x: Tensor, w: Tensor) -> Tensor:
        """The outputs."""
        if not self.few:
            return torch.conv2d(x, w, None, self.stride, self.padding)
        x, w = _pixels(x), _pixels(w)
        y = x.new_zeros(len(x), *self.outputs, len(w))
        for weights, inputs, outputs in self.taps:
            part = y[outputs]
            part += (_rows(x[inputs]) @ w[weights].mT).view(part.shape)
        return y.permute(0, 3, 1, 2)

    def gradient_for_inputs(self, dy: Tensor, w: Tensor) -> Tensor:
        """The gradient for the inputs, from the one for the outputs."""
        if not self.few:
            shape = (len(dy), w.shape[1], *self.image)
            dx: Tensor = conv2d_input(shape, w, dy, self.stride, self.padding)  # type: ignore[no-untyped-call]
            return dx
        dy, w = _pixels(dy), _pixels(w)
        dx = dy.new_zeros(len(dy), *self.image, w.shape[-1])
        for weights, inputs, outputs in self.taps:
            part = dx[inputs]
            part += (_rows(dy[outputs]) @ w[weights]).view(part.shape)
        return dx.permute(0, 3, 1, 2)

    def gradient_for_weights(self, dy: Tensor, x: Tensor) -> Tensor:
        """The gradient for the weights, from the one for the outputs."""
        dy, x = _pixels(dy), _pixels(x)
        complete = len(self.taps) == self.kernel[0] * self.kernel[1]
        new = dy.new_empty if complete else dy.new_zeros
        dw = new(dy.shape[-1], *self.kernel, x.shape[-1])
        for weights, inputs, outputs in self.taps:
            torch.mm(_rows(dy[outputs]).mT, _rows(x[inputs]), out=dw[weights])
        return dw.permute(0, 3, 1, 2)

    def gradients(self, dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Both."""
        return self.gradient_for_inputs(dy, w), self.gradient_for_weights(dy, x)


def _pixels(images: Tensor) -> Tensor:
    """The channels last."""
    return images.permute(0, 2, 3, 1)


def _rows(pixels: Tensor) -> Tensor:
    """One pixel a row."""
    return pixels.flatten(0, 2)
