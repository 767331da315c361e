"""Convolutions with fewer multiplications (Winograd).

A kernel of k taps over k + 3 pixels gives 4 outputs. Directly that takes 4k multiplications; as a product of two
polynomials, found from its values at k + 3 points, it takes k + 3:

    y = Aᵀ ( G w ∘ Bᵀ x )

and in two dimensions (k + 3)² for 16 outputs, 64 instead of 400 where k is 5. An image is cut into tiles of 4x4
outputs. G, B and A are small and constant; between them there is one matrix product over channels for every point.
So it pays where many channels meet at many pixels. Numbers are those of the direct way but for rounding, of which
there is three to ten times as much.

Lavin and Gray (2016), Fast Algorithms for Convolutional Neural Networks.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 4
"""outputs of a tile, along an axis"""
POINTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5)
"""where polynomials are evaluated, beside infinity: small numbers that are exact and far apart"""
LARGEST = 2**22
"""entries of a transform; samples are computed some at a time, so that there are no more"""
FEWER = 2.5
"""times fewer products than directly there must be (a tile that is mostly outside the image is a waste)"""


@lru_cache
def transforms(taps: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`A`, `G`, `B` for kernels with this many taps, a row a point.

    The product of polynomials with 4 and k coefficients has k + 3; its transpose is the convolution.
    """
    points = TILE + taps - 1
    matrices = _values(points, TILE), _values(points, taps), torch.linalg.inv(_values(points, points)).mT
    a, g, b = (matrix.to(dtype).contiguous() for matrix in matrices)
    return a, g, b


def _values(points: int, coefficients: int) -> Tensor:
    """What makes a polynomial's values at given points of its coefficients; at infinity it is the last of them."""
    powers = torch.arange(coefficients)
    finite = torch.tensor(POINTS[: points - 1], dtype=torch.float64)[:, None] ** powers
    return torch.cat([finite, (powers == coefficients - 1)[None].double()])


class Winograd:
    """The convolution of images with square kernels of up to 5 taps along an axis, one pixel at a time."""

    def __init__(self, image: tuple[int, ...], taps: int, padding: tuple[int, ...]) -> None:
        self.image, self.taps, self.padding = image, taps, padding
        self.points = TILE + taps - 1
        """along an axis; as many pixels are in a tile"""
        self.outputs = tuple(n + 2 * p - taps + 1 for n, p in zip(image, padding, strict=True))
        self.tiles = tuple(-(-n // TILE) for n in self.outputs)

    @staticmethod
    def fits(
        image: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...]
    ) -> bool:
        """Whether it can be computed so."""
        square = kernel[0] == kernel[1] and 3 <= kernel[0] <= len(POINTS) + 2 - TILE
        larger = all(n + 2 * p >= k for n, p, k in zip(image, padding, kernel, strict=True))
        return square and larger and max(stride) == 1

    @cached_property
    def saves(self) -> bool:
        """Whether there are far fewer products."""
        tiles, pixels = self.tiles[0] * self.tiles[1], self.outputs[0] * self.outputs[1]
        return pixels * self.taps**2 >= FEWER * tiles * self.points**2

    def convolve(self, x: Tensor, w: Tensor) -> Tensor:
        """The outputs."""
        kernels = self._of_kernels(w)
        some = self._at_once(*w.shape[:2])
        return _whole(
            [self._to_outputs(torch.bmm(self._of_images(part), kernels)) for part in torch.split(x, some)]
        )

    def gradient_for_inputs(self, dy: Tensor, w: Tensor) -> Tensor:
        """The gradient for the inputs, from the one for the outputs."""
        kernels = self._of_kernels(w).mT
        some = self._at_once(*w.shape[:2])
        return _whole(
            [self._to_images(torch.bmm(self._of_outputs(part), kernels)) for part in torch.split(dy, some)]
        )

    def gradient_for_weights(self, dy: Tensor, x: Tensor) -> Tensor:
        """The gradient for the weights, from the one for the outputs."""
        some = self._at_once(dy.shape[1], x.shape[1])
        parts = zip(torch.split(x, some), torch.split(dy, some), strict=True)
        products = [torch.bmm(self._of_images(x).mT, self._of_outputs(dy)) for x, dy in parts]
        return self._to_kernels(sum(products[1:], products[0]))

    def gradients(self, dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Both, for the inputs and for the weights."""
        kernels = self._of_kernels(w).mT
        some = self._at_once(*w.shape[:2])
        dx, products = [], []
        for part, d in zip(torch.split(x, some), torch.split(dy, some), strict=True):
            spread = self._of_outputs(d)
            dx.append(self._to_images(torch.bmm(spread, kernels)))
            products.append(torch.bmm(self._of_images(part).mT, spread))
        return _whole(dx), self._to_kernels(sum(products[1:], products[0]))

    def _at_once(self, *channels: int) -> int:
        """How many samples."""
        return max(1, LARGEST // (self.points**2 * self.tiles[0] * self.tiles[1] * max(channels)))

    # To points and back: a matrix for every point, (tiles, channels) or (inputs, outputs).

    def _of_images(self, x: Tensor) -> Tensor:
        """`Bᵀ x B` of every tile; tiles overlap."""
        _, _, b = transforms(self.taps, x.dtype)
        room = [
            (p, TILE * tiles + self.taps - 1 - n - p)
            for n, p, tiles in zip(self.image, self.padding, self.tiles, strict=True)
        ]
        padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, *room[1], *room[0]))
        tiles = padded.unfold(1, self.points, TILE).unfold(2, self.points, TILE)
        return _both_ways(b, tiles.permute(4, 5, 0, 1, 2, 3)).view(self.points**2, -1, x.shape[1])

    def _to_images(self, points: Tensor) -> Tensor:
        """The transpose of that."""
        _, _, b = transforms(self.taps, points.dtype)
        height, width = self.tiles
        channels = points.shape[-1]
        tiles = _both_ways(b.mT, points.view(self.points, self.points, -1, height, width, channels))
        samples = tiles.shape[2]
        # a tile's first pixels are its own, the last ones the next tile's first: 4 rows and columns, then k − 1
        x = tiles.new_zeros(samples, height + 1, TILE, width + 1, TILE, channels)
        for down in (0, 1):
            for right in (0, 1):
                block = tiles[TILE * down :][:TILE, TILE * right :][:, :TILE].permute(2, 3, 0, 4, 1, 5)
                x[:, down : down + height, : block.shape[2], right : right + width, : block.shape[4]] += block
        top, left = self.padding
        whole = x.view(samples, TILE * (height + 1), TILE * (width + 1), channels)
        inside = whole[:, top : top + self.image[0], left : left + self.image[1]]
        return inside.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)

    def _of_outputs(self, y: Tensor) -> Tensor:
        """`A y Aᵀ` of every tile: the transpose of `_to_outputs`."""
        a, _, _ = transforms(self.taps, y.dtype)
        height, width = self.tiles
        below, beside = (TILE * tiles - n for n, tiles in zip(self.outputs, self.tiles, strict=True))
        y = F.pad(y.permute(0, 2, 3, 1), (0, 0, 0, beside, 0, below))
        tiles = y.reshape(len(y), height, TILE, width, TILE, -1).permute(2, 4, 0, 1, 3, 5)
        return _both_ways(a, tiles).view(self.points**2, -1, y.shape[-1])

    def _to_outputs(self, points: Tensor) -> Tensor:
        """`Aᵀ m A` of every tile."""
        a, _, _ = transforms(self.taps, points.dtype)
        height, width = self.tiles
        channels = points.shape[-1]
        tiles = _both_ways(a.mT, points.view(self.points, self.points, -1, height, width, channels))
        y = tiles.permute(2, 3, 0, 4, 1, 5).reshape(-1, TILE * height, TILE * width, channels)
        inside = y[:, : self.outputs[0], : self.outputs[1]].permute(0, 3, 1, 2)
        return inside.contiguous(memory_format=torch.channels_last)

    def _of_kernels(self, w: Tensor) -> Tensor:
        """`G w Gᵀ`."""
        _, g, _ = transforms(self.taps, w.dtype)
        return _both_ways(g, w.permute(2, 3, 1, 0)).view(self.points**2, w.shape[1], w.shape[0])

    def _to_kernels(self, points: Tensor) -> Tensor:
        """The transpose of that."""
        _, g, _ = transforms(self.taps, points.dtype)
        inputs, outputs = points.shape[1:]
        return _both_ways(g.mT, points.view(self.points, self.points, inputs, outputs)).permute(3, 2, 0, 1)


def _both_ways(matrix: Tensor, tiles: Tensor) -> Tensor:
    """`M t Mᵀ` of every tile; the first two dimensions are the rows and columns of tiles."""
    rows, columns, *rest = tiles.shape
    down = (matrix @ tiles.reshape(rows, -1)).view(len(matrix), columns, -1)
    return torch.matmul(matrix, down).view(len(matrix), len(matrix), *rest)


def _whole(parts: list[Tensor]) -> Tensor:
    """All samples' images, channels last."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
