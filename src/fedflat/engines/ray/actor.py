"""What runs in a Ray actor: one model, and the federation's data in its node's shared memory."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

from ...client.round import ClientRound
from ...core.allocator import keep_memory
from ...core.evaluation import score_batches
from ...core.messages import Download
from ...data.federation import Federation
from ...errors import FedflatError
from .arrays import as_array, as_tensor, unpack

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
            model, method, sgd, loss, seed, buffers, measured, load, expected = pickle.loads(work)
            federation: Federation = load() if load is not None else unpack(*data)
        except FedflatError as problem:
            return _problem(f"The Ray node {place} cannot load the data: {problem}")
        except Exception as problem:
            return _problem(
                f"The Ray node {place} cannot load the model, the method or the data ({_said(problem)}). What they "
                "are made of must be installed there, or be defined in the script or notebook itself."
            )
        if load is not None and fingerprint(federation) != expected:
            return _problem(
                f"The Ray node {place} has other data than this process ({fingerprint(federation)}, not "
                f"{expected}). Put the same files there, or have the data sent."
            )
        model = model.copy(device)
        self._federation = federation.to(model.vector.dtype, device)
        self._training = ClientRound(model, method, sgd, loss, seed, buffers, measured)
        self._device = device
        return {"place": place}

    def run(self, common: dict[str, Any], own: dict[str, Any]) -> Answer:
        """A client's round, from what all clients receive and what is this one's own."""
        client, round = own["client"], common["round"]
        values = {**self._tensors(common["values"]), **self._tensors(own["values"]), **own["scalars"]}
        download = Download(
            round, common["lr"], self._tensor(common["start"]), values, self._tensor(common["buffers"])
        )
        try:
            state = self._tensors(own["state"])
            upload = self._training.run(client, self._federation.client(client), download, state)
        except FedflatError as problem:
            return _problem(str(problem))
        except Exception as problem:
            return _problem(f"client {client}, round {round}: training failed: {_said(problem)}")
        return {
            "numbers": upload.numbers(),
            "update": as_array(upload.update),
            "vectors": {name: as_array(vector) for name, vector in upload.vectors.items()},
            "state": {name: as_array(vector) for name, vector in upload.state.items()},
            "buffers": None if upload.buffers is None else as_array(upload.buffers),
            "trained": None if upload.trained is None else as_array(upload.trained),
        }

    def score(self, point: dict[str, Any], share: range) -> Answer:
        """Evaluate a model on some batches of the test set."""
        model, test = self._training.model, self._federation.test
        assert test is not None
        try:
            model.write_buffers(self._tensor(point["buffers"]))
            return {
                "scores": score_batches(model, self._tensor(point["w"]), test, self._training.loss, share)
            }
        except Exception as problem:
            return _problem(f"Testing the model failed: {_said(problem)}")

    def _tensor(self, array: np.ndarray | None) -> Any:
        return None if array is None else as_tensor(array, self._device)

    def _tensors(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        return {name: self._tensor(array) for name, array in arrays.items()}


def fingerprint(federation: Federation) -> str:
    """What tells other data, or the same data dealt out in another way, from a federation."""
    from zlib import crc32

    labels = federation.labels_by_client()
    split = "" if labels is None else f", split {crc32(labels[1].tobytes(), crc32(labels[0].tobytes())):08x}"
    return f"{federation.name}, {len(federation)} clients, {federation.samples} samples{split}"


def _problem(sentence: str) -> Answer:
    return {"problem": sentence}


def _said(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"
