"""What runs in a worker process: one model, on data that all of them share."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection
from typing import Any

import torch

from ...core.allocator import keep_memory
from ...errors import FedflatError
from ..base import Job
from ..host import Host
from .parent import end_with_parent
from .shared_memory import Plan, SharedMemory


def work(pipe: Connection, others: list[Connection], job: Job, plan: Plan, device: str) -> None:
    """A worker's life: wait for tasks, answer them, end when the pipe does.

    A task is `("run", slot, parts)` or `("score", share, parts)`; the vectors of its parts are in shared memory.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what an interruption means
    end_with_parent()
    for other in others:
        other.close()  # inherited by fork; open copies would hide the main process's end from their owners
    torch.set_num_threads(1)
    keep_memory()
    unfit: Exception | None = None
    try:
        memory, host = SharedMemory(plan), Host(job, device)
    except Exception as problem:  # told when the first task comes
        unfit = problem
    while True:
        try:
            kind, detail, packed = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if unfit is not None:
                raise unfit
            parts = memory.load(packed, device)
            answer: Any = (
                memory.store(host.run(parts), detail) if kind == "run" else host.score(parts, detail)
            )
        except FedflatError as problem:
            answer = problem
        except Exception as problem:
            answer = FedflatError(f"A worker failed: {type(problem).__name__}: {problem}")
        try:
            pipe.send(answer)
        except OSError:
            return
