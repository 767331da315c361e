"""Seconds per round of fedflat with two workers against fluke, pfl and Flower's simulation.

All train the same model on the same data with the same batches and steps, FedAvg, no evaluation. Every peer runs
with its fastest number of threads, which short runs find, in an environment of its own, with the versions that
`benchmarks/requirements/` pins. Runs of the peers and rounds of fedflat take turns.

Two of them run in two ways each. pfl trains clients one after the other, unless `torchrun` starts several processes
of the whole program. In Flower the local loop is the user's: with a `DataLoader`, as in Flower's guide, or with
batches by index, which is as quick as PyTorch's own means allow.
"""

from __future__ import annotations

import os
from statistics import median
from typing import Any, NamedTuple

from ..pace import Target, Training, markdown, ratio, say
from ..workloads import WORKLOADS
from .launch import installed, launch

CORES = len(os.sched_getaffinity(0))
ONE_PROCESS = ((1, 1), (1, CORES))
SPREAD = ((CORES, 1),)


class Way(NamedTuple):
    """A peer, and how it is run."""

    peer: str
    layouts: tuple[tuple[int, int], ...]
    """(processes, threads) that are tried"""
    loader: bool = False


WAYS = {
    "fluke": Way("fluke", ONE_PROCESS),  # trains clients side by side only on several GPUs
    "pfl": Way("pfl", ONE_PROCESS),
    "pfl, torchrun": Way("pfl", SPREAD),
    "flwr, DataLoader": Way("flwr", (*ONE_PROCESS, *SPREAD), loader=True),
    "flwr, by index": Way("flwr", (*ONE_PROCESS, *SPREAD)),
}


class Plan(NamedTuple):
    repeats: int
    ours: int
    """rounds of fedflat before every run of a peer"""
    theirs: int
    """timed rounds of that run"""
    search: int
    """epochs of the runs that find the fastest layout; 0 for not to search"""
    least: int = 1
    """cores of the layouts that are tried"""
    ways: tuple[str, ...] = tuple(WAYS)


FULL = {"W1": Plan(3, ours=5, theirs=5, search=5), "W2": Plan(1, ours=2, theirs=2, search=1, least=2)}
QUICK = {"W1": Plan(1, ours=3, theirs=3, search=0, ways=("fluke", "pfl", "flwr, by index"))}
WANTED = {"W1": 1.8, "W2": 1.5}
"""how many times faster than every library fedflat shall be"""


def measure(quick: bool) -> dict[str, Any]:
    return {name: compare(name, plan, install=not quick) for name, plan in (QUICK if quick else FULL).items()}


def compare(name: str, plan: Plan, install: bool) -> dict[str, Any]:
    """What every peer reports, and fedflat's seconds."""
    import fedflat as ff

    peers: dict[str, Any] = {}
    for label in plan.ways:
        if not install and not installed(WAYS[label].peer):
            peers[label] = {"error": "not installed; a full run installs it"}
            say(f"{name}: {label} is {peers[label]['error']}")
        else:
            peers[label] = fastest(label, name, plan)
    runs = [label for label in plan.ways if "error" not in peers[label]]
    work = WORKLOADS[name]
    ours = Training(work.federation(), work.model, engine=ff.Workers(2), **work.settings)
    seconds = []
    try:
        ours.round()
        for repeat in range(plan.repeats):
            for label in runs:
                seconds += [round(ours.round(), 6) for _ in range(plan.ours)]
                entry, way = peers[label], WAYS[label]
                run = (way.peer, name, plan.theirs, entry["threads"], entry["processes"])
                found = launch(*run, loader=way.loader)
                if "error" in found:  # once in a while torchrun gives up without a reason
                    say(f"{name}: {label} once more, since {found['error']}")
                    found = launch(*run, loader=way.loader)
                entry |= {key: found[key] for key in ("version", "torch", "note", "error") if key in found}
                entry["seconds"] += found.get("seconds", [])
                say(
                    f"{name}: {label} {repeat + 1} of {plan.repeats}: {found.get('error') or found['seconds']}"
                )
    finally:
        ours.close()
    return {"steps": work.steps, "fedflat": seconds, "peers": peers}


def fastest(label: str, name: str, plan: Plan) -> dict[str, Any]:
    """The peer's fastest layout; without a search the one that uses all cores best as a rule."""
    way = WAYS[label]
    tried = [layout for layout in dict.fromkeys(way.layouts) if max(layout) >= min(plan.least, CORES)]
    if not plan.search or len(tried) == 1:
        processes, threads = tried[-1]
        return {"processes": processes, "threads": threads, "seconds": []}
    searched: dict[str, Any] = {}
    best: tuple[float, int, int] | None = None
    for processes, threads in tried:
        rounds = max(1, plan.theirs // 2)
        result = launch(way.peer, name, rounds, threads, processes, plan.search, loader=way.loader)
        found = result.get("seconds") or result.get("error")
        searched[f"{processes} x {threads}"] = found
        say(f"{name}: {label} with {processes} x {threads}: {found}")
        if isinstance(found, list):
            entry = (median(found), processes, threads)
            best = entry if best is None else min(best, entry)
    if best is None:
        return {"error": str(found), "searched": searched}
    return {"processes": best[1], "threads": best[2], "searched": searched, "seconds": []}


def table(result: dict[str, Any]) -> str:
    rows = []
    for name, measured in result.items():
        ours = measured["fedflat"]
        if ours:
            rows.append([name, "fedflat", "2 x 1", f"{median(ours):.3f}", "1", str(len(ours))])
        for peer, entry in measured["peers"].items():
            if not entry.get("seconds"):
                rows.append([name, peer, entry.get("error", "nothing"), "–", "–", "–"])
                continue
            layout = f"{entry['processes']} x {entry['threads']}"
            theirs = entry["seconds"]
            row = [f"{median(theirs):.3f}", str(ratio(theirs, ours)), str(len(theirs))]
            library, *how = peer.split(", ")
            rows.append([name, ", ".join([f"{library} {entry['version']}", *how]), layout, *row])
    header = ["workload", "library", "processes x threads", "s a round", "times fedflat's", "rounds"]
    tried = [
        f"{name}, {peer}: " + ", ".join(f"{layout} {_shown(found)}" for layout, found in searched.items())
        for name, measured in result.items()
        for peer, entry in measured["peers"].items()
        if (searched := entry.get("searched"))
    ]
    notes = f"\n\nLayouts tried, with the seconds of a (shorter) round: {'; '.join(tried)}." if tried else ""
    return markdown(header, rows) + notes


def _shown(found: list[float] | str) -> str:
    return f"{median(found):.2f}" if isinstance(found, list) else found


def targets(result: dict[str, Any]) -> list[Target]:
    found = []
    for name, measured in result.items():
        for peer, entry in measured["peers"].items():
            text = f"{name}: at least {WANTED[name]}x faster than {peer}"
            theirs = entry.get("seconds")
            if not theirs:
                found.append(Target(text, entry.get("error", "nothing"), False))
                continue
            faster = ratio(theirs, measured["fedflat"])
            found.append(Target(text, str(faster), faster.value >= WANTED[name]))
    return found
