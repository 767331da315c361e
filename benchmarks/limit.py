"""How close fedflat comes to a bare PyTorch loop: the same steps, two processes with one thread each, no federation.

The bare loop has the product's fast modules and layout, `autograd.grad` and one fused update per step, batches that
are slices of a shuffled copy of the data. What is missing from it is what fedflat adds: sending, states, flat
vectors, validation, aggregation, and the shuffling and gathering of every epoch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time

import torch
import torch.nn.functional as F
from workloads import WORKLOADS, Workload

import fedflat as ff
from fedflat.allocator import keep_memory
from fedflat.flat import FlatModel
from fedflat.models import build_model


def bare_steps(work: Workload, share: int, pipe: multiprocessing.connection.Connection) -> None:
    """Answer every message with the seconds that `share` bare steps took."""
    torch.set_num_threads(1)
    keep_memory()
    federation = work.federation()
    model = FlatModel(build_model(work.model, federation, seed=0))
    module, parameters = model.module.train(), model.parameters
    inputs, targets = federation.client(0).batch(0, work.samples)
    batches = [
        (inputs[i : i + work.batch], targets[i : i + work.batch]) for i in range(0, work.samples, work.batch)
    ]
    while True:
        pipe.recv()
        began = time.perf_counter()
        for step in range(share):
            x, y = batches[step % len(batches)]
            gradients = torch.autograd.grad(F.cross_entropy(module(x), y), parameters)
            torch._foreach_add_([p.data for p in parameters], gradients, alpha=-0.01)
        pipe.send(time.perf_counter() - began)


class Bare:
    """Two processes that take bare steps."""

    def __init__(self, work: Workload, processes: int = 2) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            share = work.steps // processes
            context.Process(target=bare_steps, args=(work, share, theirs), daemon=True).start()
            self.pipes.append(ours)

    def round(self) -> float:
        """Wall seconds of a round's worth of steps."""
        began = time.perf_counter()
        for pipe in self.pipes:
            pipe.send("go")
        for pipe in self.pipes:
            pipe.recv()
        return time.perf_counter() - began


def measure(name: str, repeats: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per round, bare and fedflat in turn."""
    work = WORKLOADS[name]
    federation = work.federation()
    bare = Bare(work)
    bare.round()
    seconds: dict[str, list[float]] = {"bare": [], "fedflat": []}
    for _ in range(repeats):
        run = ff.train(
            federation,
            work.model,
            "fedavg",
            local=work.sgd,
            participation=work.per_round,
            rounds=rounds + 1,
            engine=ff.Workers(2),
        )
        seconds["fedflat"] += [row["seconds"] for row in run.history[1:]]
        seconds["bare"] += [bare.round() for _ in range(rounds)]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=["W1"], choices=sorted(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    for name in options.workloads:
        seconds = measure(name, options.repeats, options.rounds)
        bare, ours = (statistics.median(seconds[key]) for key in ("bare", "fedflat"))
        print(f"{name}: bare {bare:.3f} s a round, fedflat {ours:.3f} s, {bare / ours:.0%} of the bare speed")


if __name__ == "__main__":
    main()
