"""What every engine costs per client for a model of 45 MB with 10 clients, out and back, beside the least possible.

The local round is empty, as for the overhead above, and engines take turns. The least is the work that is there
without any engine (a client's copy of the model, its update, the check and the fold) and, where clients are in two
processes, one more copy of the update into memory that both see, spread evenly over the two cores. Bytes are those
that go out and come back with a client beside its vectors.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import fedflat as ff
from fedflat.engines.base import Engine

from .overhead import FEW, Empty, per_client, per_round
from .pace import Target, Training, markdown, race, say

PARAMETERS = 11_173_962
"""of a ResNet-18: 44.7 MB"""
CLIENTS = 10
PROCESSES = 2
REPEATS = 10


class WeighedRay(ff.Ray):
    """Notes how many bytes go to a client and come back beside its vectors."""

    def _own(self, *arguments: Any) -> Any:
        self.down = _bytes_beside_vectors(own := super()._own(*arguments))
        return own

    def _upload(self, answer: Any) -> Any:
        self.up = _bytes_beside_vectors(answer)
        return super()._upload(answer)


def _bytes_beside_vectors(message: Any) -> int:
    return len(pickle.dumps(message, protocol=5, buffer_callback=lambda piece: None))


ENGINES: dict[str, Callable[[], Engine]] = {
    "inprocess": ff.InProcess,
    "workers": lambda: ff.Workers(
        PROCESSES
    ),  # before those that start threads in this process: workers are forked
    "ray": lambda: WeighedRay(actors=PROCESSES),
}


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    data = (torch.zeros(CLIENTS, 1), torch.zeros(CLIENTS, dtype=torch.int64))
    federation = ff.Federation.from_indices(data, torch.arange(CLIENTS).view(-1, 1), classes=10)
    contenders: dict[str, Any] = {}
    engines: dict[str, Any] = {}
    repeats = 3 if quick else REPEATS
    result: dict[str, Any] = {}
    for name, make in ENGINES.items():
        try:
            engines[name] = make()
        except ff.FedflatError as problem:
            say(f"{name}: left out. {problem}")
            continue
        contenders[name] = Training(
            federation,
            Empty(PARAMETERS),
            local=ff.LocalSGD(steps=1),
            participation=ff.Schedule([range(FEW), range(CLIENTS)] * (repeats + 1)),
            engine=engines[name],
            rounds=2 * (repeats + 1),
        )
        began = time.perf_counter()
        contenders[name].round()
        result[name] = {"start": round(time.perf_counter() - began, 3)}
        contenders[name].round()
    seconds = race(contenders, 2 * repeats, "45 MB", warm_up=0)
    for name, taken in seconds.items():
        result[name] |= {"many": CLIENTS, "seconds_few": taken[::2], "seconds_many": taken[1::2]}
        if hasattr(engines[name], "up"):
            result[name]["beside"] = engines[name].down + engines[name].up
    return {"engines": result, "copy": _seconds_of_a_copy(), "bytes": 4 * PARAMETERS}


def _seconds_of_a_copy() -> float:
    """Of a vector, into memory that has been used before."""
    here, there = torch.ones(PARAMETERS), torch.zeros(PARAMETERS)
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        there.copy_(here)
        seconds.append(time.perf_counter() - began)
    return round(median(seconds), 6)


def least(result: dict[str, Any], engine: str) -> float:
    """Milliseconds."""
    alone = per_client(result["engines"]["inprocess"])
    return alone if engine == "inprocess" else (alone + 1000 * result["copy"]) / PROCESSES


def table(result: dict[str, Any]) -> str:
    rows = []
    for name, measured in result["engines"].items():
        rows.append(
            [
                name,
                f"{measured['start']:.1f}",
                f"{per_round(measured):.0f}",
                f"{per_client(measured):.1f}",
                f"{least(result, name):.1f}",
                f"{measured['beside']:,}" if "beside" in measured else "–",
            ]
        )
    header = [
        "engine",
        "s to the end of the first round",
        "ms a round",
        "ms a client",
        "least",
        "bytes a client",
    ]
    return markdown(header, rows)


def targets(result: dict[str, Any]) -> list[Target]:
    wanted = "overhead per client for 45 MB and 10 clients on every engine, beside the least possible"
    measured = ", ".join(f"{n} {per_client(m):.0f} ms" for n, m in result["engines"].items())
    return [Target(wanted, measured, {"inprocess", "workers", "ray"} <= result["engines"].keys())]
