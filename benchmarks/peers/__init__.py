"""Seconds per round of fedflat with two workers against fluke, pfl and Flower's simulation.

All train the same model on the same data with the same batches and steps, FedAvg, no evaluation. Every peer runs
with its fastest number of processes and threads, which short runs find, in an environment of its own, with the
versions that `benchmarks/requirements/` pins. Runs of the peers and rounds of fedflat take turns.
"""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

from ..pace import Target, Training, markdown, ratio, say
from ..workloads import WORKLOADS
from .launch import PEERS, installed, launch, layouts


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


FULL = {"W1": Plan(3, ours=5, theirs=5, search=5), "W2": Plan(1, ours=2, theirs=2, search=1, least=2)}
QUICK = {"W1": Plan(1, ours=3, theirs=3, search=0)}
WANTED = {"W1": {"fluke": 2.0, "pfl": 2.0, "flwr": 2.5}, "W2": {"fluke": 1.4, "pfl": 1.4, "flwr": 1.4}}


def measure(quick: bool) -> dict[str, Any]:
    return {name: compare(name, plan, install=not quick) for name, plan in (QUICK if quick else FULL).items()}


def compare(name: str, plan: Plan, install: bool) -> dict[str, Any]:
    """What every peer reports, and fedflat's seconds."""
    import fedflat as ff

    peers: dict[str, Any] = {}
    for peer in PEERS:
        if not install and not installed(peer):
            peers[peer] = {"error": "not installed; a full run installs it"}
            say(f"{name}: {peer} is {peers[peer]['error']}")
        else:
            peers[peer] = fastest(peer, name, plan)
    runs = [peer for peer in PEERS if "error" not in peers[peer]]
    work = WORKLOADS[name]
    ours = Training(work.federation(), work.model, engine=ff.Workers(2), **work.settings)
    seconds = []
    try:
        ours.round()
        for repeat in range(plan.repeats):
            for peer in runs:
                seconds += [round(ours.round(), 6) for _ in range(plan.ours)]
                entry = peers[peer]
                run = (peer, name, plan.theirs, entry["threads"], entry["processes"])
                found = launch(*run)
                if "error" in found:  # once in a while torchrun gives up without a reason
                    say(f"{name}: {peer} once more, since {found['error']}")
                    found = launch(*run)
                entry |= {key: found[key] for key in ("version", "torch", "note", "error") if key in found}
                entry["seconds"] += found.get("seconds", [])
                say(
                    f"{name}: {peer} {repeat + 1} of {plan.repeats}: {found.get('error') or found['seconds']}"
                )
    finally:
        ours.close()
    return {"steps": work.steps, "fedflat": seconds, "peers": peers}


def fastest(peer: str, name: str, plan: Plan) -> dict[str, Any]:
    """The peer's fastest layout; without a search the one that uses all cores best as a rule."""
    tried = [layout for layout in layouts(peer) if max(layout) >= plan.least] or layouts(peer)
    if not plan.search or len(tried) == 1:
        processes, threads = tried[-1]
        return {"processes": processes, "threads": threads, "seconds": []}
    searched: dict[str, Any] = {}
    best: tuple[float, int, int] | None = None
    for processes, threads in tried:
        result = launch(peer, name, max(1, plan.theirs // 2), threads, processes, plan.search)
        found = result.get("seconds") or result.get("error")
        searched[f"{processes} x {threads}"] = found
        say(f"{name}: {peer} with {processes} x {threads}: {found}")
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
            rows.append([name, f"{peer} {entry['version']}", layout, *row])
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
        for peer, wanted in WANTED[name].items():
            text = f"{name}: at least {wanted}x faster than {peer}"
            theirs = measured["peers"][peer].get("seconds")
            if not theirs:
                found.append(Target(text, measured["peers"][peer].get("error", "nothing"), False))
                continue
            faster = ratio(theirs, measured["fedflat"])
            found.append(Target(text, str(faster), faster.value >= wanted))
    return found
