"""How close fedflat comes to the limit: the same steps in a bare loop, on two processes with one thread each.

The bare loop has the product's modules in the layout that its flat model chooses, the very batches that a client of
fedflat sees (made beforehand, channels last), memory that is kept, `autograd.grad` and one in-place update per step.
It lacks what fedflat adds: shuffling, gathering and augmentation, sending, states, validation and aggregation. The
plain loop is what a PyTorch user writes: default layout, ReLU before max-pool, `torch.optim.SGD`, batches by index.
For FedSAM the bare loop takes two gradients a step, a norm between them and a move to the second point; its time in
multiples of that of FedAvg's bare loop, in turn with it, is what FedSAM costs without a library around it. fedflat
does without the first layer's first gradient and second product there, and without autograd in fully connected
networks (`gradients/dense.py`). A second bare loop on W1 does without autograd too: it is the product's own
arithmetic with nothing around it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from fedflat.gradients.cross_entropy import CrossEntropy
from torch import Tensor

import fedflat as ff
from fedflat.core.allocator import keep_memory
from fedflat.gradients.dense import Chain
from fedflat.models import build_model

from .pace import Processes, Steps, Target, Training, markdown, race, ratio, say
from .plain import plain_model
from .workloads import WORKLOADS, Workload

PLAIN_SHARE = 4
"""the plain loop is only there for orientation: it takes a quarter of the steps, scaled up"""

# rounds are shorter than the workload's where a client's work stays the same; see the column "steps a round"
FULL = (
    ("W1", "fedavg", WORKLOADS["W1"], 40),
    ("W1, FedSAM", "fedsam", WORKLOADS["W1"], 40),
    ("W2", "fedavg", replace(WORKLOADS["W2"], per_round=4), 4),
    ("W2, crop and flip", "fedavg", replace(WORKLOADS["W2"], per_round=4, augment=True), 3),
    ("W3", "fedavg", WORKLOADS["W3"], 4),
)
QUICK = (
    ("W1", "fedavg", replace(WORKLOADS["W1"], clients=10), 4),
    ("W2", "fedavg", replace(WORKLOADS["W2"], clients=2, per_round=2, samples=100), 2),
    ("W3", "fedavg", replace(WORKLOADS["W3"], clients=2, samples=50), 2),
)


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {label: compare(label, *given) for label, *given in (QUICK if quick else FULL)}


def compare(label: str, method: str, work: Workload, rounds: int) -> dict[str, Any]:
    """Seconds per round of the product, the bare loop, and the plain loop or, for FedSAM, the bare loop of FedAvg."""
    say(f"{label}: preparing")
    federation = work.federation()
    batches = seen_batches(work, federation)
    bare = {"fedavg": one_pass, "fedsam": two_passes}[method]
    usual = Processes(lambda: plain(work, federation), work.steps // PLAIN_SHARE)
    contenders: dict[str, Training | Processes] = {
        "bare": Processes(lambda: bare(work, federation, batches), work.steps),
        "fedflat": Training(federation, work.model, method, engine=ff.Workers(2), **work.settings),
    }
    if method == "fedavg":
        contenders["plain"] = usual
        if work.model == "mlp":
            contenders["by hand"] = Processes(lambda: by_hand(work, federation, batches), work.steps)
    else:
        contenders["one pass"] = Processes(lambda: one_pass(work, federation, batches), work.steps)
    seconds = race(contenders, rounds, label)
    if "plain" in seconds:
        seconds["plain"] = [round(s * work.steps / usual.steps, 6) for s in seconds["plain"]]
    return {"steps": work.steps, "seconds": seconds}


def seen_batches(work: Workload, federation: ff.Federation) -> list[tuple[Tensor, Tensor]]:
    """All batches of a client's round, as fedflat gives them to the module and to the loss; images channels last."""
    inputs: list[Tensor] = []
    targets: list[Tensor] = []

    def loss(outputs: Tensor, wanted: Tensor) -> Tensor:
        targets.append(wanted)
        return F.cross_entropy(outputs, wanted)

    module = build_model(work.model, federation, seed=0)
    module.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    settings = {**work.settings, "participation": 1}
    ff.train(federation, module, "fedavg", rounds=1, loss=loss, **settings)
    assert len(inputs) == work.steps // work.per_round, "not the batches of a round"
    layout = torch.channels_last if work.shape[0] > 1 else torch.contiguous_format
    return [(x.contiguous(memory_format=layout), y) for x, y in zip(inputs, targets, strict=True)]


def one_pass(work: Workload, federation: ff.Federation, batches: list[tuple[Tensor, Tensor]]) -> Steps:
    """FedAvg's steps."""
    keep_memory()
    model = ff.FlatModel(build_model(work.model, federation, seed=0))
    module, parameters = model.module.train(), model.parameters
    values = model.split(model.vector)

    def take(steps: int) -> None:
        for step in range(steps):
            x, y = batches[step % len(batches)]
            gradients = torch.autograd.grad(F.cross_entropy(module(x), y), parameters)
            torch._foreach_add_(values, gradients, alpha=-0.01)

    return take


def by_hand(work: Workload, federation: ff.Federation, batches: list[tuple[Tensor, Tensor]]) -> Steps:
    """The same without autograd."""
    keep_memory()
    model = ff.FlatModel(build_model(work.model, federation, seed=0))
    values, chain = model.split(model.vector), Chain.of(model)
    assert chain is not None
    entropy = CrossEntropy(chain.classes, model.vector)
    entropy.next_epoch(torch.cat([y for _, y in batches]), work.batch)

    def take(steps: int) -> None:
        for step in range(steps):
            number = step % len(batches)
            entropy.next_batch(number)
            chain.backward(entropy.differentiate(chain.forward(values, batches[number][0]))[1])
            chain.descend(values, 0.0, 0.01)

    return take


def two_passes(work: Workload, federation: ff.Federation, batches: list[tuple[Tensor, Tensor]]) -> Steps:
    """FedSAM's steps; the second gradient is taken at a point beside the iterate, which needs no restoring."""
    keep_memory()
    model = ff.FlatModel(build_model(work.model, federation, seed=0))
    module, parameters, away = model.module.train(), model.parameters, torch.empty_like(model.vector)
    values, points = model.split(model.vector), model.split(away)

    def gradients_at(where: list[Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        for parameter, value in zip(parameters, where, strict=True):
            parameter.data = value
        return torch.autograd.grad(F.cross_entropy(module(x), y), parameters)

    def climb(x: Tensor, y: Tensor) -> None:
        gradients = gradients_at(values, x, y)
        scale = 0.05 / math.hypot(*torch.stack(torch._foreach_norm(gradients)).tolist())
        for value, gradient, point in zip(values, gradients, points, strict=True):
            torch.add(value, gradient, alpha=scale, out=point)

    def take(steps: int) -> None:
        for step in range(steps):
            x, y = batches[step % len(batches)]
            climb(x, y)
            torch._foreach_add_(values, gradients_at(points, x, y), alpha=-0.01)

    return take


def plain(work: Workload, federation: ff.Federation) -> Steps:
    model = plain_model(work.name).train()
    expected = sum(p.numel() for p in build_model(work.model, federation, seed=0).parameters())
    assert sum(p.numel() for p in model.parameters()) == expected, "another model than the product's"
    x, y = federation.client(0).batch(0, work.samples)
    x = x.contiguous()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

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
                *(
                    f"{median(seconds[name]):.3f}" if name in seconds else "–"
                    for name in ("fedflat", "bare", "plain")
                ),
                str(ratio(seconds["bare"], seconds["fedflat"])),
                str(ratio(seconds["plain"], seconds["fedflat"])) if "plain" in seconds else "–",
                str(len(seconds["fedflat"])),
            ]
        )
    header = ["workload", "steps a round", "fedflat, s", "bare loop, s", "plain PyTorch, s"]
    header += ["fedflat's speed / bare", "fedflat's speed / plain", "rounds"]
    lines = [markdown(header, rows)]
    for label, measured in result.items():
        seconds = measured["seconds"]
        if "one pass" in seconds:
            more = ratio(seconds["bare"], seconds["one pass"])
            lines.append(f"\n{label}: the bare loop takes {more} times as long as FedAvg's.\n")
        if "by hand" in seconds:
            speed = ratio(seconds["by hand"], seconds["fedflat"])
            lines.append(f"\n{label}: fedflat has {speed} of the speed of a bare loop without autograd.\n")
    return "\n".join(lines)


def targets(result: dict[str, Any]) -> list[Target]:
    found = []
    for name in WORKLOADS:
        seconds = result[name]["seconds"]
        speed = ratio(seconds["bare"], seconds["fedflat"])
        found.append(
            Target(f"{name}: at least 0.90 of the bare loop's speed", str(speed), speed.value >= 0.9)
        )
    return found
