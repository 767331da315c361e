"""A small vision transformer."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

from .shapes import image_shape

PATCH = 4
WIDTH = 384
HEADS = 8


class Attention(nn.Module):
    """Self-attention: `softmax(q kᵀ / √width) v` per head.

    The scale is that of the whole width, not of one head, as in the code FedGMT uses. Written out, because the
    second derivatives that Hessians need do not exist for PyTorch's fused attention on the CPU.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, 1 / math.sqrt(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """From (samples, tokens, width) to the same shape."""
        samples, tokens, width = x.shape
        parts = self.qkv(x).view(samples, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()
        attention = torch.softmax((q * self.scale) @ k.mT, dim=-1)
        result: Tensor = self.out((attention @ v).transpose(1, 2).flatten(2))
        return result


class Encoder(nn.Module):
    """`x ← x + attention(norm1(x))`, then `x ← x + mlp(norm2(x))`, the mlp ending in GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            OrderedDict(
                fc1=nn.Linear(width, width), gelu1=nn.GELU(), fc2=nn.Linear(width, width), gelu2=nn.GELU()
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """From (samples, tokens, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class VisionTransformer(nn.Module):
    """Patches, linear embedding, learned positions, encoders, mean over the patches, LayerNorm, fc."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        width: int = WIDTH,
        heads: int = HEADS,
        depth: int = 2,
        patch: int = PATCH,
    ) -> None:
        super().__init__()
        channels, height, columns = shape
        self.patch = patch
        self.embedding = nn.Linear(channels * patch * patch, width)
        self.positions = nn.Parameter(torch.randn((height // patch) * (columns // patch), width))
        self.encoders = nn.Sequential(*(Encoder(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)

    def patches(self, images: Tensor) -> Tensor:
        """The images as (samples, patches, channels * patch * patch), row by row."""
        samples, channels, height, width = images.shape
        grid = images.reshape(
            samples, channels, height // self.patch, self.patch, width // self.patch, self.patch
        )
        return grid.permute(0, 2, 4, 1, 3, 5).reshape(samples, -1, channels * self.patch * self.patch)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images."""
        x = self.encoders(self.embedding(self.patches(images)) + self.positions)
        logits: Tensor = self.fc(self.norm(x.mean(dim=1)))
        return logits


def vit_small(shape: tuple[int, ...], classes: int, vocabulary: int | None = None) -> nn.Module:
    """Vision transformer, 4x4 patches, width 384, 2 encoders: 1,825,162 parameters on CIFAR-10 and CINIC-10.

    FedGMT's model on CINIC-10, after Dosovitskiy et al. (2021), An Image is Worth 16x16 Words: patches →384, learned
    positions from N(0, 1), no class token, 2 pre-norm encoders with 8 heads, mlp 384-GELU-384-GELU, no dropout.
    """
    return VisionTransformer(image_shape("vit-small", shape, vocabulary, multiple=PATCH), classes)
