"""Clients in worker processes, one thread each, on shared memory.

Only numbers cross the pipes; vectors lie in memory that every process maps. Clients are handed out longest first, as
far as there is room for uploads that wait; these are folded in client order, so the result has the same bits as in
one process, with any number of workers. A worker without a client tests the model of the round before, if that has
been asked for. A worker that dies is replaced and its client is run again, from the same inputs, with the same
result.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from ...core.evaluation import batches_in
from ...core.messages import Download, Parts, Upload, pack_download, pack_model, unpack_upload
from ...errors import FedflatError
from ..base import Job
from ..scheduling import ClientQueue, SharedTest
from .shared_memory import SharedMemory
from .spawning import UNFIT, check_importable
from .worker import work

DEATHS = 3
"""Give up after a client, or a share of the test set, has killed its worker this many times."""

ROOM = 256 * 2**20
"""Bytes of uploads that may wait to be folded, if that is less than eight for every worker, and more than two."""
PER_GPU = 2
"""Workers for every GPU, if nothing else is said: one prepares while the other computes."""

_MEMORY = "Is there too little memory? Use fewer workers."


class _Worker:
    """A process and the pipe to it."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process, self.pipe = process, pipe
        self.task: int | range | None = None
        """the position of a client in its round, or a share of the test set"""
        self.answered = False
        """whether it has ever done anything"""


class Workers:
    """Worker processes on one machine; by default as many as there are cores, or two for every GPU.

    Args:
        count: how many processes.
        devices: where they compute, given out in turn; several workers may share a device.
        start_method: how processes are started; by default `fork` where that is safe (Linux, no GPU), since it
            shares the data at no cost and knows classes defined in a notebook; else `spawn`.
    """

    def __init__(
        self,
        count: int | None = None,
        devices: Sequence[str] | None = None,
        start_method: str | None = None,
    ) -> None:
        if count is not None and count < 1:
            raise FedflatError(f"Workers(count={count}): give at least 1.")
        self._wanted = count
        self.count = count or _cores()
        self.devices = list(devices) if devices is not None else None
        self.start_method = start_method
        self._workers: list[_Worker] = []
        self._test: SharedTest | None = None
        """the latest"""

    # -- life --------------------------------------------------------------------------------------

    def open(self, job: Job) -> None:
        """Lay out the shared memory and start the processes."""
        if multiprocessing.current_process().daemon:
            raise FedflatError(
                "Workers cannot be started here: this process is a daemon of multiprocessing's, which may have no "
                "processes of its own. Use engine='inprocess', or start it with daemon=False."
            )
        self._job, self._test = job, None
        self._devices = self.devices or _all_devices(str(job.model.vector.device))
        on_cpu = all(device == "cpu" for device in self._devices)
        self.count = self._wanted or (_cores() if on_cpu else PER_GPU * len(self._devices))
        slot = _slot_sizes(job)
        held = ROOM // (sum(slot.values()) * job.model.vector.dtype.itemsize)
        self._slots = max(2 * self.count, min(8 * self.count, held))
        sizes = {f"all {place}": size for place, size in _common_sizes(job).items()}
        for number in range(self._slots):
            sizes |= {f"{number} {place}": size for place, size in slot.items()}
        self._memory = SharedMemory.make(sizes, job.model.vector.dtype)
        forks = sys.platform == "linux" and on_cpu
        start_method = self.start_method or ("fork" if forks else "spawn")
        self._context: Any = torch.multiprocessing.get_context(start_method)
        self._forks = start_method == "fork"
        if not self._forks:
            check_importable(job)
        self._workers = []
        for number in range(self.count):  # one by one: each closes the pipes of those before it
            self._workers.append(self._start(number))

    def close(self) -> None:
        """Stop the processes and give the memory back."""
        for worker in self._workers:
            worker.pipe.close()  # a worker ends when its pipe does
        for worker in self._workers:
            worker.process.join(timeout=2)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []
        if hasattr(self, "_memory"):
            self._memory.close()

    def _start(self, number: int) -> _Worker:
        try:
            ours, theirs = self._context.Pipe()
        except OSError as problem:
            raise _no_process(problem) from None
        device = self._devices[number % len(self._devices)]
        inherited = [ours, *(w.pipe for w in self._workers)] if self._forks else []
        process = self._context.Process(
            target=work,
            args=(theirs, inherited, self._job, self._memory.plan, device),
            daemon=True,
            name=f"fedflat-worker-{number}",
        )
        # by names: passing open files fails with many tensors
        before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        # an interruption while it forks would be swallowed: it is delivered afterwards, and never to the process
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as problem:
            raise FedflatError(
                f"The model, the loss or a mechanism cannot be sent to worker processes ({problem}). Define it at "
                "the top level of a module, or use engine='inprocess'."
            ) from None
        except BrokenPipeError:
            raise FedflatError(f"A worker process ended before it began. {UNFIT}") from None
        except (OSError, RuntimeError) as problem:  # the latter: torch, where shared memory is full
            raise _no_process(problem) from None
        finally:
            torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        theirs.close()
        return _Worker(process, ours)

    # -- rounds ------------------------------------------------------------------------------------

    def uploads(
        self,
        clients: Sequence[int],
        download: Callable[[int], Download],
        state: Callable[[int], dict[str, Tensor]],
    ) -> Iterator[Upload]:
        """Longest first, folded in the order of `clients`."""
        job, device = self._job, self._job.model.vector.device  # the server's; on the CPU nothing is copied
        queue = ClientQueue([job.local.steps_for(job.federation.size(client)) for client in clients])
        free = list(range(self._slots))  # what was freed last is used first: little memory is touched
        slots: dict[int, int] = {}
        downloads: dict[int, Download] = {}
        finished: dict[int, Parts] = {}
        common: Parts = {}

        def run(worker: _Worker, position: int) -> None:
            client = clients[position]
            if position not in slots:  # else it is run again
                slots[position], downloads[position] = free.pop(), download(client)
            parts = pack_download(client, downloads[position], state(client), job.each)
            shared = {"common": parts.pop("common")}
            if not common:
                common.update(self._memory.store(shared, "all"))
            own = self._memory.store(parts, slots[position])
            self._tell(worker, position, ("run", slots[position], {**common, **own}))

        while not queue.done:
            for worker in self._workers:
                if worker.task is not None:
                    continue
                if (position := queue.hand_out(self._slots)) is not None:
                    run(worker, position)
                else:
                    self._let_test(worker)
            if (position := queue.next) in finished:  # while the workers are busy again
                yield unpack_upload(self._memory.load(finished.pop(position), device), borrowed=True)
                free.append(slots.pop(position))
                queue.fold()
                continue
            for worker, task, answer in self._answers():
                if isinstance(task, range):
                    self._receive_score(task, answer)
                elif answer is not None:
                    finished[task] = answer
                    del downloads[task]
                elif queue.give_back(task) >= DEATHS:
                    raise FedflatError(
                        f"client {clients[task]}, round {downloads[task].round}: its worker process died {DEATHS} "
                        f"times (exit code {worker.process.exitcode}). {_MEMORY}"
                    )

    def evaluate(self, w: Tensor, buffers: Tensor | None) -> SharedTest:
        """The test set in shares, for workers that have no client."""
        test = self._job.federation.test
        assert test is not None
        assert self._test is None or self._test.done()
        self._tested = self._memory.store(pack_model(w, buffers), "all")
        self._test = SharedTest(self._job.metrics, batches_in(test), self.count, self._go_on_testing)
        return self._test

    # -- details -----------------------------------------------------------------------------------

    def _go_on_testing(self) -> None:
        """Hand out shares and receive some, while there is no client."""
        for worker in self._workers:
            if worker.task is None:
                self._let_test(worker)
        for _, share, answer in self._answers():
            assert isinstance(share, range)
            self._receive_score(share, answer)

    def _let_test(self, worker: _Worker) -> None:
        """Give a worker a share of the test under way, if there is one left."""
        if self._test is not None and (share := self._test.hand_out()) is not None:
            self._tell(worker, share, ("score", share, self._tested))

    def _receive_score(self, share: range, answer: Any) -> None:
        """Take what a share scored; if its worker died, another tests it."""
        assert self._test is not None
        if answer is not None:
            self._test.receive(share, answer)
        elif self._test.give_back(share) >= DEATHS:
            raise FedflatError(f"A worker died {DEATHS} times while testing the model. {_MEMORY}")

    def _tell(self, worker: _Worker, task: int | range, message: Any) -> None:
        """Give a worker something to do; if it has died, that shows when its answer is waited for."""
        worker.task = task
        with contextlib.suppress(OSError):
            worker.pipe.send(message)

    def _answers(self) -> Iterator[tuple[_Worker, int | range, Any]]:
        """Wait for workers, and give their tasks and answers; None for one that died and has been replaced."""
        busy = {worker.pipe: worker for worker in self._workers if worker.task is not None}
        for pipe in wait(list(busy)):
            assert isinstance(pipe, Connection)
            worker = busy[pipe]
            task, worker.task = worker.task, None
            assert task is not None
            try:
                answer = pipe.recv()
                worker.answered = True
            except (EOFError, ConnectionResetError):
                self._check_started(worker)
                self._replace(worker)
                answer = None
            if isinstance(answer, FedflatError):
                raise answer
            yield worker, task, answer

    def _check_started(self, worker: _Worker) -> None:
        """An error where a worker ended by itself before it did anything, as any other would."""
        worker.process.join(timeout=2)
        if not self._forks and not worker.answered and (worker.process.exitcode or 0) > 0:
            raise FedflatError(f"A worker process ended before it began. {UNFIT}")

    def _replace(self, worker: _Worker) -> None:
        number = self._workers.index(worker)
        worker.pipe.close()
        worker.process.join(timeout=2)
        self._workers[number] = self._start(number)


def _common_sizes(job: Job) -> dict[str, int]:
    """The sizes of vectors that there are once: what all clients of a round receive, and a model that is tested."""
    size, buffers = job.model.size, _buffers(job)
    vectors = dict.fromkeys(
        ("common start", *(f"common {name}" for name in job.method.down), "model w"), size
    )
    return {**vectors, "common buffers": buffers, "model buffers": buffers}


def _slot_sizes(job: Job) -> dict[str, int]:
    """The sizes of vectors that every client at work has for itself."""
    size, buffers = job.model.size, _buffers(job)
    names = ["vectors update", *(f"vectors {name}" for name in job.method.up)]
    names += [f"each {name}" for name in job.each]
    names += [f"state {name}" for contract in job.method.contracts for name in contract.client]
    names += ["trained update"] if job.measured else []
    return {**dict.fromkeys(names, size), "vectors buffers": buffers, "state buffers": buffers}


def _buffers(job: Job) -> int:
    """How many numbers the model's buffers hold."""
    return 0 if (values := job.model.read_buffers()) is None else values.numel()


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _no_process(problem: Exception) -> FedflatError:
    """What to say where the system has no further process, file or memory for one."""
    reason = getattr(problem, "strerror", None) or str(problem).splitlines()[0].rstrip(".")
    more = ", or allow more open files (`ulimit -n`)" if getattr(problem, "errno", 0) == errno.EMFILE else ""
    return FedflatError(f"A worker process cannot be started: {reason}. Use fewer workers{more}.")


def _all_devices(device: str) -> list[str]:
    """The CPU, or every GPU where one was asked for."""
    if device.startswith("cuda") and ":" not in device:
        return [f"cuda:{n}" for n in range(max(1, torch.cuda.device_count()))]
    return [device]
