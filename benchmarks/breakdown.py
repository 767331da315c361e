"""Where the time of a local step goes, one thread, by PyTorch's profiler.

Products are matrix products and convolutions, forward and backward: what no federated library can save. Sweeps go
over vectors as long as the model: the step of SGD, and with SAM the gradient's norm and the move to the second point.
Other operations are activations, pooling, norms, the loss and the gathering of samples. What is left is Python and
autograd's own bookkeeping. The time within operations is the profiler's, which makes short ones look longer; the
whole step is timed without it, in turn, and shares are of that.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import fedflat as ff

from .pace import Target, markdown, say
from .workloads import LR, WORKLOADS, Workload

KINDS = {
    "products": ("aten::addmm", "aten::mm", "aten::bmm", "mkldnn", "convolution", "conv2d", "aten::linear"),
    "sweeps": (
        *("_foreach", "_fused", "aten::add", "aten::copy_", "aten::sub"),
        *("aten::abs", "aten::mul", "vector_norm"),
    ),
}
"""By parts of the operations' names; the first that fits counts."""
OTHER = "other operations"

EPOCHS = {"W1": 10, "W2": 1, "W3": 1}
"""of a client, in one measurement"""
REPEATS = 9

METHODS = {"W1": ("fedavg", "fedsam", "fedgmt", "fedwmsam"), "W2": ("fedavg",), "W3": ("fedavg",)}
"""other methods only where their sweeps and Python weigh most"""


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    works = {name: replace(work, clients=1) for name, work in WORKLOADS.items()}
    found = {}
    for name, work in works.items():
        if name != "W1" and quick:
            continue
        for method in METHODS[name]:
            label = name if method == "fedavg" else f"{name}, {ff.METHODS[method]().name}"
            found[label] = shares(work, method, *((2, 1) if quick else (EPOCHS[name], REPEATS)))
    return found


def shares(work: Workload, method: str, epochs: int, repeats: int) -> dict[str, Any]:
    """Milliseconds per step by kind, and without the profiler in all: medians."""
    say(f"{work.name}, {method}: profiling")
    sgd = ff.LocalSGD(lr=LR, epochs=epochs, batch_size=work.batch)
    steps = sgd.steps_for(work.samples)
    whole: list[float] = []
    kinds: dict[str, list[float]] = {kind: [] for kind in (*KINDS, OTHER)}
    profiler = profile(activities=[ProfilerActivity.CPU])
    began = 0.0

    def next_round(record: ff.RoundRecord) -> None:
        """Rounds with and without the profiler take turns; the first two only warm up."""
        nonlocal began, profiler
        taken = time.perf_counter() - began
        if record.index % 2:
            profiler.stop()
            if record.index > 1:
                for kind, spent in by_kind(profiler).items():
                    kinds[kind].append(spent / steps)
        else:
            if record.index > 1:
                whole.append(taken / steps * 1e3)
            profiler = profile(activities=[ProfilerActivity.CPU])
            profiler.start()
        began = time.perf_counter()

    ff.train(
        work.federation(),
        work.model,
        method,
        local=sgd,
        rounds=2 * (repeats + 1),
        engine="inprocess",
        on_round=next_round,
    )
    return {"step": median(whole), "kinds": {kind: median(spent) for kind, spent in kinds.items()}}


def by_kind(profiler: profile) -> dict[str, float]:
    """Milliseconds within operations."""
    spent = dict.fromkeys((*KINDS, OTHER), 0.0)
    for event in profiler.key_averages():
        if event.key.startswith("aten::"):
            kind = next((k for k, names in KINDS.items() if any(n in event.key for n in names)), OTHER)
            spent[kind] += event.self_cpu_time_total / 1e3
    return spent


def table(result: dict[str, Any]) -> str:
    rows = []
    for name, one in result.items():
        known = list(one["kinds"].values())
        parts = [*known, max(0.0, one["step"] - sum(known))]
        rows.append([name, f"{one['step']:.2f}", *(f"{ms:.2f} ({ms / one['step']:.0%})" for ms in parts)])
    return markdown(["workload", "ms per step", *KINDS, OTHER, "the rest"], rows)


def targets(result: dict[str, Any]) -> list[Target]:
    return []
