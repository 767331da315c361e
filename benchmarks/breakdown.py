"""Where the time of a local step goes, one thread, by PyTorch's profiler.

Products are matrix products and convolutions, forward and backward: what no federated library can save. The update is
the step of SGD and the gathering of gradients. The rest of the operations are activations, pooling, norms and the
loss. What is left is Python and autograd's own bookkeeping. The time within operations is the profiler's, which makes
short ones look longer; the whole step is timed without it, and shares are of that.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import fedflat as ff
from fedflat.allocator import keep_memory
from fedflat.flat import FlatModel
from fedflat.local_training import LocalTraining
from fedflat.messages import Download
from fedflat.models import build_model

from .pace import Target, markdown, say
from .workloads import WORKLOADS, Workload

KINDS = {
    "products": ("aten::addmm", "aten::mm", "aten::bmm", "mkldnn", "convolution", "conv2d", "aten::linear"),
    "update": ("_foreach", "_fused", "aten::add_", "aten::copy_", "aten::sub", "aten::index"),
}
"""By parts of the operations' names; the first that fits counts."""

STEPS = {"W1": 300, "W2": 12, "W3": 12}
"""Enough that starting the profiler does not count."""


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    keep_memory()
    works = {name: replace(work, clients=1) for name, work in WORKLOADS.items()}
    return {
        name: shares(work, 3 if quick else STEPS[name])
        for name, work in works.items()
        if name != "W3" or not quick
    }


def shares(work: Workload, batches: int) -> dict[str, Any]:
    """Milliseconds per step by kind, and without the profiler in all."""
    say(f"{work.name}: profiling {batches} steps")
    federation = replace(work, samples=batches * work.batch).federation().to(torch.float32)
    model = FlatModel(build_model(work.model, federation, seed=0))
    sgd = ff.LocalSGD(lr=0.01, epochs=1, batch_size=work.batch)
    training = LocalTraining(model, ff.fedavg(), sgd, F.cross_entropy, seed=0)
    download = Download(0, 0.01, model.vector.clone(), {}, None)

    def client() -> float:
        began = time.perf_counter()
        training.run(0, federation.client(0), download, {})
        return (time.perf_counter() - began) / batches * 1e3

    client()
    whole = [client()]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        profiled = client()
    whole.append(client())
    spent: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        kind = next(
            (k for k, names in KINDS.items() if any(n in event.key for n in names)), "other operations"
        )
        if event.key.startswith("aten::"):
            spent[kind] += event.self_cpu_time_total / 1e3 / batches
    return {"step": sum(whole) / 2, "profiled": profiled, "kinds": dict(spent)}


def table(result: dict[str, Any]) -> str:
    rows = []
    for name, one in result.items():
        known = [one["kinds"].get(kind, 0.0) for kind in (*KINDS, "other operations")]
        shares = [ms / one["step"] for ms in (*known, max(0.0, one["step"] - sum(known)))]
        rows.append([name, f"{one['step']:.2f}", *(f"{share:.0%}" for share in shares)])
    return markdown(["workload", "ms per step", *KINDS, "other operations", "the rest"], rows)


def targets(result: dict[str, Any]) -> list[Target]:
    return []
