"""The papers' datasets as they were published: what a copy is held against. Importing this does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Official:
    """How large a dataset is, and whether its images are stored without loss."""

    train: int
    test: int
    classes: int
    lossless: bool = False
    """whether its pixels are exact; images that were JPEG from the start, and texts, are not meant"""


OFFICIAL = {
    "digits": Official(1_397, 400, 10),
    "cifar10": Official(50_000, 10_000, 10, lossless=True),
    "cifar100": Official(50_000, 10_000, 100, lossless=True),
    "fashion-mnist": Official(60_000, 10_000, 10, lossless=True),
    "cinic10": Official(90_000, 90_000, 10, lossless=True),
    "tiny-imagenet": Official(100_000, 10_000, 200),
    "office-home": Official(14_035, 1_553, 65),  # 15,588 images, of which a fixed tenth is held out
    "ag-news": Official(120_000, 7_600, 4),
}
"""By name. Shakespeare is not here: every preparation of the plays has other clients and samples."""
