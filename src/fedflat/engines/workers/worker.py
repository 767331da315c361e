"""What runs in a worker process: one model, on data that all of them share."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from ...client.round import ClientRound
from ...core.allocator import keep_memory
from ...core.evaluation import BatchScore, score_batches
from ...core.messages import Download
from ...data.federation import Federation
from ...errors import FedflatError
from ..base import Job
from .parent import end_with_parent
from .shared_memory import Arena, Plan


@dataclass(frozen=True)
class Task:
    """What a worker is told of a client's round: numbers and names; the vectors are in the arena."""

    client: int
    slot: int
    round: int
    lr: float
    common: tuple[str, ...]
    each: tuple[str, ...]
    state: tuple[str, ...]
    scalars: dict[str, float]
    buffers: bool


def work(pipe: Connection, others: list[Connection], job: Job, plan: Plan, device: str) -> None:
    """A worker's life: wait for tasks, answer them, end when the pipe does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what an interruption means
    end_with_parent()
    for other in others:
        other.close()  # inherited by fork; open copies would hide the main process's end from their owners
    torch.set_num_threads(1)
    keep_memory()
    unfit: Exception | None = None
    try:
        arena = Arena(plan)
        federation, training = _equip(job, device)
    except Exception as problem:  # told when the first task comes
        unfit = problem
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if unfit is not None:
                raise unfit
            if message[0] == "client":
                answer: Any = _run_client(message[1], arena, federation, training, device)
            else:
                answer = _evaluate(message[1], message[2], arena, federation, training, job)
        except FedflatError as problem:
            answer = problem
        except Exception as problem:
            answer = FedflatError(f"A worker failed: {type(problem).__name__}: {problem}")
        try:
            pipe.send(answer)
        except OSError:
            return


def _equip(job: Job, device: str) -> tuple[Federation, ClientRound]:
    """The worker's own model, and the data on its device."""
    dtype = job.model.vector.dtype
    model = job.model.copy(device)
    federation = job.federation.to(dtype, device)
    return federation, ClientRound(model, job.method, job.sgd, job.loss, job.seed, job.buffers, job.measured)


def _run_client(
    task: Task, arena: Arena, federation: Federation, training: ClientRound, device: str
) -> dict[str, Any]:
    def there(name: str) -> Tensor:
        return arena[name].to(device)

    values: dict[str, Tensor | float] = {name: there(f"down {name}") for name in task.common}
    values |= {name: there(f"{task.slot} each {name}") for name in task.each}
    buffers = there("buffers") if task.buffers else None
    download = Download(task.round, task.lr, there("start"), {**values, **task.scalars}, buffers)
    state = {name: there(f"{task.slot} state {name}") for name in task.state}
    upload = training.run(task.client, federation.client(task.client), download, state)
    arena[f"{task.slot} update"].copy_(upload.update)
    for name, vector in upload.vectors.items():
        arena[f"{task.slot} up {name}"].copy_(vector)
    kept = {name: (f"{task.slot} state {name}", vector) for name, vector in upload.state.items()}
    # a vector that was received under another name lies where the next may be written: it is copied first
    moved = {name: vector.clone() for name, (place, vector) in kept.items() if arena.holds(vector, but=place)}
    for name, (place, vector) in kept.items():
        arena[place].copy_(moved.get(name, vector))
    if upload.buffers is not None:
        arena[f"{task.slot} buffers"].copy_(upload.buffers)
    if upload.trained is not None:
        arena[f"{task.slot} trained"].copy_(upload.trained)
    return {
        "numbers": upload.numbers(),
        "vectors": list(upload.vectors),
        "state": list(upload.state),
        "buffers": upload.buffers is not None,
        "trained": upload.trained is not None,
    }


def _evaluate(
    share: range, has_buffers: bool, arena: Arena, federation: Federation, training: ClientRound, job: Job
) -> list[BatchScore]:
    model, test = training.model, federation.test
    assert test is not None
    if has_buffers:
        model.write_buffers(arena["tested buffers"])
    return score_batches(model, arena["tested"], test, job.loss, share)
