"""What it gains to test a round's model while the next round trains.

Two workers, W1's model, 10,000 test samples after every round. A worker that has no client tests: with an odd number
of equal clients one of two is free while the other trains the last; with ten it is free only at the end of a round.
Tested between rounds, clients wait for as long as the test takes. Both ways take turns.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import torch

import fedflat as ff

from .pace import Processes, Target, Training, markdown, race, ratio
from .workloads import WORKLOADS

CLIENTS = (1, 3, 10)
TEST = 10_000


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {str(clients): compare(clients, 2 if quick else 16) for clients in CLIENTS}


def compare(clients: int, rounds: int) -> dict[str, list[float]]:
    work = replace(WORKLOADS["W1"], clients=clients, per_round=clients)
    rng = torch.Generator().manual_seed(1)
    federation = work.federation()
    test = torch.randn(TEST, *work.shape, generator=rng), torch.randint(10, (TEST,), generator=rng)
    federation = ff.Federation(
        [federation.client(n).stored() for n in range(len(federation))], test, federation.classes
    )
    contenders: dict[str, Training | Processes] = {
        name: Training(federation, work.model, engine=ff.Workers(2), overlap=overlap, **work.settings)
        for name, overlap in (("apart", False), ("together", True))
    }
    return race(contenders, rounds, f"{clients} clients a round", warm_up=2)


def table(result: dict[str, Any]) -> str:
    rows = [
        [
            clients,
            f"{median(seconds['apart']):.3f}",
            f"{median(seconds['together']):.3f}",
            str(ratio(seconds["together"], seconds["apart"])),
        ]
        for clients, seconds in result.items()
    ]
    return markdown(["clients a round", "s a round, tested between", "tested meanwhile", "times"], rows)


def targets(result: dict[str, Any]) -> list[Target]:
    return []
