"""Noise on everything that a client uploads, before it leaves."""

from __future__ import annotations

import hashlib
import math
import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...core.finite import is_as_finite
from ...core.parameters import number
from ...core.randomness import key
from ...core.vector_memory import memory
from ..mechanism import Contract, Mechanism, Noise

if TYPE_CHECKING:
    from ...client.local import Local
    from ...core.messages import Upload


class PrivateUploads(Mechanism):
    """`v ← v min(1, C/‖v‖) + N(0, σ²C²)` for every vector that leaves a client: client-level differential privacy.

    `noise` is σ, `clip` is C for the update and `clip_extra` for each vector that a method uploads beside it, by
    default the same. The noise is added on the client, so the server is not trusted either; what is made of an upload
    later cannot weaken it. Losses, passes and the number of samples are withheld: all clients weigh the same. A
    vector that holds NaN or infinity leaves as zeros, since noise hides neither, and buffers that have come to hold
    them leave as they were received. `fedflat privacy` says which ε that is, and what it does not cover.
    """

    clip: float = number(default=1.0, above=0)
    noise: float = number(default=1.0, at_least=0)
    clip_extra: float | None = number(default=None, above=0, optional=True)

    def contract(self) -> Contract:
        """Noise on everything."""
        return Contract(noise=Noise(self.clip, self.noise, self.clip_extra))

    def leave(self, local: Local, upload: Upload) -> None:
        """Clip, add noise, withhold the rest."""
        zeroed: list[str] = local.memo.setdefault(self, [])
        extra = self.clip if self.clip_extra is None else self.clip_extra
        upload.update = self._private(local, "update", upload.update, self.clip, zeroed)
        upload.vectors = {n: self._private(local, n, v, extra, zeroed) for n, v in upload.vectors.items()}
        if upload.buffers is not None and not is_as_finite(upload.buffers, local.buffers):
            upload.buffers = local.buffers  # a mask of -inf is no reason to withhold them
            zeroed.append("buffers")
        upload.samples, upload.loss = 1, math.nan
        upload.forward = upload.backward = upload.spared_forward = upload.spared_backward = 0
        if zeroed and local.secret is None:  # a node has a log of its own for that
            warnings.warn(
                "private-uploads: vectors that hold NaN or infinite values leave as zeros, buffers as received. A "
                "lower lr may help.",
                stacklevel=2,
            )

    def _private(self, local: Local, name: str, vector: Tensor, clip: float, zeroed: list[str]) -> Tensor:
        length = torch.linalg.vector_norm(vector, dtype=torch.float64).item()
        if not math.isfinite(length):
            vector = torch.zeros_like(vector)
            zeroed.append(name)
        else:  # the client keeps the other
            vector = vector * min(1.0, clip / length) if length > 0 else vector.clone()
        if self.noise:
            drawn = _generator(local, name, vector).standard_normal(len(vector), dtype=np.float32)
            vector.add_(torch.from_numpy(drawn).to(vector), alpha=self.noise * clip)
        return vector


def _generator(local: Local, name: str, vector: Tensor) -> np.random.Generator:
    """Fresh noise for every vector, and the same for the same one.

    In a simulation it depends on the seed, as everything. On a node it comes from the node's secret and from what it
    hides: a server that asks twice for the same gets the same bytes, and cannot average the noise away.
    """
    if local.secret is None:
        return np.random.Generator(
            np.random.Philox(key=key(local.seed, f"noise {name}", local.round, local.client))
        )
    place = f"{name}:{local.client}:{local.round}:".encode()
    digest = hashlib.blake2b(place, key=local.secret, digest_size=16)
    digest.update(memory(vector))
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest.digest(), "little")))
