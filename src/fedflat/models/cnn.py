"""Two small convolutional networks.

Max-pooling comes before ReLU here: both are monotone, so they commute, values and gradients are the same, and
ReLU has a quarter of the work.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from .conv.conv2d import Conv2d
from .shapes import image_shape


def cnn(shape: tuple[int, ...], classes: int, vocabulary: int | None = None) -> nn.Module:
    """McMahan's CNN, two 5x5 convolutions and 512 hidden units: 2,156,490 parameters on CIFAR-10.

    McMahan et al. (2017), Communication-Efficient Learning of Deep Networks from Decentralized Data; FedGMT's
    model on CIFAR-10. conv5 pad2 →32, pool2, ReLU; conv5 pad2 →64, pool2, ReLU; fc 512, ReLU; fc →classes.
    """
    channels, height, width = image_shape("cnn", shape, vocabulary, smallest=4)
    return nn.Sequential(
        OrderedDict(
            conv1=Conv2d(channels, 32, kernel_size=5, padding=2),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(inplace=True),
            conv2=Conv2d(32, 64, kernel_size=5, padding=2),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(inplace=True),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * (height // 4) * (width // 4), 512),
            relu3=nn.ReLU(inplace=True),
            fc2=nn.Linear(512, classes),
        )
    )


def lenet(shape: tuple[int, ...], classes: int, vocabulary: int | None = None) -> nn.Module:
    """LeNet with 64-64 channels and 384-192 hidden units: 797,962 parameters on CIFAR-10.

    The LeNet-5 variant of FedSAM (Caldarola et al. 2022), FedGF and FedNSAM, after Hsu et al. (2020).
    conv5 →64, pool2, ReLU; conv5 →64, pool2, ReLU; fc 384, ReLU; fc 192, ReLU; fc →classes.
    """
    channels, height, width = image_shape("lenet", shape, vocabulary, smallest=16)
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    return nn.Sequential(
        OrderedDict(
            conv1=Conv2d(channels, 64, kernel_size=5),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(inplace=True),
            conv2=Conv2d(64, 64, kernel_size=5),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(inplace=True),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * rows * columns, 384),
            relu3=nn.ReLU(inplace=True),
            fc2=nn.Linear(384, 192),
            relu4=nn.ReLU(inplace=True),
            fc3=nn.Linear(192, classes),
        )
    )
