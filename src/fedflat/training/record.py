"""What happened in one round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..core.messages import Download, Upload
from ..server.server import Server


@dataclass
class RoundRecord:
    """What happened in one round. `server` is live: read `server.w` during `on_round`, copy what you keep."""

    index: int
    clients: list[int]
    """the active clients whose uploads were accepted"""
    server: Server = field(repr=False)
    accuracy: float | None = None
    loss: float | None = None
    """test loss"""
    train_loss: float | None = None
    train_loss_std: float | None = None
    """deviation of the active clients' training losses from their mean"""
    client_accuracy: dict[str, float] | None = None
    """mean, std and worst_decile over all clients, each tested on its own mix of classes; see `ClassMix`"""
    accuracy_by_group: dict[str, float] | None = None
    """of every user or domain of the test set, on its own test samples; where the data has at most 100 of them"""
    validation: dict[str, Any] | None = None
    """what a test on the validation part found, where there is one: accuracy, loss, client_accuracy and metrics"""
    metrics: dict[str, Any] = field(default_factory=dict)
    """the values of further metrics of a test, by name"""
    reported: dict[str, Any] | None = None
    """what clients found of the model they received, before the round: accuracy and loss over all their samples, the
    worst accuracy, and what each said; in a real federation"""
    rejected: list[str] = field(default_factory=list)
    """a sentence for every upload that was refused or did not come"""
    clipped: list[str] = field(default_factory=list)
    """a sentence for every vector that was longer than allowed and was shortened"""
    dropped: list[str] = field(default_factory=list)
    """a sentence for every report or loss that was left out of a reply, whose upload counts"""
    undone: str | None = None
    """why the round changes nothing: what would not have been finite after it"""
    steps: int = 0
    forward: int = 0
    backward: int = 0
    """passes over a batch that the method makes, all clients together"""
    spared_forward: int = 0
    spared_backward: int = 0
    """those of them that did not have to be computed, since their result was known"""
    vectors_down: int = 0
    vectors_up: int = 0
    """model-sized vectors sent and received, all clients together"""
    bytes_down: int = 0
    bytes_up: int = 0
    lr: float = 0.0
    seconds: float = 0.0
    """sending, local training and aggregation, without evaluation"""
    scalars: dict[str, float] = field(default_factory=dict)
    """the method's own numbers after the round, such as c or alpha"""
    measures: dict[str, float | None] = field(default_factory=dict)
    """flatness by name, in rounds in which it was measured"""

    def row(self) -> dict[str, Any]:
        """As plain values, for a table or a file."""
        shown = {
            k: v
            for k, v in self.__dict__.items()
            if k != "server" and (k not in ("metrics", "validation") or v)
        }
        return {**shown, "clients": list(self.clients), "scalars": dict(self.scalars)}

    def count_down(self, message: Download) -> None:
        """What a client receives."""
        self.vectors_down += message.vectors
        self.bytes_down += message.bytes

    def count_up(self, upload: Upload) -> None:
        """What a client returns, and what it did for that."""
        self.steps += upload.steps
        self.forward += upload.forward
        self.backward += upload.backward
        self.spared_forward += upload.spared_forward
        self.spared_backward += upload.spared_backward
        self.vectors_up += 1 + len(upload.vectors)
        self.bytes_up += upload.bytes

    def sum_up(self, losses: list[tuple[float, float]], reports: dict[int, dict[str, float]]) -> None:
        """What the accepted clients said: training losses with their weights, and their reports, if there are any."""
        if losses:
            total = sum(weight for _, weight in losses)
            self.train_loss = sum(loss * weight for loss, weight in losses) / total
            try:
                variance = sum(loss**2 * weight for loss, weight in losses) / total - self.train_loss**2
            except OverflowError:
                variance = math.inf
            self.train_loss_std = math.sqrt(max(0.0, variance)) if math.isfinite(variance) else None
        self.reported = _reported(reports) if reports else None


def _reported(reports: dict[int, dict[str, float]]) -> dict[str, Any]:
    """What clients found, over all samples they tested on."""
    samples = sum(report["samples"] for report in reports.values())
    summary: dict[str, Any] = {"samples": samples}
    for name in ("accuracy", "loss"):
        told = [(report[name], report["samples"]) for report in reports.values() if name in report]
        if len(told) == len(reports):
            summary[name] = sum(value * weight for value, weight in told) / samples
    if "accuracy" in summary:
        summary["worst_accuracy"] = min(report["accuracy"] for report in reports.values())
    return {**summary, "clients": {str(client): report for client, report in reports.items()}}
