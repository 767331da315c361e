"""VGG-11 for small images."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from .conv.conv2d import Conv2d
from .shapes import image_shape

BLOCKS = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""Channels of the 3x3 convolutions; every block ends in a max-pool, which halves the image."""


def vgg11(shape: tuple[int, ...], classes: int, vocabulary: int | None = None) -> nn.Module:
    """VGG-11 without normalisation, as FedNSAM trains it: 9,272,790 parameters on CIFAR-10.

    Simonyan and Zisserman (2015), configuration A, with a small head: fc 512→100→10 for ten classes,
    512→256→100 for a hundred; in general 100 hidden units for up to 10 classes and 256 for more. Larger images
    than 32x32 leave more than 512 features. As in `cnn`, max-pooling comes before ReLU.
    """
    features, height, width = image_shape("vgg11", shape, vocabulary, smallest=32)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    number = 0
    for block, channels in enumerate(BLOCKS, start=1):
        for position, outputs in enumerate(channels, start=1):
            number += 1
            layers[f"conv{number}"] = Conv2d(features, outputs, kernel_size=3, padding=1)
            if position == len(channels):
                layers[f"pool{block}"] = nn.MaxPool2d(2)
            layers[f"relu{number}"] = nn.ReLU(inplace=True)
            features = outputs
    hidden = 100 if classes <= 10 else 256
    layers["flatten"] = nn.Flatten()
    layers["fc1"] = nn.Linear(features * (height // 32) * (width // 32), hidden)
    layers[f"relu{number + 1}"] = nn.ReLU(inplace=True)
    layers["fc2"] = nn.Linear(hidden, classes)
    return nn.Sequential(layers)
