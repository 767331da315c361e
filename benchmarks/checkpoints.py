"""What a run directory costs: rows of metrics, checkpoints as often as usual, and the trained model at the end.

SCAFFOLD on W1 with two workers, so that the state of a hundred clients is part of every checkpoint. The time within
the directory's own functions is taken; a checkpoint is written to the disk before they return.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import fedflat as ff
from fedflat.storage.run_directory import RunDirectory

from .pace import Target, markdown, say, timed
from .workloads import WORKLOADS

ALLOWED = 0.02


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    work, rounds = WORKLOADS["W1"], 10 if quick else 300
    inside, made = [0.0], [0.0]

    def note(round: ff.RoundRecord) -> None:
        if (round.index + 1) % max(rounds // 5, 1) == 0:
            say(f"W1: {round.index + 1} of {rounds}")

    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "run"
        settings: dict[str, Any] = {"engine": "workers:2", "rounds": rounds, "out": out, **work.settings}
        began = time.perf_counter()
        with (
            timed(RunDirectory, ("round", "finish"), inside),
            timed(RunDirectory, ("checkpoint",), made),
        ):
            ff.train(work.federation(), work.model, "scaffold", on_round=note, **settings)
        seconds = time.perf_counter() - began
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return {"rounds": rounds, "seconds": seconds, "checkpoints": made[0], "rest": inside[0], "bytes": size}


def share(result: dict[str, Any]) -> float:
    return float((result["checkpoints"] + result["rest"]) / result["seconds"])


def table(result: dict[str, Any]) -> str:
    row = [
        str(result["rounds"]),
        f"{result['seconds']:.1f}",
        f"{result['checkpoints']:.2f}",
        f"{result['rest']:.2f}",
        f"{share(result):.2%}",
        f"{result['bytes'] / 2**20:.0f}",
    ]
    return markdown(
        ["rounds", "s", "s in checkpoints", "s in metrics and model", "share", "MiB on disk"], [row]
    )


def targets(result: dict[str, Any]) -> list[Target]:
    return [
        Target(
            f"run directory with checkpoints as often as usual: less than {ALLOWED:.0%} of the run",
            f"{share(result):.2%}",
            share(result) < ALLOWED,
        )
    ]
