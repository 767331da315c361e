"""Residual networks with group, batch or no normalisation.

He et al. (2016), Deep Residual Learning for Image Recognition; GroupNorm after Hsieh et al. (2020), because batch
statistics of clients with different data do not average well. `resnet8` is FedGMT's on CIFAR-100 (1,258,404
parameters), `resnet18` FedWMSAM's, `resnet18-cifar` FedNSAM's, `resnet18-cifar-nonorm` FedGF's.

A name has three parts:

    resnet8, resnet18, resnet34, resnet50     the depth
    -cifar                                    conv3 with stride 1 as the stem, not conv7 with stride 2 and max-pool
    -bn, -nonorm                              BatchNorm or nothing where there is GroupNorm with 2 groups
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn

from ..errors import FedflatError, nearest
from .conv.conv2d import Conv2d
from .shapes import image_shape

DEPTHS = {8: (1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
"""Blocks at 64, 128, 256 and 512 channels."""
STEMS = {"": "imagenet", "-cifar": "cifar"}
NORMS = {"": "group", "-bn": "batch", "-nonorm": "none"}

_LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "group": lambda channels: nn.GroupNorm(2, channels),
    "batch": nn.BatchNorm2d,
    "none": lambda channels: nn.Identity(),
}


class Residual(nn.Module):
    """`ReLU(body(x) + shortcut(x))`; the body is one conv, norm and ReLU after the other, without the last ReLU.

    The shortcut is the identity, or a 1x1 convolution with norm where the shape changes.
    """

    def __init__(self, inputs: int, convolutions: list[tuple[int, int, int]], norm: str) -> None:
        super().__init__()
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels, strides = inputs, 1
        for number, (outputs, kernel, stride) in enumerate(convolutions, start=1):
            if number > 1:
                layers[f"relu{number - 1}"] = nn.ReLU(inplace=True)
            layers[f"conv{number}"] = _conv(channels, outputs, kernel, stride)
            layers[f"norm{number}"] = _LAYERS[norm](outputs)
            channels, strides = outputs, strides * stride
        self.body = nn.Sequential(layers)
        self.shortcut: nn.Module = nn.Identity()
        if strides != 1 or channels != inputs:
            projection = OrderedDict(conv=_conv(inputs, channels, 1, strides), norm=_LAYERS[norm](channels))
            self.shortcut = nn.Sequential(projection)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y: Tensor = self.body(x)
        y += self.shortcut(x)
        result: Tensor = self.relu(y)
        return result


def resnet(
    shape: tuple[int, ...],
    classes: int,
    vocabulary: int | None = None,
    depth: int = 18,
    norm: str = "group",
    stem: str = "imagenet",
    stem_norm: str | None = None,
) -> nn.Module:
    """A residual network: stem, stages of blocks (the first of a later stage has stride 2), mean, fc.

    Basic blocks (two 3x3), for depth 50 bottlenecks (1x1, 3x3, 1x1 to four times the channels, stride in the 3x3).
    No convolution has a bias. In the stem, max-pool comes before ReLU: the same numbers, a quarter of the work.
    `stem_norm` gives the stem another norm: FedNSAM's BatchNorm code has `"group"` there.
    Weights start as in the code the papers build on: convolutions of the ImageNet stem's networks He-normal by
    fan-out (FL-Simulator takes torchvision's), PyTorch's default for the CIFAR stem and without norms.
    """
    stem_norm = stem_norm or norm
    for argument, value, known in (
        ("norm", norm, NORMS),
        ("stem", stem, STEMS),
        ("stem_norm", stem_norm, NORMS),
    ):
        if value not in known.values():
            raise FedflatError(
                f"resnet: {argument}='{value}' is not possible.{nearest(value, known.values())}"
            )
    if depth not in DEPTHS:
        raise FedflatError(f"resnet: depth must be one of {', '.join(map(str, DEPTHS))}, not {depth}.")
    channels, _, _ = image_shape(f"resnet{depth}", shape, vocabulary)
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=_stem(channels, stem, stem_norm))
    features = 64
    for stage, blocks in enumerate(DEPTHS[depth]):
        row = []
        for block in range(blocks):
            width, stride = 64 * 2**stage, 2 if stage > 0 and block == 0 else 1
            convolutions = [(width, 3, stride), (width, 3, 1)]
            if depth == 50:
                convolutions = [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]
            row.append(Residual(features, convolutions, norm))
            features = convolutions[-1][0]
        layers[f"stage{stage + 1}"] = nn.Sequential(*row)
    layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(features, classes))
    network = nn.Sequential(layers)
    if stem == "imagenet" and norm != "none":
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


def from_torchvision(name: str) -> str:
    """What a weight of torchvision's residual networks, and of timm's, is called here."""
    name = name.replace("bn", "norm").replace("downsample.0", "shortcut.conv")
    name = name.replace("downsample.1", "shortcut.norm").replace("layer", "stage")
    name = re.sub(r"^(conv|norm)1\.", r"stem.\1.", name)
    return re.sub(r"^(stage\d\.\d+)\.(conv|norm)", r"\1.body.\2", name)


def variant(depth: int, norm: str, stem: str) -> Callable[..., nn.Module]:
    """A builder for the registry."""

    def build(shape: tuple[int, ...], classes: int, vocabulary: int | None = None) -> nn.Module:
        return resnet(shape, classes, vocabulary, depth, norm, stem)

    norms = {"group": "GroupNorm with 2 groups", "batch": "BatchNorm", "none": "no normalisation"}
    stems = {"imagenet": "ImageNet stem (conv7, stride 2, max-pool)", "cifar": "CIFAR stem (conv3, stride 1)"}
    build.__doc__ = f"ResNet-{depth}, {norms[norm]}, {stems[stem]}."
    return build


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Module:
    return Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _stem(channels: int, stem: str, norm: str) -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv"] = _conv(channels, 64, 7, 2) if stem == "imagenet" else _conv(channels, 64, 3, 1)
    layers["norm"] = _LAYERS[norm](64)
    if stem == "imagenet":
        layers["pool"] = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
    layers["relu"] = nn.ReLU(inplace=True)
    return nn.Sequential(layers)
