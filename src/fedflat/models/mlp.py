"""Fully connected networks."""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import pairwise

from torch import nn

from .shapes import refuse_tokens


def mlp(
    shape: tuple[int, ...],
    classes: int,
    vocabulary: int | None = None,
    hidden: tuple[int, ...] = (200, 200),
) -> nn.Module:
    """Fully connected, two hidden layers of 200 with ReLU: 784-200-200-10 on Fashion-MNIST.

    The "2NN" of McMahan et al. (2017), Communication-Efficient Learning of Deep Networks from Decentralized Data.
    FedWMSAM does not specify its MLP; this is the one of the code base it builds on.
    """
    refuse_tokens("mlp", shape, vocabulary)
    sizes = [math.prod(shape), *hidden]
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for number, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        layers[f"fc{number}"] = nn.Linear(inputs, outputs)
        layers[f"relu{number}"] = nn.ReLU(inplace=True)
    layers[f"fc{len(sizes)}"] = nn.Linear(sizes[-1], classes)
    return nn.Sequential(layers)


def mlp_200_100(shape: tuple[int, ...], classes: int, vocabulary: int | None = None) -> nn.Module:
    """Fully connected, hidden layers of 200 and 100 with ReLU: 784-200-100-10 on Fashion-MNIST."""
    return mlp(shape, classes, vocabulary, hidden=(200, 100))
