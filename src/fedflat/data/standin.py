"""Made-up data in the shape of a known dataset, to try an experiment where the real one is not at hand."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..core.randomness import generator
from .augmentation import Images, Plain
from .catalogue import OFFICE_DOMAINS
from .caveats import stand_in_caveat
from .dataset import Dataset


class _Shape(NamedTuple):
    sample: tuple[int, ...]
    """height, width, channels of an image, or the length of a text"""
    classes: int
    vocabulary: int | None = None
    groups: tuple[str, ...] = ()


SHAPES = {
    "fashion-mnist": _Shape((28, 28, 1), 10),
    "cifar10": _Shape((32, 32, 3), 10),
    "cifar100": _Shape((32, 32, 3), 100),
    "cinic10": _Shape((32, 32, 3), 10),
    "tiny-imagenet": _Shape((64, 64, 3), 200),
    "office-home": _Shape((224, 224, 3), 65, groups=OFFICE_DOMAINS),
    "ag-news": _Shape((200,), 4, vocabulary=98_635),
}


def stand_in(name: str, samples: int, tests: int) -> Dataset:
    """Noise around one random sample per class; for texts, words that a class prefers. Easy to learn, no more."""
    shape = SHAPES[name]
    rng = generator(0, "stand-in", 0)
    total = samples + tests
    labels = rng.permutation(np.arange(total) % shape.classes)
    pipeline: Images | Plain
    if shape.vocabulary is None:
        centres = rng.integers(0, 256, (shape.classes, *shape.sample))
        noise = rng.integers(-64, 65, (total, *shape.sample))
        inputs = torch.from_numpy(np.clip(centres[labels] + noise, 0, 255).astype(np.uint8))
        channels = shape.sample[-1]
        pipeline = Images((0.5,) * channels, (0.25,) * channels)
    else:
        width = shape.vocabulary // shape.classes
        words = rng.integers(1, width, (total, *shape.sample)) + labels[:, None] * width
        inputs, pipeline = torch.from_numpy(words), Plain(tokens=True)
    targets = torch.from_numpy(labels)
    groups, test_groups = (
        np.arange(count) * len(shape.groups) // count if shape.groups else None for count in (samples, tests)
    )
    return Dataset(
        name,
        (inputs[:samples], targets[:samples]),
        (inputs[samples:], targets[samples:]),
        shape.classes,
        pipeline,
        groups=groups,
        group_names=shape.groups,
        test_groups=test_groups,
        vocabulary=shape.vocabulary,
        caveats=(stand_in_caveat(name),),
    )
