"""How close the other methods come to their limits: each beside a bare loop of its own, on two processes.

A method's bare loop (`benchmarks/bare.py`) is its formulas in plain PyTorch with nothing around them: the passes of
its local steps with `autograd.grad`, its operations on one flat vector, a teacher's outputs once per round, what the
client keeps and uploads. Its update is compared with that of a client of fedflat before it is timed. fedflat and the
bare loop take turns, round by round. All clients take part in every round, so that each has the state that the
method keeps. FedAvg is above, under *Against a bare PyTorch loop*.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import torch

import fedflat as ff

from . import bare
from .pace import Processes, Target, Training, markdown, race, ratio, say
from .workloads import WORKLOADS, Workload

METHODS = tuple(name for name in bare.LOOPS if name != "fedavg")
W1 = replace(WORKLOADS["W1"], clients=10)
W2 = replace(WORKLOADS["W2"], clients=2, per_round=2)
FULL = (("W1", W1, METHODS, 40), ("W2", W2, METHODS, 8))
"""and how many rounds"""
QUICK = (
    ("W1", replace(W1, clients=2, per_round=2, samples=300), METHODS, 3),
    ("W2", replace(W2, samples=100, epochs=2), ("fedsam",), 2),
)
WANTED = 0.90
"""the least speed in bare loops"""


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for label, work, names, rounds in QUICK if quick else FULL:
        say(f"{label}: preparing")
        batches, federation = bare.observe(work, "fedavg").batches, work.federation()
        seconds = {name: compare(label, work, name, rounds, batches, federation) for name in names}
        result[label] = {"steps": work.steps, "seconds": seconds}
    return result


def compare(
    label: str, work: Workload, method: str, rounds: int, batches: bare.Batches, federation: ff.Federation
) -> dict[str, list[float]]:
    """Seconds per round of fedflat and of the method's bare loop."""
    contenders: dict[str, Training | Processes] = {
        "bare": bare.contender(work, method, batches),
        "fedflat": Training(federation, work.model, method, engine=ff.Workers(2), **work.settings),
    }
    return race(contenders, rounds, f"{label}: {ff.METHODS[method]().name}")


def table(result: dict[str, Any]) -> str:
    rows = []
    for label, measured in result.items():
        for name, seconds in measured["seconds"].items():
            method = ff.METHODS[name]()
            rows.append(
                [
                    method.name,
                    f"{method.cost.forward:g} / {method.cost.backward:g}",
                    f"{label}, {measured['steps']}",
                    *(f"{median(seconds[way]):.3f}" for way in ("fedflat", "bare")),
                    str(ratio(seconds["bare"], seconds["fedflat"])),
                    str(len(seconds["fedflat"])),
                ]
            )
    header = ["method", "passes forward / backward", "workload, steps a round", "fedflat, s", "bare loop, s"]
    return markdown([*header, "fedflat's speed / bare", "rounds"], rows)


def targets(result: dict[str, Any]) -> list[Target]:
    found = []
    for label, measured in result.items():
        for name, seconds in measured["seconds"].items():
            speed = ratio(seconds["bare"], seconds["fedflat"])
            text = f"{ff.METHODS[name]().name}, {label}: at least {WANTED:.2f} of its bare loop's speed"
            found.append(Target(text, str(speed), speed.value >= WANTED))
    return found
