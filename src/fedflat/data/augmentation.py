"""From stored samples to what a model sees: whole batches of tensors at once, drawn per sample.

Images are stored as bytes, height x width x channels, and come out as normalised floats, channels x height x width,
in channels-last memory, which is how convolutions are fastest. One call prepares a whole local epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import FedflatError, nearest


class Pipeline(Protocol):
    """Prepares stored samples for a model."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a prepared sample."""

    def train(self, stored: Tensor, rng: np.random.Generator, batch: int | None = None) -> Tensor:
        """Prepare for training, with augmentation; `batch` is how many consecutive samples make a batch."""

    def test(self, stored: Tensor) -> Tensor:
        """Prepare for evaluation, without."""

    def to(self, dtype: torch.dtype) -> Pipeline:
        """A copy for another floating type."""

    @property
    def random(self) -> bool:
        """Whether training samples differ from epoch to epoch."""


@dataclass(frozen=True)
class Plain:
    """Samples as they are; whole numbers become `int64` where a model looks them up (`tokens=True`)."""

    tokens: bool = False
    random: bool = False

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Unchanged."""
        return stored

    def train(self, stored: Tensor, rng: np.random.Generator, batch: int | None = None) -> Tensor:
        """Unchanged."""
        return self.test(stored)

    def test(self, stored: Tensor) -> Tensor:
        """Unchanged."""
        return stored.long() if self.tokens else stored

    def to(self, dtype: torch.dtype) -> Plain:
        """Stored floats have been converted already."""
        return self


@dataclass(frozen=True)
class Augmentation:
    """A random crop of the padded image and a random horizontal flip, per sample."""

    pad: int = 0
    """pixels of black on every side before an image-sized window is cut out"""
    crop_probability: float = 1.0
    flip_probability: float = 0.0
    one_draw: bool = False
    """the same crop and flip for all samples of a batch, as a transform of a whole batch does"""

    @property
    def random(self) -> bool:
        """Whether it does anything."""
        return self.pad > 0 or self.flip_probability > 0

    def __call__(self, images: Tensor, rng: np.random.Generator, batch: int | None = None) -> Tensor:
        """Augment stored images (n, height, width, channels): one gather of pixels for all of them."""
        if not self.random:
            return images
        n, height, width, channels = images.shape
        repeats = min(batch or n, n) if self.one_draw else 1
        draws = -(-n // repeats)
        offsets = np.full((2, draws), self.pad)
        if self.pad:
            moved = rng.integers(0, 2 * self.pad + 1, size=(2, draws))
            offsets = np.where(rng.random(draws) < self.crop_probability, moved, offsets)
        flipped = np.repeat(rng.random(draws) < self.flip_probability, repeats)[:n]
        offsets = np.repeat(offsets, repeats, axis=1)[:, :n]
        columns = np.where(flipped[:, None], np.arange(width)[::-1], np.arange(width))
        padded = F.pad(images, (0, 0, self.pad, self.pad, self.pad, self.pad)) if self.pad else images
        full_height, full_width = padded.shape[1:3]
        row = np.arange(n)[:, None] * full_height + offsets[0][:, None] + np.arange(height)
        pixel = row[:, :, None] * full_width + (offsets[1][:, None] + columns)[:, None, :]
        chosen = torch.from_numpy(pixel.reshape(-1)).to(images.device)
        gathered = padded.reshape(-1, channels).index_select(0, chosen)
        return gathered.view(n, height, width, channels)


AUGMENTATIONS = {
    "none": Augmentation(),
    "crop-flip": Augmentation(pad=4, flip_probability=0.5),
    "fedgmt-paper": Augmentation(pad=2, flip_probability=0.5),
    "fedgmt-code": Augmentation(pad=4, flip_probability=0.5, one_draw=True),
    "fedwmsam": Augmentation(pad=4, crop_probability=0.5, flip_probability=0.5),
}
"""The papers' variants. `crop-flip`, drawn per sample, is what FedGF and FedNSAM use and our FedGMT protocol;
FedGMT's text pads 2, its code draws once per batch; FedWMSAM's code crops every second sample."""


def find_augmentation(name: str) -> Augmentation:
    """An augmentation by name."""
    if name not in AUGMENTATIONS:
        raise FedflatError(f"There is no augmentation '{name}'.{nearest(name, AUGMENTATIONS)}")
    return AUGMENTATIONS[name]


@dataclass(frozen=True)
class Images:
    """Stored bytes (height, width, channels) to floats `(x/255 − mean)/std` (channels, height, width)."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: Augmentation = AUGMENTATIONS["none"]
    dtype: torch.dtype = torch.float32

    @property
    def random(self) -> bool:
        """Whether training samples differ from epoch to epoch."""
        return self.augmentation.random

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Channels first."""
        height, width, channels = stored
        return (channels, height, width)

    def train(self, stored: Tensor, rng: np.random.Generator, batch: int | None = None) -> Tensor:
        """Augment, then normalise."""
        return self.test(self.augmentation(stored, rng, batch))

    def test(self, stored: Tensor) -> Tensor:
        """Normalise."""
        mean = torch.tensor(self.mean, dtype=self.dtype, device=stored.device)
        std = torch.tensor(self.std, dtype=self.dtype, device=stored.device)
        floats = stored.to(self.dtype, copy=True).mul_(1.0 / (255.0 * std)).sub_(mean / std)
        return floats.permute(0, 3, 1, 2)

    def to(self, dtype: torch.dtype) -> Images:
        """A copy for another floating type."""
        return replace(self, dtype=dtype)
