"""The server's round: send, validate and fold uploads in client order, combine, finish.

Uploads are never collected: each one is folded into sums as it comes, so memory does not grow with the number
of active clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .errors import FedflatError, nearest
from .hook_checks import Untouched, named, vector_like
from .mechanism import Value, overrides
from .messages import Download, Upload
from .method import Method
from .store import ClientStore


class RejectedUpload(FedflatError):
    """An upload that must not touch the model, with the client, the round and the reason."""


class Server:
    """The global model, what the method keeps beside it, and the sums of the round under way.

    `server.w` is the flat global model, `server["ema"]` a named vector or number of the method's.
    """

    def __init__(
        self,
        w: Tensor,
        method: Method,
        clients: int,
        weighting: str = "samples",
        buffers: Tensor | None = None,
        state_memory: int | None = None,
    ) -> None:
        self.w = w
        self.method = method
        self.clients = clients
        """`M`, all clients, active or not"""
        self.weighting = weighting
        self.buffers = buffers
        self.state: dict[str, Value | None] = {}
        for mechanism in method.mechanisms:
            self.state.update(named(mechanism, "server_state", mechanism.server_state(w)))
        self.per_client = ClientStore(budget=state_memory, device=w.device)
        """what the server keeps for every client"""
        self._receivers = [m for m in method.mechanisms if overrides(m, "receive")]
        self._senders = [m for m in method.mechanisms if overrides(m, "send")]
        self.average = w
        """the plain average of the client models of the last round"""
        self.step = torch.zeros_like(w)
        """what the last round added to w"""
        self.start = w
        """where the clients of this round start, which momentum may look ahead for"""
        self.bounds: dict[str, float] = {}
        """how long uploaded vectors may be, by name"""
        self._clips = False
        self.open(0, 0.0)

    def bound(self, norm: float | Mapping[str, float] | None, clip: bool) -> None:
        """Refuse uploads with longer vectors, or shorten these."""
        names = ("update", *self.method.up)
        given = norm if isinstance(norm, Mapping) else {} if norm is None else dict.fromkeys(names, norm)
        for name, length in given.items():
            if name not in names:
                raise FedflatError(
                    f"norm_bound: {self.method.name} uploads no '{name}'.{nearest(name, names)}"
                )
            if isinstance(length, bool) or not isinstance(length, int | float) or not 0 < length < math.inf:
                raise FedflatError(
                    f"norm_bound: the bound of '{name}' must be a number above 0, not {length!r}."
                )
        self.bounds, self._clips = {name: float(length) for name, length in given.items()}, clip

    # -- state, as mechanisms see it ---------------------------------------------------------------

    def __getitem__(self, name: str) -> Value:
        self._check_kept(name)
        value = self.state[name]
        if value is None:
            raise FedflatError(
                f"'{name}' has no value before the first round; server.get('{name}') is None then."
            )
        return value

    def __setitem__(self, name: str, value: Value) -> None:
        self._check_kept(name)
        self.state[name] = value

    def _check_kept(self, name: str) -> None:
        if name not in self.state:
            raise FedflatError(
                f"No mechanism of {self.method.name} keeps '{name}' on the server: let server_state name it."
            )

    def get(self, name: str, default: Value | None = None) -> Value | None:
        """A value, or the default where there is none (yet)."""
        value = self.state.get(name)
        return default if value is None else value

    def vector(self, name: str) -> Tensor:
        """A named vector; it may be changed in place."""
        value = self[name]
        assert isinstance(value, Tensor), name
        return value

    def scalar(self, name: str, default: float | None = None) -> float:
        """A named number."""
        value = self.get(name, default)
        assert isinstance(value, float | int), name
        return float(value)

    def scalars(self) -> dict[str, float]:
        """All named numbers, such as FedGF's c or FedWMSAM's alpha."""
        return {k: float(v) for k, v in self.state.items() if isinstance(v, float | int)}

    def of(self, client: int) -> dict[str, Tensor]:
        """What the server keeps of one client; `keep` stores it again."""
        return self.per_client.get(client)

    def keep(self, client: int, name: str, value: Tensor) -> None:
        """Keep a vector of one client; it becomes the server's and must not be changed afterwards."""
        self.per_client.put(client, {**self.of(client), name: value}, copy=False)

    # -- checkpoints -------------------------------------------------------------------------------

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next round depends on, but `per_client`: vectors and numbers by name."""
        vectors = {"w": self.w, "average": self.average, "step": self.step}
        if self.buffers is not None:
            vectors["buffers"] = self.buffers
        vectors |= {f"state {name}": v for name, v in self.state.items() if isinstance(v, Tensor)}
        numbers = {name: value for name, value in self.state.items() if not isinstance(value, Tensor)}
        return vectors, {"state": numbers}

    def restore(self, vectors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Be as at a snapshot."""
        there = {name: vector.to(self.w.device) for name, vector in vectors.items()}
        self.w, self.average, self.step = there["w"], there["average"], there["step"]
        self.buffers = there.get("buffers")
        self.state = {name: there.get(f"state {name}", numbers["state"].get(name)) for name in self.state}

    # -- sums of the round under way ---------------------------------------------------------------

    def add(self, name: str, vector: Tensor, weight: float = 1.0) -> None:
        """Add to a sum over this round's uploads."""
        if name in self._totals:
            self._totals[name].add_(vector, alpha=weight)
        else:
            self._totals[name] = vector * weight

    def total(self, name: str) -> Tensor:
        """A sum over this round's uploads."""
        if name not in self._totals:
            raise FedflatError(f"Nothing was added to '{name}' in this round: call server.add in `receive`.")
        return self._totals[name]

    def tally(self, name: str, value: float) -> None:
        """Add to a sum of numbers over this round's uploads."""
        self._tallies[name] = self._tallies.get(name, 0.0) + value

    def tallied(self, name: str) -> float:
        """A sum of numbers over this round's uploads."""
        if name not in self._tallies:
            raise FedflatError(
                f"Nothing was tallied as '{name}' in this round: call server.tally in `receive`."
            )
        return self._tallies[name]

    def weight(self, upload: Upload) -> float:
        """The weight of an upload in the average, before division by `total_weight`."""
        return float(upload.samples) if self.weighting == "samples" else 1.0

    # -- the round ---------------------------------------------------------------------------------

    def open(self, round: int, lr: float) -> None:
        """Begin a round."""
        self.round, self.lr = round, lr
        self.accepted = 0
        self._heard: set[int] = set()
        self.clipped: list[str] = []
        """what was shortened in this round"""
        self.total_weight = 0.0
        self._totals: dict[str, Tensor] = {}
        self._tallies: dict[str, float] = {}
        self.start = self.w
        for mechanism in self.method.mechanisms:
            self.start = vector_like(mechanism, "start", mechanism.start(self, self.start), self.w)
        self._common = {name: value for name in self.method.down if (value := self.state[name]) is not None}

    def download(self, client: int) -> Download:
        """What a client receives this round."""
        values: dict[str, Value] = dict(self._common)
        for mechanism in self._senders:
            values.update(named(mechanism, "send", mechanism.send(self, client)))
        return Download(self.round, self.lr, self.start, values, self.buffers)

    def receive(self, upload: Upload) -> None:
        """Fold one upload into the round; raises `RejectedUpload` and leaves no trace if it is bad."""
        reason = self.fault(upload)
        if reason:
            raise RejectedUpload(f"client {upload.client}, round {upload.round}: {reason}")
        if self.bounds and self._clips:
            upload = self._clip(upload)
        weight = self.weight(upload)
        self._heard.add(upload.client)
        self.accepted += 1
        self.total_weight += weight
        self.add("update", upload.update, weight)
        if upload.buffers is not None:
            self.add("buffers", upload.buffers, weight)
            self.tally("buffers", weight)
        for mechanism in self._receivers:
            mechanism.receive(self, upload)

    def fault(self, upload: Upload) -> str | None:
        """Why an upload must be refused; None if it is good."""
        if upload.round != self.round:
            return f"the upload belongs to round {upload.round}; this is round {self.round}."
        if not 0 <= upload.client < self.clients or upload.client in self._heard:
            return "it has answered already." if upload.client in self._heard else "there is no such client."
        vectors: Mapping[str, object] = {"update": upload.update, **upload.vectors}
        missing = [name for name in self.method.up if name not in upload.vectors]
        if missing:
            return f"the upload lacks '{missing[0]}', which {self.method.name} needs."
        unknown = [name for name in upload.vectors if name not in self.method.up]
        if unknown:
            return f"the upload holds '{unknown[0]}', which {self.method.name} does not know."
        for name, vector in vectors.items():
            if not isinstance(vector, Tensor) or vector.shape != self.w.shape:
                shape = tuple(vector.shape) if isinstance(vector, Tensor) else type(vector).__name__
                return f"'{name}' has shape {shape}, expected {tuple(self.w.shape)}."
            if vector.dtype != self.w.dtype:
                return f"'{name}' has type {vector.dtype}, expected {self.w.dtype}."
            # a sum is finite only if every entry is (or cancels no infinity): one pass, no copy
            if not math.isfinite(vector.sum().item()) and not bool(torch.isfinite(vector).all()):
                return f"'{name}' holds NaN or infinite values."
            if name in self.bounds and not self._clips and (length := _length(vector)) > self.bounds[name]:
                return f"'{name}' has length {length:.4g}, more than {self.bounds[name]:g}."
        if not (0 < upload.samples < math.inf and 0 < upload.steps < math.inf):
            return f"{upload.samples} samples and {upload.steps} steps: both must be positive."
        if upload.buffers is not None:
            expected = None if self.buffers is None else self.buffers.shape
            if upload.buffers.shape != expected:
                return f"its buffers have shape {tuple(upload.buffers.shape)}, expected {expected}."
            if not bool(torch.isfinite(upload.buffers).all()):
                return "its buffers hold NaN or infinite values."
        return None

    def _clip(self, upload: Upload) -> Upload:
        """The upload with no vector longer than allowed."""
        vectors = {"update": upload.update, **upload.vectors}
        for name, bound in self.bounds.items():
            length = _length(vectors[name])
            if length > bound:
                vectors[name] = vectors[name] * (bound / length)
                place = f"client {upload.client}, round {upload.round}"
                self.clipped.append(f"{place}: '{name}' had length {length:.4g}, clipped to {bound:g}.")
        return replace(upload, update=vectors.pop("update"), vectors=vectors)

    def close(self) -> None:
        """End the round: combine, step, finish. A round without uploads changes nothing."""
        if not self.accepted:
            return
        update = self.total("update").div_(self.total_weight)
        self.average = self.start + update
        for mechanism in self.method.mechanisms:
            update = vector_like(mechanism, "combine", mechanism.combine(self, update), self.w)
        self.step = update
        self.w = self.w + update
        if "buffers" in self._totals:
            self.buffers = self.total("buffers").div_(self.tallied("buffers"))
        untouched = Untouched(**{"server.w": self.w})
        for mechanism in self.method.mechanisms:
            mechanism.finish(self)
        untouched.check("`combine` is where the update can be changed")


def _length(vector: Tensor) -> float:
    """In double precision: a sum of squares of large float32 entries overflows."""
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64).item())
