"""What runs in a Ray actor: one model, and the federation's data in its node's shared memory."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from ...core.allocator import keep_memory
from ...core.messages import Parts
from ...data.federation import Federation
from ...errors import FedflatError, reason_of
from ..base import Job
from ..host import Host
from .arrays import to_arrays, to_tensors, unpack

Answer = dict[str, Any]
"""What an actor returns; where it has a `problem`, that is a sentence and there is nothing else."""


def versions() -> dict[str, str]:
    """What must be the same everywhere, or results could differ."""
    from ... import __version__

    return {"fedflat": __version__, "torch": torch.__version__}


class ClientActor:
    """Runs clients one after the other; it keeps nothing of them, so any actor can run any client."""

    def equip(self, theirs: dict[str, str], package: list[Any], device: str) -> Answer:
        """Take over what stays the same in every round: `package` refers to it, and is opened if versions agree."""
        import ray

        place = ray.util.get_node_ip_address()
        for name, version in versions().items():
            if version != theirs[name]:
                return _problem(
                    f"The Ray node {place} has {name} {version}, this process has {theirs[name]}: "
                    "install the same version on all nodes."
                )
        torch.set_num_threads(1)
        keep_memory()
        if device == "cuda" and not torch.cuda.is_available():
            return _problem(
                f"The Ray node {place} offers a GPU, but its torch sees none. Install a torch with CUDA there, or "
                "leave out gpus_per_actor."
            )
        try:
            work, data = ray.get(package[0])
            job, load, expected = pickle.loads(work)
            federation: Federation = load() if load is not None else unpack(*data)
        except FedflatError as problem:
            return _problem(f"The Ray node {place} cannot load the data: {problem}")
        except Exception as problem:
            return _problem(
                f"The Ray node {place} cannot load the model, the method or the data ({type(problem).__name__}: "
                f"{reason_of(problem)}). What they "
                "are made of must be installed there, or be defined in the script or notebook itself."
            )
        if load is not None and fingerprint(federation) != expected:
            return _problem(
                f"The Ray node {place} has other data than this process ({fingerprint(federation)}, not "
                f"{expected}). Put the same files there, or have the data sent."
            )
        self._host, self._device = Host(Job(federation=federation, **job), device), device
        return {"place": place}

    def run(self, common: Parts, own: Parts) -> Answer:
        """Run a client's round, from what all clients receive and what is this one's own."""
        try:
            return {"upload": to_arrays(self._host.run(to_tensors({**common, **own}, self._device)))}
        except FedflatError as problem:
            return _problem(str(problem))

    def score(self, model: Parts, share: range) -> Answer:
        """Score a model on some batches of the test set."""
        try:
            return {"score": self._host.score(to_tensors(model, self._device), share)}
        except FedflatError as problem:
            return _problem(str(problem))


def fingerprint(federation: Federation) -> str:
    """What tells other data, or data partitioned in another way, from a federation."""
    from zlib import crc32

    labels = federation.labels_by_client()
    split = "" if labels is None else f", split {crc32(labels[1].tobytes(), crc32(labels[0].tobytes())):08x}"
    return f"{federation.name}, {len(federation)} clients, {federation.samples} samples{split}"


def _problem(sentence: str) -> Answer:
    return {"problem": sentence}
