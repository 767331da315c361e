"""What recording flatness distance and drift in every round adds to it, on W2 with two workers.

Too little to see in the seconds of whole rounds, so that the time within the recording itself is taken: it keeps two
sums over the uploads and takes three norms per round, without a pass over data.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import torch

import fedflat as ff
from fedflat.flatness.recording import Recording

from .pace import Target, markdown, say, timed
from .workloads import WORKLOADS

ALLOWED = 0.02


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    work = WORKLOADS["W2"]
    if quick:
        work = replace(work, clients=2, per_round=2, samples=50)
    inside = [0.0]
    rounds: list[dict[str, float]] = []

    def note(round: ff.RoundRecord) -> None:
        rounds.append({"round": round.seconds, "recording": inside[0]})
        inside[0] = 0.0
        say(f"W2: {len(rounds)} of {count}")

    count = 2 if quick else 3
    settings: dict[str, Any] = {"engine": "workers:2", "rounds": count, **work.settings}
    with timed(Recording, ("open", "receive", "finish"), inside):
        ff.train(work.federation(), work.model, measure=["distance", "drift"], on_round=note, **settings)
    return {"clients": work.per_round, "rounds": rounds}


def share(result: dict[str, Any]) -> float:
    """Of a round, the median."""
    return median(row["recording"] / row["round"] for row in result["rounds"])


def table(result: dict[str, Any]) -> str:
    rows = [
        [
            str(result["clients"]),
            f"{median(row['round'] for row in result['rounds']):.2f}",
            f"{median(row['recording'] for row in result['rounds']) * 1e3:.1f}",
            f"{share(result):.3%}",
        ]
    ]
    return markdown(["clients a round", "s a round", "ms for recording", "share"], rows)


def targets(result: dict[str, Any]) -> list[Target]:
    return [
        Target(
            f"recording distance and drift: less than {ALLOWED:.0%} of a round",
            f"{share(result):.3%}",
            share(result) < ALLOWED,
        )
    ]
