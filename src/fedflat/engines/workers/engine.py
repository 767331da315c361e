"""Clients in worker processes, one thread each, on shared memory.

Only numbers cross the pipes; vectors lie in an arena that every process maps. Clients are handed out longest first,
as far as there is room for uploads that wait; these are folded in client order, so the result has the same bits as in
one process, with any number of workers. A worker without a client tests the model of the round before, if that has
been asked for. A worker that dies is replaced and its client is run again, from the same
inputs, with the same result.
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
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from ...core.evaluation import Score, batches_in
from ...core.messages import Download, Upload
from ...errors import FedflatError
from ..base import Job
from ..scheduling import Turns
from ..test_shares import Shares
from .shared_memory import Arena
from .spawning import UNFIT, check_importable
from .worker import Task, work

DEATHS = 3
"""So often a client may take its worker down before the run is given up."""

ROOM = 256 * 2**20
"""Bytes of uploads that may wait to be folded, if that is less than eight for every worker, and more than two."""
PER_GPU = 2
"""Workers for every GPU, if nothing else is said: one prepares while the other computes."""

_MEMORY = "Is there too little memory? Use fewer workers."


@dataclass
class _Running:
    """A client that a worker is busy with."""

    position: int
    task: Task
    download: Download
    deaths: int = 0


@dataclass
class _Testing:
    """A share of the test set that a worker is busy with."""

    share: range
    deaths: int = 0


class _Worker:
    """A process and the pipe to it."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process, self.pipe = process, pipe
        self.running: _Running | _Testing | None = None
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
        self._shares: Shares | None = None
        """of a test under way"""

    # -- life --------------------------------------------------------------------------------------

    def open(self, job: Job) -> None:
        """Lay out the arena and start the processes."""
        if multiprocessing.current_process().daemon:
            raise FedflatError(
                "Workers cannot be started here: this process is a daemon of multiprocessing's, which may have no "
                "processes of its own. Use engine='inprocess', or start it with daemon=False."
            )
        self._job, size = job, job.model.size
        self._shares = None
        buffers = 0 if (statistics := job.model.read_buffers()) is None else statistics.numel()
        contracts = job.method.contracts
        self._each = tuple(name for c in contracts for name in c.each)
        self._state = tuple(name for c in contracts for name in c.client)
        sizes = {"start": size, "buffers": buffers, **{f"down {name}": size for name in job.method.down}}
        sizes |= {"tested": size, "tested buffers": buffers}
        self._devices = self.devices or _all_devices(str(job.model.vector.device))
        on_cpu = all(device == "cpu" for device in self._devices)
        self.count = self._wanted or (_cores() if on_cpu else PER_GPU * len(self._devices))
        vectors = ["update", *(f"up {n}" for n in job.method.up), *(f"each {n}" for n in self._each)]
        vectors += [f"state {name}" for name in self._state]
        vectors += ["trained"] if job.measured else []
        slot = {**dict.fromkeys(vectors, size), "buffers": buffers, "state buffers": buffers}
        held = ROOM // (sum(slot.values()) * job.model.vector.dtype.itemsize)
        self._slots = max(2 * self.count, min(8 * self.count, held))
        for number in range(self._slots):
            sizes |= {f"{number} {name}": length for name, length in slot.items()}
        self._arena = Arena.make(sizes, job.model.vector.dtype)
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
        if hasattr(self, "_arena"):
            self._arena.close()

    def _start(self, number: int) -> _Worker:
        try:
            ours, theirs = self._context.Pipe()
        except OSError as problem:
            raise _no_process(problem) from None
        device = self._devices[number % len(self._devices)]
        inherited = [ours, *(w.pipe for w in self._workers)] if self._forks else []
        process = self._context.Process(
            target=work,
            args=(theirs, inherited, self._job, self._arena.plan, device),
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
        turns = Turns([self._job.sgd.steps_for(self._job.federation.size(client)) for client in clients])
        finished: dict[int, Upload] = {}
        slots = list(range(self._slots))  # what was freed last is used first: little memory is touched
        used: dict[int, int] = {}
        written = False
        while turns.turn < len(clients):
            for worker in self._workers:
                if worker.running is not None:
                    continue
                if (position := turns.hand_out(self._slots)) is None:
                    self._let_test(worker)
                    continue
                client = clients[position]
                message = download(client)
                if not written:
                    self._write_common(message)
                    written = True
                used[position] = slots.pop()
                worker.running = _Running(position, self._task(client, used[position], message), message)
                self._hand_over(worker, state)
            if turns.turn in finished:  # while the workers are busy again
                yield finished.pop(turns.turn)
                slots.append(used.pop(turns.turn))
                turns.fold()
                continue
            for worker in self._answers():
                running = worker.running
                if isinstance(running, _Testing):
                    self._receive_scores(worker, running)
                    continue
                assert running is not None
                answer = self._receive(worker, running, state)
                if answer is None:
                    continue
                finished[running.position] = self._upload(running.task, answer)
                worker.running = None

    def evaluate(self, w: Tensor, buffers: Tensor | None) -> Score:
        """The test set in batches, shared out among the workers, summed in the order of batches."""
        return self.evaluate_meanwhile(w, buffers)()

    def evaluate_meanwhile(self, w: Tensor, buffers: Tensor | None) -> Callable[[], Score]:
        """Begin to test a model: workers do it when they have no client. What is returned waits for the rest.

        It must be called before the next test.
        """
        test = self._job.federation.test
        assert test is not None
        assert self._shares is None
        self._arena["tested"].copy_(w)
        if buffers is not None:
            self._arena["tested buffers"].copy_(buffers)
        shares = self._shares = Shares(batches_in(test), self.count, buffers is not None)

        def rest() -> Score:
            while not shares.done:
                for worker in self._workers:
                    if worker.running is None:
                        self._let_test(worker)
                for worker in self._answers():
                    assert isinstance(worker.running, _Testing)
                    self._receive_scores(worker, worker.running)
            self._shares = None
            return shares.total()

        return rest

    # -- details -----------------------------------------------------------------------------------

    def _write_common(self, message: Download) -> None:
        """What all clients of a round receive, written once."""
        self._arena["start"].copy_(message.start)
        if message.buffers is not None:
            self._arena["buffers"].copy_(message.buffers)
        for name in self._job.method.down:
            value = message.values.get(name)
            if isinstance(value, Tensor):
                self._arena[f"down {name}"].copy_(value)

    def _task(self, client: int, slot: int, message: Download) -> Task:
        vectors = [name for name, value in message.values.items() if isinstance(value, Tensor)]
        return Task(
            client,
            slot,
            message.round,
            message.lr,
            common=tuple(name for name in vectors if name not in self._each),
            each=tuple(name for name in vectors if name in self._each),
            state=(),
            scalars={k: float(v) for k, v in message.values.items() if not isinstance(v, Tensor)},
            buffers=message.buffers is not None,
        )

    def _let_test(self, worker: _Worker) -> None:
        """Give a worker a share of the test under way, if there is one left."""
        if self._shares is not None and (share := self._shares.hand_out()) is not None:
            worker.running = _Testing(share)
            _tell(worker, ("evaluate", share, self._shares.buffers))

    def _receive_scores(self, worker: _Worker, testing: _Testing) -> None:
        """A worker's scores; if it died, another tests its share again."""
        shares = self._shares
        assert shares is not None
        try:
            shares.receive(testing.share, _checked(worker.pipe.recv()))
            worker.running, worker.answered = None, True
        except (EOFError, ConnectionResetError):
            self._check_started(worker)
            testing.deaths += 1
            if testing.deaths >= DEATHS:
                raise FedflatError(
                    f"A worker died {DEATHS} times while testing the model. {_MEMORY}"
                ) from None
            fresh = self._replace(worker)
            fresh.running = testing
            _tell(fresh, ("evaluate", testing.share, shares.buffers))

    def _hand_over(self, worker: _Worker, state: Callable[[int], dict[str, Tensor]]) -> None:
        """Write a client's own inputs into its slot and tell the worker to go."""
        running = worker.running
        assert isinstance(running, _Running)
        task = running.task
        kept = state(task.client)
        for name in task.each:
            value = running.download.values[name]
            assert isinstance(value, Tensor)
            self._arena[f"{task.slot} each {name}"].copy_(value)
        for name, vector in kept.items():
            self._arena[f"{task.slot} state {name}"].copy_(vector)
        running.task = replace(task, state=tuple(kept))
        _tell(worker, ("client", running.task))

    def _answers(self) -> list[_Worker]:
        busy = {w.pipe: w for w in self._workers if w.running is not None}
        return [busy[pipe] for pipe in wait(list(busy)) if isinstance(pipe, Connection)]

    def _receive(
        self, worker: _Worker, running: _Running, state: Callable[[int], dict[str, Tensor]]
    ) -> dict[str, Any] | None:
        """A worker's answer; None if it died, and then another runs the client again."""
        try:
            answer = _checked(worker.pipe.recv())
            assert isinstance(answer, dict)
            worker.answered = True
            return answer
        except (EOFError, ConnectionResetError):
            self._check_started(worker)
            running.deaths += 1
            if running.deaths >= DEATHS:
                raise FedflatError(
                    f"client {running.task.client}, round {running.task.round}: its worker process died "
                    f"{DEATHS} times (exit code {worker.process.exitcode}). {_MEMORY}"
                ) from None
            fresh = self._replace(worker)
            fresh.running = running
            self._hand_over(fresh, state)
            return None

    def _check_started(self, worker: _Worker) -> None:
        """An error where a worker ended by itself before it did anything, as any other would."""
        worker.process.join(timeout=2)
        if not self._forks and not worker.answered and (worker.process.exitcode or 0) > 0:
            raise FedflatError(f"A worker process ended before it began. {UNFIT}")

    def _replace(self, worker: _Worker) -> _Worker:
        number = self._workers.index(worker)
        worker.pipe.close()
        worker.process.join(timeout=2)
        self._workers[number] = self._start(number)
        return self._workers[number]

    def _upload(self, task: Task, answer: dict[str, Any]) -> Upload:
        """An upload whose vectors lie in the arena until the next one is asked for."""
        device = self._job.model.vector.device  # the server's; on the CPU nothing is copied

        def here(name: str) -> Tensor:
            return self._arena[f"{task.slot} {name}"].to(device)

        return Upload(
            **answer["numbers"],
            update=here("update"),
            vectors={name: here(f"up {name}") for name in answer["vectors"]},
            buffers=here("buffers") if answer["buffers"] else None,
            trained=here("trained") if answer["trained"] else None,
            state={name: here(f"state {name}") for name in answer["state"]},
            borrowed=True,
        )


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _no_process(problem: Exception) -> FedflatError:
    """What to say where the system has no further process, file or memory for one."""
    reason = getattr(problem, "strerror", None) or str(problem).splitlines()[0].rstrip(".")
    more = ", or allow more open files (`ulimit -n`)" if getattr(problem, "errno", 0) == errno.EMFILE else ""
    return FedflatError(f"A worker process cannot be started: {reason}. Use fewer workers{more}.")


def _tell(worker: _Worker, message: Any) -> None:
    """Send a worker something; if it has died, that shows when its answer is waited for."""
    with contextlib.suppress(OSError):
        worker.pipe.send(message)


def _all_devices(device: str) -> list[str]:
    """The CPU, or every GPU where one was asked for."""
    if device.startswith("cuda") and ":" not in device:
        return [f"cuda:{n}" for n in range(max(1, torch.cuda.device_count()))]
    return [device]


def _checked(answer: Any) -> Any:
    """A worker's answer; its complaint is raised here."""
    if isinstance(answer, FedflatError):
        raise answer
    return answer
