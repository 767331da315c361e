"""A model of 45 MB to clients and back over Flower, beside the least that must travel, and Flower's own simulation.

The local round is empty. "In one process" turns every message into the bytes that would go to a SuperLink and back
into a message, on both ways. The real one is a SuperLink and three SuperNodes on this machine, with TLS and keys:
there a round of a tiny model is the cost of Flower's processes, and what a round of 45 MB takes more is the cost of
the vectors. Flower's simulation is its FedAvg with ten clients a round on two Ray actors.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fedflat as ff
from fedflat.engines.flower.limits import Limits
from fedflat.engines.flower.project import write_project

from .engines import CLIENTS, PARAMETERS
from .overhead import FEW, Empty, per_client, per_round
from .pace import Target, Training, markdown, race, say
from .peers.launch import installed, launch

TINY = 1_000
LOCAL = ff.LocalSGD(lr=0.1, steps=1, weight_decay=0.01)
"""All weights move: Flower sends pieces that are alike, such as zeros, only once."""
APP = """
import torch
from torch import nn

import fedflat as ff
from fedflat.engines.flower import {kind}_app


def model(shape, classes):
    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Parameter(torch.zeros(10))
            self.unused = nn.Parameter(torch.randn({size} - 10))

        def forward(self, x):
            return self.used.expand(len(x), 10)

    return Empty()


def load(node):
    return ff.Federation([(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))], classes=10)


app = {call}
"""


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "bytes": 4 * PARAMETERS,
        "copy": _copy(),
        "grid": in_one_process(3 if quick else 10),
    }
    if quick and not installed("flwr"):
        result["simulation"] = {"error": "not installed; a full run installs it"}
    else:
        result["simulation"] = launch("flwr", "W0", 3 if quick else 10, processes=2, epochs=1)
        say(f"Flower's simulation: {result['simulation'].get('seconds') or result['simulation']['error']}")
    if not quick:
        result["superlink"] = {str(size): over_superlink(size, rounds=4) for size in (TINY, PARAMETERS)}
    return result


def in_one_process(repeats: int) -> dict[str, Any]:
    """Rounds with few clients and with many, in turn, and how many bytes were on the way."""
    from fedflat.engines.flower.client import client_app
    from fedflat.engines.flower.engine import Flower
    from fedflat.engines.flower.nodes import Nodes

    from .wire_grid import Bytes

    data = (torch.zeros(CLIENTS, 1), torch.zeros(CLIENTS, dtype=torch.int64))
    federation = ff.Federation.from_indices(data, torch.arange(CLIENTS).view(-1, 1), classes=10)

    def load(node: Any) -> ff.Federation:
        return ff.Federation([(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))], classes=10)

    with tempfile.TemporaryDirectory() as home:
        app = client_app(load, model=lambda shape, classes: Empty(PARAMETERS))
        grid = Bytes(app, [{"partition-id": n, "state-dir": home} for n in range(CLIENTS)])
        nodes = Nodes(grid, CLIENTS, Limits(poll=0.001))
        nodes.wait()
        logging.getLogger("fedflat.engines.flower").setLevel(logging.WARNING)
        settings: dict[str, Any] = {"local": LOCAL}
        rounds = [range(FEW), range(CLIENTS)] * (repeats + 1)
        settings |= {"participation": ff.Schedule(rounds), "rounds": len(rounds)}
        engines: dict[str, Any] = {
            "inprocess": "inprocess",
            "flower": Flower(grid, nodes, patience=Limits(poll=0.001), report=False),
        }
        contenders = {
            name: Training(federation, _random(), engine=engine, **settings)
            for name, engine in engines.items()
        }
        for contender in contenders.values():
            contender.round()
            contender.round()
        grid.down = grid.up = grid.messages = 0
        seconds = race(contenders, 2 * repeats, "45 MB", warm_up=0)
    found: dict[str, Any] = {
        name: {"many": CLIENTS, "seconds_few": taken[::2], "seconds_many": taken[1::2]}
        for name, taken in seconds.items()
    }
    counted = {"rounds": 2 * repeats, "messages": grid.messages, "down": grid.down, "up": grid.up}
    return found | {"counted": counted}


def _random() -> Empty:
    """Numbers that no two pieces have in common."""
    model = Empty(PARAMETERS)
    torch.nn.init.normal_(model.unused)
    return model


def over_superlink(size: int, rounds: int) -> dict[str, Any]:
    """Seconds of every round on a real SuperLink with three nodes."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from loopback import NODES, PATIENCE, Loopback, wait_for

    with tempfile.TemporaryDirectory() as folder:
        link, app = Loopback(Path(folder)), Path(folder) / "app"
        write_project(app)
        calls = {
            "client": "client_app(load, model=model)",
            "server": f"server_app({str(app / 'federated' / 'experiment.yaml')!r}, model=model)",
        }
        for kind, call in calls.items():
            text = APP.format(kind=kind, size=size, call=call)
            (app / "federated" / f"{kind}.py").write_text(text)
        plan = {"clients": NODES, "method": "fedavg", "participation": "everyone", "rounds": rounds}
        text = json.dumps({**plan, "local": {"lr": 0.1, "steps": 1, "weight_decay": 0.01}})  # JSON is YAML
        (app / "federated" / "experiment.yaml").write_text(text)
        try:
            link.start_server()
            for number in range(NODES):
                link.flwr("supernode", "register", f"{link.keys}/node-{number}.pub", "federation")
                link.start_node(number)
            began = time.perf_counter()
            process = link.submit("run", report=False)
            wait_for(lambda: process.poll() is not None, PATIENCE, lambda: link.everything("run"))
            total = time.perf_counter() - began
            rows = (Path(folder) / "runs" / "app" / "metrics.jsonl").read_text().splitlines()
            listed = link.flwr("list", "federation", "--format", "json")
        finally:
            link.close()
    seconds = [round(json.loads(row)["seconds"], 3) for row in rows]
    say(f"SuperLink, {size:,} parameters: {seconds}")
    traffic = dict(re.findall(r'"([\w-]*bound[\w-]*)": "?(\d+)', listed))
    return {"nodes": NODES, "seconds": seconds, "total": round(total, 1), "traffic": traffic}


def _copy() -> float:
    """Seconds of a copy of the vector."""
    here, there, seconds = torch.ones(PARAMETERS), torch.zeros(PARAMETERS), []
    for _ in range(20):
        began = time.perf_counter()
        there.copy_(here)
        seconds.append(time.perf_counter() - began)
    return round(median(seconds), 6)


def superlink_per_client(result: dict[str, Any]) -> float:
    """Milliseconds that 45 MB out and back take more than a tiny model, a client."""
    taken = {size: median(found["seconds"]) for size, found in result["superlink"].items()}
    nodes = result["superlink"][str(PARAMETERS)]["nodes"]
    return 1000 * (taken[str(PARAMETERS)] - taken[str(TINY)]) / nodes


def table(result: dict[str, Any]) -> str:
    least, counted = result["bytes"], result["grid"]["counted"]
    rows = [
        ["in one process, without Flower", f"{per_client(result['grid']['inprocess']):.0f}", "–", "–", "–"]
    ]
    rows.append(
        [
            "Flower's grid, in one process",
            f"{per_client(result['grid']['flower']):.0f}",
            f"{per_round(result['grid']['flower']):.0f}",
            f"{counted['down'] / counted['rounds'] / least - 1:+.2%}",
            f"{counted['up'] / counted['messages'] / least - 1:+.2%}",
        ]
    )
    if "superlink" in result:
        rounds = 1000 * median(result["superlink"][str(TINY)]["seconds"])
        rows.append(
            ["SuperLink, three SuperNodes", f"{superlink_per_client(result):.0f}", f"{rounds:.0f}", "–", "–"]
        )
    theirs = result["simulation"]
    if theirs.get("seconds"):
        rows.append(
            ["Flower's simulation", f"{1000 * median(theirs['seconds']) / CLIENTS:.0f}", "in it", "–", "–"]
        )
    header = [
        "",
        "ms a client",
        "ms a round",
        "bytes down over one model a round",
        "bytes up over one model a client",
    ]
    said = f"One copy of the vector takes {1000 * result['copy']:.1f} ms, there and back two of them."
    return markdown(header, rows) + f"\n\n{said}"


def targets(result: dict[str, Any]) -> list[Target]:
    wanted = "overhead over Flower for 45 MB and 10 clients against the least, beside Flower's own simulation"
    ours = per_client(result["grid"]["flower"])
    theirs = result["simulation"].get("seconds")
    shown = (
        f"{1000 * median(theirs) / CLIENTS:.0f} ms"
        if theirs
        else result["simulation"].get("error", "nothing")
    )
    said = f"{ours:.0f} ms a client, least {2000 * result['copy']:.0f} ms, simulation {shown}"
    return [Target(wanted, said, bool(theirs))]
