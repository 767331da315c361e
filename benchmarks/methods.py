"""Seconds per round of every method relative to FedAvg, with two workers, in steady state.

Methods take turns round by round, a few at a time, each few together with FedAvg of their own. All clients of these
federations take part in every round, so that each has the state that the method keeps. Methods with a limit are
measured with clients of the workload's size, more often than the others; the others on W2 with clients of fewer
samples, so that what a method does once per round weighs more than it would. What two passes take in a bare loop,
measured at another time, is under *Against a bare PyTorch loop*.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import torch

import fedflat as ff

from .pace import Processes, Target, Training, markdown, race, ratio
from .workloads import WORKLOADS, Workload

CHEAP = ("scaffold", "feddyn", "fedlesam", "fednsam", "fedwmsam", "fedgmt")
"""one pass for each of FedAvg's"""
SAM_FAMILY = ("fedsam", "fedasam", "mofedsam", "fedgamma", "fedspeed", "fedsam_nesterov")
TOGETHER = 7

W1 = replace(WORKLOADS["W1"], clients=10)
W2 = replace(WORKLOADS["W2"], clients=2, per_round=2)
PLAIN, AUGMENTED = "W2", "W2, crop and flip"
FULL = (("W1", W1, 64), (PLAIN, W2, 8), (AUGMENTED, replace(W2, augment=True), 6))
"""and how many rounds of methods with a limit"""
OTHERS = {
    "W1": (W1, 12),
    PLAIN: (replace(W2, samples=150), 3),
    AUGMENTED: (replace(W2, samples=150, augment=True), 3),
}
QUICK = (("W1", replace(W1, clients=2, per_round=2, samples=300), 2), (PLAIN, replace(W2, samples=50), 1))

LIMITS = {
    **{name: {"W1": 1.12, PLAIN: 1.08, AUGMENTED: 1.08} for name in CHEAP[:4]},
    "fedwmsam": {"W1": 1.25, PLAIN: 1.10, AUGMENTED: 1.10},
    "fedgmt": {"W1": 1.20, PLAIN: 1.08, AUGMENTED: 1.40},
    **{name: {"W1": 2.05, PLAIN: 2.05, AUGMENTED: 2.05} for name in SAM_FAMILY},
}


def rest() -> list[tuple[str, ...]]:
    """Methods that have no limit, a few together."""
    names = [name for name in ff.METHODS if name not in ("fedavg", *CHEAP, *SAM_FAMILY)]
    return [tuple(names[i : i + TOGETHER]) for i in range(0, len(names), TOGETHER)]


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    result = {}
    for label, work, rounds in QUICK if quick else FULL:
        limited = (CHEAP, SAM_FAMILY) if label == "W1" or not quick else (CHEAP,)
        measured = [compare(label, work, group, rounds) for group in limited]
        if label == "W1" or not quick:
            other, rounds = (work, rounds) if quick else OTHERS[label]
            measured += [compare(label, other, group, rounds) for group in rest()]
        result[label] = {"steps": work.steps, "groups": measured}
    return result


def compare(label: str, work: Workload, names: tuple[str, ...], rounds: int) -> dict[str, list[float]]:
    """Seconds per round of some methods and of FedAvg."""
    federation = work.federation()
    contenders: dict[str, Training | Processes] = {
        name: Training(federation, work.model, name, engine=ff.Workers(2), **work.settings)
        for name in ("fedavg", *names)
    }
    return race(contenders, rounds, f"{label}: {', '.join(names)}")


def ratios(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By method, then by workload."""
    found: dict[str, dict[str, Any]] = {name: {} for name in ff.METHODS}
    for label, measured in result.items():
        for group in measured["groups"]:
            for name, seconds in group.items():
                if name != "fedavg":
                    found[name][label] = ratio(seconds, group["fedavg"])
        base = median(measured["groups"][0]["fedavg"])
        found["fedavg"][label] = f"{base:.3f} s"
    return found


def table(result: dict[str, Any]) -> str:
    rows = []
    for name, by_workload in ratios(result).items():
        method = ff.METHODS[name]()
        passes = f"{method.cost.forward:g} / {method.cost.backward:g}"
        rows.append([method.name, passes, *(str(by_workload.get(label, "–")) for label in result)])
    header = [f"{label}, {measured['steps']} steps a round" for label, measured in result.items()]
    return markdown(["method", "passes forward / backward", *header], rows)


def targets(result: dict[str, Any]) -> list[Target]:
    measured = ratios(result)
    return [
        Target(
            f"{ff.METHODS[name]().name}, {label}: at most {limit:.2f} of FedAvg's seconds",
            str(measured[name][label]),
            measured[name][label].value <= limit,
        )
        for name, limits in LIMITS.items()
        for label, limit in limits.items()
        if label in measured[name]
    ]
