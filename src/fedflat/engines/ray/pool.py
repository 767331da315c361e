"""A pool of Ray actors: asked for with the resources they need, used as soon as they are up, replaced when lost."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import FedflatError
from .actor import Answer, ClientActor


@dataclass(frozen=True)
class Resources:
    """What every actor asks the cluster for."""

    cpus: float
    gpus: float

    def fit_in(self, cluster: dict[str, float]) -> int:
        """How many actors a cluster has room for."""
        each = {"CPU": self.cpus, "GPU": self.gpus}
        return min(int(cluster.get(name, 0) / needed + 1e-6) for name, needed in each.items() if needed)

    def __str__(self) -> str:
        return f"{self.cpus:g} CPUs" + (f" and {self.gpus:g} GPUs" if self.gpus else "")


@dataclass(eq=False)
class Actor:
    """An actor in the cluster, and what it is busy with."""

    handle: Any
    reference: Any
    """of the answer that is waited for; None if it is idle"""
    place: str | None = None
    """its node's address, once it is up"""
    task: Any = None
    since: float = 0.0
    """when it was given the task"""


@dataclass(frozen=True)
class Event:
    """An actor has answered, or was lost and has been replaced."""

    task: Any
    answer: Answer | None
    lost: str = ""
    """why it was lost"""


class Pool:
    """Actors that all know the same job.

    Args:
        resources: of each actor.
        attempts: give up after actors have failed to start this many times in a row.
        patience: seconds to wait while there is no actor at all.
    """

    def __init__(self, resources: Resources, attempts: int, patience: float) -> None:
        import ray

        self._ray: Any = ray
        self._resources, self._attempts, self._patience = resources, attempts, patience
        self._actors: list[Actor] = []
        self._introduction: tuple[Any, ...] = ()
        self._failures = 0
        self._seen_up = time.monotonic()

    # -- size --------------------------------------------------------------------------------------

    @property
    def up(self) -> int:
        """How many actors can work."""
        return sum(actor.place is not None for actor in self._actors)

    def equip(self, *introduction: Any) -> None:
        """Tell every actor, those that come later too, what the work is about."""
        self._introduction = introduction
        self._seen_up = time.monotonic()
        for actor in self._actors:
            actor.place, actor.reference = None, actor.handle.equip.remote(*introduction)

    def grow(self, wanted: int | None) -> None:
        """Ask for actors up to a number, by default as many as the cluster has room for now.

        Those that there is no room for yet wait in the cluster, where an autoscaler sees them.
        """
        room = wanted or max(1, self._resources.fit_in(self._ray.cluster_resources()))
        while len(self._actors) < room:
            self._actors.append(self._request())

    def rest(self) -> None:
        """Let actors finish what is no longer waited for; those that do not within a second are let go."""
        busy = {actor.reference: actor for actor in self.busy()}
        if not busy:
            return
        ready, _ = self._ray.wait(list(busy), num_returns=len(busy), timeout=1)
        for reference, actor in busy.items():
            if reference in ready:
                actor.task = actor.reference = None
            else:
                self._drop(actor)

    def close(self) -> None:
        """Let go of all actors."""
        for actor in list(self._actors):
            self._drop(actor)

    # -- work --------------------------------------------------------------------------------------

    def idle(self) -> Actor | None:
        """An actor without work."""
        return next((a for a in self._actors if a.place is not None and a.reference is None), None)

    def busy(self) -> Iterator[Actor]:
        """Actors with work."""
        return (actor for actor in self._actors if actor.task is not None)

    def give(self, actor: Actor, task: Any, action: str, *arguments: Any) -> None:
        """Have an actor do something; `wait` tells of its answer under the task."""
        actor.task, actor.since = task, time.monotonic()
        actor.reference = getattr(actor.handle, action).remote(*arguments)

    def replace(self, actor: Actor) -> None:
        """End an actor, whatever it is doing, and ask for another."""
        self._drop(actor)
        self._actors.append(self._request())

    def wait(self, until: float = math.inf) -> list[Event]:
        """Wait for an actor to answer or to come up, at most until that moment; what is to be told of tasks."""
        self._check_patience()
        latest = until if self.up else min(until, self._seen_up + self._patience)
        awaited = {actor.reference: actor for actor in self._actors if actor.reference is not None}
        seconds = None if math.isinf(latest) else max(0.0, latest - time.monotonic())
        ready, _ = self._ray.wait(list(awaited), timeout=seconds)
        events = [self._hear(awaited[reference]) for reference in ready]
        return [event for event in events if event is not None]

    # -- details -----------------------------------------------------------------------------------

    def _hear(self, actor: Actor) -> Event | None:
        """An actor's answer; that it is up, or was lost before it was, is no event."""
        problems = self._ray.exceptions
        try:
            answer: Answer = self._ray.get(actor.reference)
        except problems.RayTaskError as problem:
            raise FedflatError(f"A Ray actor failed: {_in_short(problem)}") from None
        except problems.RayError as problem:
            task, reason = actor.task, _in_short(problem)
            if actor.place is None:
                self._count_failure(reason)
            self.replace(actor)
            return Event(task, None, reason) if task is not None else None
        task, actor.task, actor.reference = actor.task, None, None
        if "problem" in answer:
            raise FedflatError(answer["problem"])
        self._seen_up = time.monotonic()
        if actor.place is None:
            actor.place, self._failures = answer["place"], 0
            return None
        return Event(task, answer)

    def _request(self) -> Actor:
        needs = {"num_cpus": self._resources.cpus, "num_gpus": self._resources.gpus}
        handle = self._ray.remote(**needs, max_restarts=0)(ClientActor).remote()
        return Actor(handle, handle.equip.remote(*self._introduction))

    def _drop(self, actor: Actor) -> None:
        self._actors.remove(actor)
        with contextlib.suppress(Exception):  # it may have ended, or the cluster with it
            self._ray.kill(actor.handle)

    def _count_failure(self, reason: str) -> None:
        self._failures += 1
        if "No module named 'fedflat'" in reason:
            raise FedflatError("A Ray node has no fedflat: install the same version on all nodes.")
        if self._failures >= self._attempts:
            raise FedflatError(f"Ray actors failed to start {self._failures} times in a row: {reason}")

    def _check_patience(self) -> None:
        if self.up:
            self._seen_up = time.monotonic()
        elif time.monotonic() > self._seen_up + self._patience:
            free = Resources(*(self._ray.available_resources().get(name, 0) for name in ("CPU", "GPU")))
            raise FedflatError(
                f"No Ray actor came up within {self._patience:g} s: each asks for {self._resources}, and the cluster "
                f"has {free} to spare. Ask for less, add nodes, or wait longer with patience=."
            )


def _in_short(problem: Exception) -> str:
    """Ray's reason: the first sentence of what it says last, without its long numbers."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    reason = lines[-1].split(". ")[0] if lines else type(problem).__name__
    return re.sub(r"\b[0-9a-f]{16,} ?", "", reason).rstrip(".") + "."
