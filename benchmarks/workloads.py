"""The workloads of the benchmarks: arithmetic does not care what the pixels show, so data is random.

W1  MLP 784-200-200-10, 100 clients x 600 samples, 10 a round, 5 epochs of batch 50: 600 steps a round
W2  McMahan's CNN, 100 clients x 500 images 3x32x32, 10 a round, 5 epochs of batch 50: 500 steps a round
W3  ResNet-18 with GroupNorm, 7x7 stem, data and local work of W2, 2 clients a round: 100 steps a round
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import fedflat as ff
from fedflat.data.augmentation import AUGMENTATIONS

LR = 0.01


@dataclass(frozen=True)
class Workload:
    name: str
    model: str
    shape: tuple[int, ...]
    samples: int  # of every client
    per_round: int
    clients: int = 100
    epochs: int = 5
    batch: int = 50
    augment: bool = False

    @property
    def steps(self) -> int:
        """Local steps of all clients in a round."""
        return self.per_round * self.epochs * (self.samples // self.batch)

    @property
    def settings(self) -> dict[str, Any]:
        """For `ff.train`."""
        sgd = ff.LocalSGD(lr=LR, epochs=self.epochs, batch_size=self.batch)
        return {"local": sgd, "participation": self.per_round}

    def federation(self) -> ff.Federation:
        rng = torch.Generator().manual_seed(0)
        total = self.clients * self.samples
        y = torch.randint(10, (total,), generator=rng)
        rows = torch.arange(total).view(self.clients, -1)
        if self.shape[0] == 3:
            channels, height, width = self.shape
            x = torch.randint(256, (total, height, width, channels), generator=rng, dtype=torch.uint8)
            chosen = AUGMENTATIONS["crop-flip" if self.augment else "none"]
            pipeline = ff.Images((0.5,) * channels, (0.25,) * channels, chosen)
            return ff.Federation.from_indices((x, y), rows, classes=10, pipeline=pipeline)
        x = torch.randn(total, *self.shape, generator=rng)
        return ff.Federation.from_indices((x, y), rows, classes=10)


WORKLOADS = {
    "W1": Workload("W1", "mlp", (1, 28, 28), samples=600, per_round=10),
    "W2": Workload("W2", "cnn", (3, 32, 32), samples=500, per_round=10),
    "W3": Workload("W3", "resnet18", (3, 32, 32), samples=500, per_round=2),
}
