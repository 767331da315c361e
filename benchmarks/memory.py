"""Peak memory above the dataset, by number of clients and by what is kept of them.

Every run is a process of its own, which waits with its dataset loaded. From there on the proportional set size of it
and of its workers is sampled, and the system keeps the highest resident set size of the main process: the larger
growth of the two counts. Models, libraries' buffers and indices of clients are all part of it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedflat as ff

from .machine import ROOT
from .pace import Target, markdown, say

MIB = 2**20
SAMPLES = 60_000
"""of the dataset that all clients share"""
ENGINES = {"inprocess": ff.InProcess, "workers": ff.Workers}

MANY, STATES, RESNET = "clients that never take part", "FedDyn's states", "ResNet-18 with SCAFFOLD"


def scenarios(quick: bool) -> list[dict[str, Any]]:
    """What the runs are told."""
    scale = 10 if quick else 1
    many = {"part": MANY, "model": "mlp", "method": "scaffold", "per_round": 10, "rounds": 5, "steps": 5}
    dyn = {"part": STATES, "model": "linear", "method": "feddyn", "steps": 1, "engine": "inprocess"}
    deep = {"part": RESNET, "model": "resnet18", "method": "scaffold", "steps": 1, "engine": "inprocess"}
    kept = min(2_000 if quick else 100_000, _room_on_disk() // (4 * 60_000))
    return [
        *(
            {**many, "clients": clients, "engine": engine}
            for clients in ((100, 10**5) if quick else (100, 10**4, 10**6))
            for engine in (["workers"] if quick else ENGINES)
        ),
        {**dyn, "clients": kept, "per_round": 1000 // scale, "budget": 512 * MIB // scale},
        *(
            {**deep, "clients": 100 // scale, "per_round": 5, "budget": budget}
            for budget in (0, 1024 * MIB // scale)
        ),
    ]


def _room_on_disk() -> int:
    return shutil.disk_usage(tempfile.gettempdir()).free * 3 // 4


def measure(quick: bool) -> dict[str, Any]:
    found = []
    for scenario in scenarios(quick):
        found.append(observe(scenario))
        took = f"{growth(found[-1]) / MIB:.0f} MiB"
        say(f"{scenario['part']}: {scenario['clients']:,} clients, {scenario['engine']}: {took}")
    return {"scale": 10 if quick else 1, "runs": found}


# -- outside: watch a process ----------------------------------------------------------------------


def observe(scenario: dict[str, Any]) -> dict[str, Any]:
    """Run a scenario in a process of its own; its settings, its numbers and the growth of its memory in bytes."""
    command = [sys.executable, "-m", "benchmarks.memory", json.dumps(scenario)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the run of {scenario} failed before it began")
        base = peak = proportional(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        while not select.select([process.stdout], [], [], 0.05)[0]:
            peak = max(peak, proportional(process.pid))
        answer = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"the run of {scenario} failed")
    return {**scenario, "dataset_and_libraries": base, "growth": peak - base, **json.loads(answer)}


def proportional(pid: int) -> int:
    """Bytes of a process and its descendants; what several of them share counts once."""
    try:
        tree = Path(f"/proc/{pid}")
        lines = (tree / "smaps_rollup").read_text().splitlines()
        children = {c for task in (tree / "task").iterdir() for c in (task / "children").read_text().split()}
    except OSError:  # it has just ended
        return 0
    own = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return own + sum(proportional(int(child)) for child in children)


# -- inside ----------------------------------------------------------------------------------------


def main(scenario: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    shape = {"mlp": (1, 28, 28), "linear": (299,), "resnet18": (3, 32, 32)}[scenario["model"]]
    samples = SAMPLES if scenario["model"] == "mlp" else 1000
    classes = 200 if scenario["model"] == "linear" else 10
    data = torch.randn(samples, *shape), torch.randint(classes, (samples,))
    print("ready", flush=True)
    sys.stdin.readline()
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest size so far
    before, began = _status("VmRSS"), time.perf_counter()
    run = train(scenario, data, classes)
    print(
        json.dumps(
            {
                "growth_of_main": _status("VmHWM") - before,
                "seconds": round(time.perf_counter() - began, 3),
                "parameters": sum(p.numel() for p in run.model.parameters()),
                "clients_with_state": len(run.clients.clients()),
                "state_in_memory": run.clients.bytes_in_memory,
                "disk": _unnamed_files(),
            }
        )
    )


def train(scenario: dict[str, Any], data: tuple[torch.Tensor, torch.Tensor], classes: int) -> ff.Run:
    """Clients own ten rows each of the shared dataset. With a budget, all take part once, then some again."""
    clients, per_round = scenario["clients"], scenario["per_round"]
    rows = torch.arange(10 * clients).remainder_(len(data[1])).view(clients, 10)
    settings: dict[str, Any] = {"participation": per_round, "rounds": scenario.get("rounds")}
    if "budget" in scenario:
        blocks = [range(i, min(i + per_round, clients)) for i in range(0, clients, per_round)]
        blocks += blocks[: max(1, len(blocks) // 20)]
        settings = {"participation": ff.Schedule(blocks), "rounds": len(blocks)}
        settings["state_memory"] = scenario["budget"]
    model: Any = nn.Linear(299, 200) if scenario["model"] == "linear" else scenario["model"]
    return ff.train(
        ff.Federation.from_indices(data, rows, classes=classes),
        model,
        scenario["method"],
        local=ff.LocalSGD(lr=0.01, steps=scenario["steps"], batch_size=10),
        engine=ENGINES[scenario["engine"]](),
        **settings,
    )


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _unnamed_files() -> int:
    """Bytes on disk of this process's files without a name, where states are kept."""
    total = 0
    for handle in os.listdir("/proc/self/fd"):
        try:
            about = os.stat(f"/proc/self/fd/{handle}")
        except OSError:  # the listing itself
            continue
        if stat.S_ISREG(about.st_mode) and about.st_nlink == 0:
            total += about.st_blocks * 512
    return total


# -- the report ------------------------------------------------------------------------------------


def growth(run: dict[str, Any]) -> int:
    return max(run["growth"], run["growth_of_main"])


def table(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{run['part']} ({run['method']}, {run['parameters']:,} parameters)",
            run["engine"],
            f"{run['clients']:,}",
            f"{run['clients_with_state']:,}",
            f"{run['budget'] / MIB:,.0f}" if "budget" in run else "–",
            f"{growth(run) / MIB:,.0f}",
            f"{run['state_in_memory'] / MIB:,.0f}",
            f"{run['disk'] / MIB:,.0f}",
            f"{run['seconds']:,.0f}",
        ]
        for run in result["runs"]
    ]
    header = ["run", "engine", "clients", "took part", "state budget, MiB", "growth, MiB"]
    return markdown([*header, "of it states, MiB", "on disk, MiB", "seconds"], rows)


def targets(result: dict[str, Any]) -> list[Target]:
    runs = {name: [run for run in result["runs"] if run["part"] == name] for name in (MANY, STATES, RESNET)}
    most = max(run["clients"] for run in runs[MANY])
    worst = max(growth(run) for run in runs[MANY] if run["clients"] == most)
    kept = runs[STATES][0]
    room = 1.2 * kept["budget"] + 4 * kept["parameters"]
    on_disk, in_memory = runs[RESNET]
    states = growth(in_memory) - growth(on_disk)
    return [
        Target(
            f"{most:,} clients, 10 active: less than 1 GiB above the dataset",
            f"{worst / MIB:,.0f} MiB",
            worst < 1024 * MIB and most == 10**6,
        ),
        Target(
            f"FedDyn, {kept['clients']:,} clients of {kept['parameters']:,} parameters, budget "
            f"{kept['budget'] / MIB:,.0f} MiB: within 1.2 x that plus the model ({room / MIB:,.0f} MiB)",
            f"{growth(kept) / MIB:,.0f} MiB",
            growth(kept) <= room and kept["clients"] == 100_000,
        ),
        Target(
            f"ResNet-18, SCAFFOLD, {in_memory['clients']} clients within a state budget of "
            f"{in_memory['budget'] / MIB:,.0f} MiB",
            f"{states / MIB:,.0f} MiB more than with a budget of 0 ({growth(in_memory) / MIB:,.0f} MiB)",
            max(states, in_memory["state_in_memory"]) <= in_memory["budget"] and in_memory["clients"] == 100,
        ),
    ]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
