"""The handwritten digits that ship with the package, so that a first run needs no download.

1,797 images of 8x8 pixels with values 0 to 16, ten classes: the test part of *Optical Recognition of Handwritten
Digits* by E. Alpaydin and C. Kaynak (1998), UCI Machine Learning Repository, doi 10.24432/C50P49, used under the
Creative Commons Attribution 4.0 licence. The images are as published; the split below is ours.
"""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch
from torch import Tensor

MEAN, DEVIATION = 4.884, 6.017
"""Of the pixels."""
TRAIN = 1397
"""Images for the clients; the other 400 are the test set."""


def load_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images (n, 1, 8, 8) with zero mean and unit scale, and their labels."""
    with resources.files(__package__).joinpath("digits.npz").open("rb") as file:
        stored = np.load(file)
        images, labels = stored["images"], stored["labels"]
    # the writers come one after the other, so the split is a fixed shuffle
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(labels))
    x = torch.from_numpy((images[order, None].astype(np.float32) - MEAN) / DEVIATION)
    y = torch.from_numpy(labels[order].astype(np.int64))
    return (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])
