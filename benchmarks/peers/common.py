"""What every peer runs: model, data, local work, and how a run is counted and reported. Imports nothing but torch."""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

CLIENTS, COHORT, EPOCHS, BATCH, LR = 100, 10, 5, 50, 0.01


@dataclass(frozen=True)
class Workload:
    shape: tuple[int, ...]
    samples: int  # of every client

    def steps(self, epochs: int) -> int:
        """Local optimiser steps of one round, over all its clients."""
        return COHORT * epochs * self.samples // BATCH

    def data(self) -> list[tuple[Tensor, Tensor]]:
        """Random images and labels, one pair per client: arithmetic does not care what the pixels show."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(CLIENTS * self.samples, *self.shape, generator=generator)
        y = torch.randint(10, (CLIENTS * self.samples,), generator=generator)
        return list(zip(x.split(self.samples), y.split(self.samples), strict=True))

    def model(self) -> nn.Module:
        if self.shape == (1,):
            return Empty()
        if self.shape == (1, 28, 28):
            hidden = [nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()]
            return nn.Sequential(*hidden, nn.Linear(200, 10))
        first = [nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        dense = [nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 10)]
        return nn.Sequential(*first, *second, *dense)


class Empty(nn.Module):
    """As large as a ResNet-18, and hardly computes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(11_173_952))

    def forward(self, x: Tensor) -> Tensor:
        return self.used.expand(len(x), 10)


WORKLOADS = {"W0": Workload((1,), 50), "W1": Workload((1, 28, 28), 600), "W2": Workload((3, 32, 32), 500)}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--rounds", type=int, default=3, help="timed, after one that warms up")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of every process")
    parser.add_argument("--processes", type=int, default=1, help="that train clients side by side")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--loader", action="store_true", help="batches by a DataLoader (Flower)")
    return parser.parse_args()


class Steps:
    """Counts the steps of every optimiser in this process, except those excluded."""

    def __init__(self) -> None:
        self.count = 0
        self.excluded: torch.optim.Optimizer | None = None
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.count += optimizer is not self.excluded

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


@dataclass
class Laps:
    """When rounds ended and how many local steps each took; the first round only warms up."""

    ends: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def lap(self, steps: int) -> None:
        self.ends.append(perf_counter())
        self.steps.append(steps)

    def report(self, peer: str, package: str, run: argparse.Namespace, note: str) -> None:
        """One line of JSON, after proof that every round did the same work."""
        expected = WORKLOADS[run.workload].steps(run.epochs)
        assert self.steps == [expected] * (run.rounds + 1), f"steps per round {self.steps}, not {expected}"
        seconds = [round(b - a, 4) for a, b in itertools.pairwise(self.ends)]
        result = {
            "peer": peer,
            "version": importlib.metadata.version(package),
            "torch": torch.__version__,
            "workload": run.workload,
            "processes": run.processes,
            "threads": run.threads,
            "seconds": seconds,
            "steps_per_round": expected,
            "note": note,
        }
        print("\n" + json.dumps(result), flush=True)
