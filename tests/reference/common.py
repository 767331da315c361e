"""What every method needs: normalisation, the local SGD step, the federation being simulated.

Notation of the whole reference. ``w`` is the global model at the start of round t, ``x`` a local
model, ``M`` the number of clients, ``N_t`` the active ones, ``S = |N_t|``, ``K`` local steps,
``eta`` the local learning rate of the round.

    Delta_i = x_K - x_0                    client update, points downhill
    Delta   = sum_i p_i Delta_i            p_i = n_i / sum n over N_t, or 1 / S
    G_i     = -Delta_i / (K eta)           client pseudo-gradient, points uphill
    G       = -Delta / (K eta)             their p-weighted mean
    n(v)    = v / |v|                      Euclidean norm over all parameters; n(0) = 0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .mlp import MLP, Array


def n(v: Array) -> Array:
    """``v / |v|``, and 0 when ``|v| <= 1e-12``."""
    norm = np.linalg.norm(v)
    return v / norm if norm > 1e-12 else np.zeros_like(v)


def clip(v: Array, norm: float | None) -> Array:
    """``v min(1, norm / |v|)``; without a norm ``v``."""
    length = np.linalg.norm(v)
    return v if norm is None or length <= norm else v * (norm / length)


def pull(x: Array, w: Array, beta: float, prox: str) -> Array:
    """Gradient of the dynamic regulariser's penalty.

    "square": ``(x - w) / beta``, of ``|x - w|^2 / (2 beta)``;
    "norm": ``n(x - w) / (2 beta)``, of ``|x - w| / (2 beta)``.
    """
    if prox == "square":
        return (x - w) / beta
    if prox == "norm":
        return n(x - w) / (2 * beta)
    raise ValueError(f"unknown prox {prox!r}")


class SGD:
    """``d = clip(d);  d += wd x;  buf = momentum buf + d  (buf = d at first);  x -= eta buf``."""

    def __init__(self, lr: float, momentum: float, weight_decay: float, clip_norm: float | None) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.clip_norm = clip_norm
        self.buf: Array | None = None

    def __call__(self, x: Array, d: Array) -> Array:
        """The iterate after ``x`` with direction ``d`` (uphill)."""
        d = clip(d, self.clip_norm) + self.weight_decay * x
        self.buf = d if self.buf is None else self.momentum * self.buf + d
        return x - self.lr * self.buf


@dataclass(frozen=True)
class Run:
    """The federation: data, initial model, schedule and local optimiser."""

    mlp: MLP
    clients: list[tuple[Array, Array]]
    w0: Array
    schedule: list[list[int]]
    K: int
    lr: float
    lr_decay: float
    momentum: float
    weight_decay: float
    weighting: str
    clip_norm: float | None = None
    clip_stage: str = "direction"

    @property
    def M(self) -> int:
        """Number of clients, active or not."""
        return len(self.clients)

    def zeros(self) -> Array:
        """A zero vector of the model's size."""
        return np.zeros_like(self.w0)

    def rounds(self) -> Iterator[tuple[list[int], dict[int, float], float]]:
        """``N_t, {i: p_i}, eta_t`` of every round."""
        for t, active in enumerate(self.schedule):
            if self.weighting == "samples":
                size = {i: len(self.clients[i][1]) for i in active}
            elif self.weighting == "uniform":
                size = dict.fromkeys(active, 1)
            else:
                raise ValueError(f"unknown weighting {self.weighting!r}")
            total = sum(size.values())
            yield active, {i: size[i] / total for i in active}, self.lr * self.lr_decay**t

    def sgd(self, lr: float) -> SGD:
        """A fresh local optimiser (its momentum does not survive the round)."""
        return SGD(
            lr,
            self.momentum,
            self.weight_decay,
            self.clip_norm if self.clip_stage == "direction" else None,
        )

    def clipped(self, gradient: Array) -> Array:
        """The gradient that a step is made of: clipped here at the stage "gradient", before any correction.

        At the stage "direction" the corrected direction is clipped instead, by the optimiser. A first gradient, which
        only says where to climb or is mixed in, is never clipped.
        """
        return clip(gradient, self.clip_norm) if self.clip_stage == "gradient" else gradient

    def grad(self, i: int, x: Array) -> Array:
        """Full-batch cross-entropy gradient of client i at ``x``."""
        return self.mlp.ce_grad(x, *self.clients[i])

    def logits(self, i: int, x: Array) -> Array:
        """Logits of model ``x`` on client i's data."""
        return self.mlp.logits(x, self.clients[i][0])


def result(path: list[Array], server: dict | None = None, **clients: list) -> dict:
    """The return value of every method; ``clients`` are lists indexed by client."""
    per_client = {name: list(values) for name, values in clients.items()}
    count = max((len(values) for values in per_client.values()), default=0)
    return {
        "w": path,
        "server": server or {},
        "clients": {i: {name: v[i] for name, v in per_client.items()} for i in range(count)},
    }
