"""What an engine costs per client beside training, by the number of parameters.

The local round is empty: one step of a model of which only ten parameters take part. Rounds with few and with many
clients take turns; their difference is what a client costs, the rest is what a round costs.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import fedflat as ff

from .machine import available_memory
from .pace import Target, markdown, say

FEW = 2
SIZES = {10**3: 102, 10**4: 102, 10**5: 102, 10**6: 52, 10**7: 12, 10**8: 6}
"""clients of the larger rounds, by number of parameters"""
VECTORS = 32
"""room that there must be before a size is tried, in vectors; workers took 26"""


class Empty(nn.Module):
    """A model that hardly computes anything."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.zeros(10))
        self.unused = nn.Parameter(torch.zeros(parameters - 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.used.expand(len(x), 10)


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for size, many in SIZES.items():
        if quick and size > 10**6:
            continue
        if 4 * VECTORS * size > available_memory():
            say(f"{size:,} parameters: left out, there is too little memory")
            continue
        repeats = 3 if quick or size >= 10**7 else 10
        for name, engine in (("inprocess", ff.InProcess()), ("workers", ff.Workers(2))):
            result.setdefault(f"{size}", {})[name] = rounds(size, many, engine, repeats)
        say(f"{size:,} parameters")
    return result


def rounds(size: int, many: int, engine: Any, repeats: int) -> dict[str, Any]:
    """Seconds of rounds with few clients and of rounds with many, in turn, after one of each."""
    data = (torch.zeros(many, 1), torch.zeros(many, dtype=torch.int64))
    federation = ff.Federation.from_indices(data, torch.arange(many).view(-1, 1), classes=10)
    schedule = [range(FEW), range(many)] * (repeats + 1)
    run = ff.train(
        federation,
        Empty(size),
        local=ff.LocalSGD(steps=1),
        participation=ff.Schedule(schedule),
        rounds=len(schedule),
        engine=engine,
    )
    seconds = [round(row["seconds"], 6) for row in run.history[2:]]
    return {"many": many, "seconds_few": seconds[::2], "seconds_many": seconds[1::2]}


def per_client(measured: dict[str, Any]) -> float:
    """Milliseconds."""
    few, many = median(measured["seconds_few"]), median(measured["seconds_many"])
    return 1000 * (many - few) / (measured["many"] - FEW)


def per_round(measured: dict[str, Any]) -> float:
    """Milliseconds of a round without clients."""
    return max(0.0, 1000 * median(measured["seconds_few"]) - FEW * per_client(measured))


def table(result: dict[str, Any]) -> str:
    rows = []
    for size, engines in result.items():
        row = [f"{int(size):,}"]
        for engine in ("inprocess", "workers"):
            row += [f"{value(engines[engine]):.3g}" for value in (per_client, per_round)]
        rows.append(row)
    header = ["parameters"]
    for engine in ("inprocess", "two workers"):
        header += [f"{engine}: ms a client", "ms a round"]
    return markdown(header, rows)


def targets(result: dict[str, Any]) -> list[Target]:
    sizes = [int(size) for size in result]
    wanted = "overhead per client of each engine, from 1e3 to 1e8 parameters, as a table"
    complete = all(b == 10 * a for a, b in pairwise(sizes)) and (sizes[0], sizes[-1]) == (10**3, 10**8)
    return [Target(wanted, f"{sizes[0]:.0e} to {sizes[-1]:.0e} below", complete)]
