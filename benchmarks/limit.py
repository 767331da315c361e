"""How close FedAvg comes to the limit: its steps in a bare loop, on two processes with one thread each.

The bare loop (`benchmarks/bare.py`) is PyTorch with nothing around it: fedflat's module in the layout of its flat
vector, the very batches that a client sees (made beforehand), memory that is kept, `autograd.grad` and one in-place
update per step. It lacks what fedflat adds: shuffling, gathering and augmentation, sending, states, checks and
aggregation. The plain loop is what a PyTorch user writes: default layout, ReLU before max-pool, `torch.optim.SGD`,
batches by index.

fedflat differentiates fully connected networks by hand (`gradients/dense.py`), so that on W1 it can be faster than a
loop with autograd. A second bare loop there does without autograd too: matrix products and little else.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import fedflat as ff
from fedflat.models import build_model

from . import bare
from .pace import Processes, Steps, Target, Training, markdown, race, ratio, say
from .plain import plain_model
from .workloads import LR, WORKLOADS, Workload

PLAIN_SHARE = 4
"""the plain loop is there for orientation: it takes a quarter of the steps, scaled up"""

# rounds are shorter than the workload's, a client's work is not; see the column "steps a round"
W2 = replace(WORKLOADS["W2"], clients=20, per_round=2)
FULL = (
    ("W1", WORKLOADS["W1"], 40),
    ("W2", W2, 8),
    ("W2, crop and flip", replace(W2, augment=True), 6),
    ("W3", replace(WORKLOADS["W3"], clients=20), 6),
)
QUICK = (
    ("W1", replace(WORKLOADS["W1"], clients=10), 4),
    ("W2", replace(W2, clients=2, samples=100), 2),
    ("W3", replace(WORKLOADS["W3"], clients=2, samples=50), 2),
)
WANTED = {"W1": 0.90, "W2": 0.90, "W3": 0.95}
"""the least speed in bare loops"""


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {label: compare(label, *given) for label, *given in (QUICK if quick else FULL)}


def compare(label: str, work: Workload, rounds: int) -> dict[str, Any]:
    """Seconds per round of fedflat, the bare loops and the plain loop."""
    say(f"{label}: preparing")
    federation = work.federation()
    batches = bare.observe(work, "fedavg").batches
    usual = Processes(lambda: plain(work, federation), work.steps // PLAIN_SHARE)
    contenders: dict[str, Training | Processes] = {
        "bare": bare.contender(work, "fedavg", batches),
        "fedflat": Training(federation, work.model, "fedavg", engine=ff.Workers(2), **work.settings),
        "plain": usual,
    }
    if work.model == "mlp":
        contenders["by hand"] = bare.contender(work, "fedavg", batches, bare.fedavg_without_autograd)
    seconds = race(contenders, rounds, label)
    seconds["plain"] = [round(s * work.steps / usual.steps, 6) for s in seconds["plain"]]
    return {"steps": work.steps, "seconds": seconds}


def plain(work: Workload, federation: ff.Federation) -> Steps:
    model = plain_model(work.name).train()
    expected = sum(p.numel() for p in build_model(work.model, federation, seed=0).parameters())
    assert sum(p.numel() for p in model.parameters()) == expected, "another model than fedflat's"
    x, y = federation.client(0).batch(0, work.samples)
    x = x.contiguous()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def take(steps: int) -> None:
        while steps > 0:
            for rows in torch.randperm(len(x)).split(work.batch)[:steps]:
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
                steps -= 1

    return take


def table(result: dict[str, Any]) -> str:
    rows = []
    for label, measured in result.items():
        seconds = measured["seconds"]
        rows.append(
            [
                label,
                str(measured["steps"]),
                *(f"{median(seconds[name]):.3f}" for name in ("fedflat", "bare", "plain")),
                str(ratio(seconds["bare"], seconds["fedflat"])),
                str(ratio(seconds["plain"], seconds["fedflat"])),
                str(len(seconds["fedflat"])),
            ]
        )
    header = ["workload", "steps a round", "fedflat, s", "bare loop, s", "plain PyTorch, s"]
    header += ["fedflat's speed / bare", "fedflat's speed / plain", "rounds"]
    lines = [markdown(header, rows)]
    for label, measured in result.items():
        if "by hand" in measured["seconds"]:
            speed = ratio(measured["seconds"]["by hand"], measured["seconds"]["fedflat"])
            lines.append(f"\n{label}: fedflat has {speed} of the speed of the bare loop without autograd.")
    return "\n".join(lines)


def targets(result: dict[str, Any]) -> list[Target]:
    found = []
    for name, wanted in WANTED.items():
        speed = ratio(result[name]["seconds"]["bare"], result[name]["seconds"]["fedflat"])
        text = f"FedAvg, {name}: at least {wanted:.2f} of its bare loop's speed"
        found.append(Target(text, str(speed), speed.value >= wanted))
    return found
