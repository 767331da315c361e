"""The models of the workloads as a PyTorch user writes them: default layout, ReLU before max-pool, `nn.Conv2d`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .peers.common import WORKLOADS as PEERS


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.GroupNorm(2, outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18() -> nn.Module:
    stem = [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.GroupNorm(2, 64), nn.ReLU()]
    stages, inputs = [], 64
    for outputs in (64, 128, 256, 512):
        stages += [Block(inputs, outputs, 2 if outputs > inputs else 1), Block(outputs, outputs, 1)]
        inputs = outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, padding=1), *stages, *head)


def plain_model(workload: str) -> nn.Module:
    return resnet18() if workload == "W3" else PEERS[workload].model()
