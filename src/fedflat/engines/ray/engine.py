"""Clients on a Ray cluster, one after the other on every actor of a pool.

What all clients of a round receive is put once into Ray's object store; what a client keeps between rounds lives
with the run, goes out with the client's work and comes back with its upload. Uploads are folded in client order while
later ones are still computed, so the result has the same bits as in one process. An actor without a client tests the
model of the round before, if that has been asked for. A lost actor or node is replaced and its clients are run again,
from the same inputs, with the same result.
"""

from __future__ import annotations

import math
import os
import pickle
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from ...core.evaluation import batches_in
from ...core.messages import Download, Missing, Upload, pack_download, pack_model, unpack_upload
from ...data.federation import Federation
from ...errors import FedflatError, MissingExtra, nearest
from ..base import Job
from ..scheduling import ClientQueue, SharedTest
from .actor import fingerprint, versions
from .arrays import pack, to_arrays, to_tensors
from .pool import Actor, Event, Pool, Resources

POLICIES = ("wait", "skip", "stop")


@dataclass(eq=False)
class _Task:
    """A client's round, until its upload is there."""

    position: int
    client: int
    download: Download
    late: bool = False


class Ray:
    """Actors on a Ray cluster, with one thread each; used as a context, it keeps them from one training to the next.

    Args:
        address: of a running cluster, such as `"auto"` on one of its machines; by default the one that this process
            is connected to already or that the environment's RAY_ADDRESS names, else one is started, for the run.
        actors: how many; more than the cluster has room for make an autoscaler add nodes. By default as many as there
            is room for, looked at again in every round.
        cpus_per_actor: of the cluster, for each.
        gpus_per_actor: of the cluster, for each; with 0.25, four actors share a GPU.
        deadline: seconds that a client may take on its actor.
        on_deadline: what becomes of one that takes longer: `"wait"` for it and warn, `"skip"` it in this round, or
            `"stop"` the run.
        attempts: give up after a client has lost its actor this many times.
        patience: seconds to wait while there is no actor at all, such as for an autoscaler.
        ahead: how many finished uploads may wait in memory for their turn; by default as many as there are actors.
        data: makes the federation on every node, from files there; by default the data is sent to every node once.
    """

    def __init__(
        self,
        address: str | None = None,
        actors: int | None = None,
        cpus_per_actor: float = 1.0,
        gpus_per_actor: float = 0.0,
        deadline: float | None = None,
        on_deadline: str = "wait",
        attempts: int = 3,
        patience: float = 300.0,
        ahead: int | None = None,
        data: Callable[[], Federation] | None = None,
    ) -> None:
        for name, value, least in (("actors", actors, 1), ("attempts", attempts, 1), ("ahead", ahead, 0)):
            if value is not None and value < least:
                raise FedflatError(f"Ray({name}={value}): give at least {least}.")
        for name, seconds in (("deadline", deadline), ("patience", patience)):
            if seconds is not None and not seconds > 0:
                raise FedflatError(f"Ray({name}={seconds}): give seconds above 0.")
        if not cpus_per_actor > 0 or gpus_per_actor < 0:
            raise FedflatError(
                f"Ray(cpus_per_actor={cpus_per_actor}, gpus_per_actor={gpus_per_actor}): give more than 0 CPUs, and "
                "0 or more GPUs."
            )
        if on_deadline not in POLICIES:
            raise FedflatError(
                f"Ray(on_deadline='{on_deadline}') is not possible.{nearest(on_deadline, POLICIES)}"
            )
        _refuse_ray_client(address or "")
        if find_spec("ray") is None:
            raise MissingExtra("ray", "ray", "The engine ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry, unless someone wants it
        self.address, self.actors, self.deadline, self.on_deadline = address, actors, deadline, on_deadline
        self.attempts, self.patience, self.ahead, self.data = attempts, patience, ahead, data
        self._resources = Resources(cpus_per_actor, gpus_per_actor)
        self._pool: Pool | None = None
        self._test: SharedTest | None = None
        """the latest"""
        self._started = self._kept = False

    # -- life --------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._kept = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kept = False
        self.close()

    def open(self, job: Job) -> None:
        """Connect, put the job into the object store and ask for actors."""
        if job.model.vector.device.type == "cuda" and not self._resources.gpus:
            raise FedflatError(
                "device='cuda' with the engine ray: say what part of a GPU, Ray(gpus_per_actor=0.5)."
            )
        self._job, self._test = job, None
        package = _package(job, self.data)
        self._connect()
        if self._pool is None:
            self._pool = Pool(self._resources, self.attempts, self.patience)
        self._package = self._ray.put(package)
        self._pool.equip(versions(), [self._package], "cuda" if self._resources.gpus else "cpu")
        self._pool.grow(self.actors)

    def close(self) -> None:
        """Let go of the actors, and of the cluster if it was started or connected to here."""
        self._package = None
        if self._pool is not None and self._kept:
            self._pool.rest()
            return
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._started:
            self._started = False
            self._ray.shutdown()

    def _connect(self) -> None:
        import ray

        self._ray: Any = ray
        if ray.is_initialized():
            here = ray.get_runtime_context().gcs_address
            if self.address not in (None, "auto", "local", here):
                raise FedflatError(
                    f"Ray(address='{self.address}'): this process is connected to {here} already. Call "
                    "ray.shutdown() first, or leave the address out."
                )
            return
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        _refuse_ray_client(address)
        settings: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "error"}
        if address == "local":
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            room = math.ceil((self.actors or 1) * self._resources.cpus)
            settings |= {"num_cpus": max(cores, room), "include_dashboard": False}
        try:
            _knock(address)
            ray.init(**settings)
        except (OSError, OverflowError, ValueError, RuntimeError) as problem:
            if address == "local":
                raise FedflatError(f"Ray does not start here: {problem}") from None
            raise FedflatError(
                f"No Ray cluster answers at '{address}'. Start one with `ray start --head`, or leave the address out "
                "to have one started on this machine."
            ) from None
        self._started = True

    # -- rounds ------------------------------------------------------------------------------------

    def uploads(
        self,
        clients: Sequence[int],
        download: Callable[[int], Download],
        state: Callable[[int], dict[str, Tensor]],
    ) -> Iterator[Upload | Missing]:
        """Longest first, folded in the order of `clients`."""
        pool, job, device = self._open_pool(), self._job, self._job.model.vector.device
        pool.grow(self.actors)
        queue = ClientQueue([job.local.steps_for(job.federation.size(client)) for client in clients])
        tasks: dict[int, _Task] = {}
        finished: dict[int, Upload | Missing] = {}
        common = None

        while not queue.done:
            while (actor := pool.idle()) is not None:
                position = queue.hand_out(pool.up + (pool.up if self.ahead is None else self.ahead))
                if position is None:
                    if self._let_test(actor):
                        continue
                    break
                client = clients[position]
                if position not in tasks:  # else it is run again
                    tasks[position] = _Task(position, client, download(client))
                parts = to_arrays(pack_download(client, tasks[position].download, state(client), job.each))
                shared = {"common": parts.pop("common")}
                common = self._ray.put(shared) if common is None else common
                pool.give(actor, tasks[position], "run", common, parts)
            for event in pool.wait(self._next_deadline(pool)):
                if isinstance(event.task, range):
                    self._receive_score(event)
                elif event.answer is not None:
                    # its vectors lie in the object store as long as someone holds them
                    parts = to_tensors(event.answer["upload"], device)
                    finished[event.task.position] = unpack_upload(parts, borrowed=True)
                else:
                    self._lost(event, queue)
            for late in self._late(pool):
                finished[late.position] = Missing(
                    late.client, f"it gave no upload within {self.deadline:g} s and was left out."
                )
            while queue.next in finished:
                del tasks[queue.next]
                yield finished.pop(queue.next)
                queue.fold()

    def evaluate(self, w: Tensor, buffers: Tensor | None) -> SharedTest:
        """The test set in shares, for actors that have no client."""
        test = self._job.federation.test
        assert test is not None
        self._tested = self._ray.put(to_arrays(pack_model(w, buffers)))
        workers = max(1, self._open_pool().up)
        self._test = SharedTest(self._job.metrics, batches_in(test), workers, self._go_on_testing)
        return self._test

    # -- details -----------------------------------------------------------------------------------

    def _open_pool(self) -> Pool:
        assert self._pool is not None, "open() comes first"
        return self._pool

    def _go_on_testing(self) -> None:
        """Hand out shares and receive some, while there is no client."""
        pool = self._open_pool()
        while (actor := pool.idle()) is not None and self._let_test(actor):
            pass
        for event in pool.wait():
            self._receive_score(event)

    def _let_test(self, actor: Actor) -> bool:
        """Give an actor a share of the test under way, if there is one left."""
        share = None if self._test is None else self._test.hand_out()
        if share is not None:
            self._open_pool().give(actor, share, "score", self._tested, share)
        return share is not None

    def _receive_score(self, event: Event) -> None:
        """Take what a share scored; if its actor was lost, another tests it."""
        assert self._test is not None
        if event.answer is not None:
            self._test.receive(event.task, event.answer["score"])
        elif (losses := self._test.give_back(event.task)) >= self.attempts:
            raise FedflatError(f"{losses} Ray actors were lost while testing the model. {event.lost}")

    def _lost(self, event: Event, queue: ClientQueue) -> None:
        """Have the client of an actor that was lost run again."""
        task: _Task = event.task
        task.late = False
        if (losses := queue.give_back(task.position)) >= self.attempts:
            raise FedflatError(
                f"client {task.client}, round {task.download.round}: its Ray actor was lost {losses} times. "
                f"{event.lost} Is there too little memory? Use fewer actors."
            )

    def _next_deadline(self, pool: Pool) -> float:
        """When the next client will be late."""
        if self.deadline is None:
            return math.inf
        times = [a.since + self.deadline for a in _with_clients(pool) if not a.task.late]
        return min(times, default=math.inf)

    def _late(self, pool: Pool) -> list[_Task]:
        """Clients that are past the deadline and are to be left out; their actors are ended."""
        now, left_out = time.monotonic(), []
        for actor in _with_clients(pool):
            if self.deadline is None or now < actor.since + self.deadline or actor.task.late:
                continue
            self._note_late(actor)
            if self.on_deadline == "skip":
                left_out.append(actor.task)
                pool.replace(actor)
        return left_out

    def _note_late(self, actor: Actor) -> None:
        task: _Task = actor.task
        task.late = True
        sentence = (
            f"client {task.client}, round {task.download.round}: no upload within {self.deadline:g} s on the Ray "
            f"node {actor.place}"
        )
        if self.on_deadline == "stop":
            raise FedflatError(
                f"{sentence}. Give it more time with deadline=, or leave slow clients out with on_deadline='skip'."
            )
        if self.on_deadline == "wait":
            warnings.warn(f"{sentence}; it is waited for.", stacklevel=2)


def _with_clients(pool: Pool) -> list[Actor]:
    """Actors that run a client."""
    return [actor for actor in pool.busy() if isinstance(actor.task, _Task)]


def _refuse_ray_client(address: str) -> None:
    if address.startswith("ray://"):
        raise FedflatError(
            f"The Ray address '{address}': Ray Client is not supported. Run fedflat on a machine of the cluster "
            "with the address 'auto', or submit it as a Ray job."
        )


def _knock(address: str) -> None:
    """An error at once where nothing listens; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _package(job: Job, load: Callable[[], Federation] | None) -> tuple[bytes, Any]:
    """What stays the same in every round, pickled; beside it the data, unless the nodes load it themselves."""
    from ray import cloudpickle

    work = {field.name: getattr(job, field.name) for field in fields(job) if field.name != "federation"}
    work["model"] = job.model.copy("cpu")
    expected = None if load is None else fingerprint(job.federation)
    try:
        federation = job.federation.to(job.model.vector.dtype, "cpu")
        return cloudpickle.dumps((work, load, expected)), None if load is not None else pack(federation)
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        raise FedflatError(
            f"The model, the loss, a mechanism or the data cannot be sent to Ray actors ({problem}). Take out of it "
            "what belongs to this process, such as open files and locks, or use engine='inprocess'."
        ) from None
