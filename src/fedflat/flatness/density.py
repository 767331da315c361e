"""The density of the Hessian's eigenvalues."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.evaluation import LossFunction
from ..core.flat import FlatModel
from ..data.federation import Federation, Shard
from .directions import signs
from .estimate import Estimate, at_least
from .surface import Surface


@dataclass(frozen=True)
class SpectralDensity:
    """`φ(λ) = (1/n) Σ δ(λ − λ_i)` by quadrature: of every probe, nodes and their weights, which sum to 1."""

    largest: float
    smallest: float
    """the outermost nodes: λ_max and λ_min come no closer together"""
    nodes: tuple[tuple[float, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    size: int
    """n, the number of eigenvalues"""

    def moment(self, power: int, confidence: float = 0.95) -> Estimate:
        """`(1/n) Σ λ_i^power`: of power 1 the trace over n. Exact in each probe up to power 2·steps − 1."""
        pairs = zip(self.nodes, self.weights, strict=True)
        return Estimate.of([float(np.dot(w, np.power(x, power))) for x, w in pairs], confidence)

    def fraction(self, low: float = -math.inf, high: float = math.inf, confidence: float = 0.95) -> Estimate:
        """The share of eigenvalues from `low` to `high`: of the negative ones, `fraction(high=0)`."""
        pairs = zip(self.nodes, self.weights, strict=True)
        shares = [sum(w for x, w in zip(xs, ws, strict=True) if low <= x <= high) for xs, ws in pairs]
        return Estimate.of(shares, confidence)

    def curve(self, points: int = 512, width: float = 0.01) -> tuple[np.ndarray, np.ndarray]:
        """A grid of eigenvalues and the density there, every node a Gaussian of `width` times the range."""
        nodes, weights = np.concatenate(self.nodes), np.concatenate(self.weights) / len(self.weights)
        spread = float(np.ptp(nodes)) or abs(float(nodes[0])) or 1.0
        deviation = width * spread
        grid = np.linspace(nodes.min() - 5 * deviation, nodes.max() + 5 * deviation, points)
        bumps = np.exp(-0.5 * ((grid[:, None] - nodes) / deviation) ** 2)
        return grid, bumps @ weights / (deviation * math.sqrt(2 * math.pi))


def spectral_density(
    model: nn.Module | FlatModel,
    data: Shard | Federation,
    steps: int = 30,
    probes: int = 5,
    seed: int = 0,
    at: Tensor | None = None,
    loss: LossFunction = F.cross_entropy,
) -> SpectralDensity:
    """The density of the eigenvalues of `∇²L(w)`, L the mean loss on all of `data`.

    Stochastic Lanczos quadrature (Ghorbani, Krishnan & Xiao 2019; Papyan 2020, Algorithm 2): from every random
    vector of signs, `steps` Lanczos steps; the tridiagonal matrix's eigenvalues are the nodes, the squares of its
    eigenvectors' first entries the weights. Probes go side by side and share passes. Without reorthogonalisation,
    which needs `steps` vectors of memory: rounding then only repeats a node and shares out its weight.
    """
    at_least("steps", steps, 2)
    at_least("probes", probes, 2)
    surface = Surface(model, data, loss, at)
    now = torch.stack([signs(surface, seed, "density", number) for number in range(probes)])
    free = int(torch.count_nonzero(now[0]))
    now /= torch.linalg.vector_norm(now, dim=1, keepdim=True)
    before, beta = torch.zeros_like(now), now.new_zeros(probes)
    diagonals, sides = [], []
    for _ in range(min(steps, free)):
        after = surface.hessian_times(now).sub_(beta[:, None] * before)
        alpha = torch.sum(after * now, dim=1)
        after.sub_(alpha[:, None] * now)
        beta = torch.linalg.vector_norm(after, dim=1)
        diagonals.append(alpha.tolist())
        sides.append(beta.tolist())
        before, now = now, after.div_(torch.where(beta > 0, beta, 1.0)[:, None])
    rules = [
        _quadrature(np.array(a), np.array(b), torch.finfo(now.dtype).eps)
        for a, b in zip(zip(*diagonals, strict=True), zip(*sides, strict=True), strict=True)
    ]
    nodes, weights = (tuple(each) for each in zip(*rules, strict=True))
    largest, smallest = max(x[-1] for x in nodes), min(x[0] for x in nodes)
    return SpectralDensity(largest, smallest, nodes, weights, free)


def _quadrature(
    diagonal: np.ndarray, side: np.ndarray, precision: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Nodes and weights from Lanczos' tridiagonal matrix, up to where the vector's own subspace ended."""
    scale = max(np.abs(diagonal).max(), side.max())
    ends = np.flatnonzero(side <= 10 * precision * scale)
    length = int(ends[0]) + 1 if len(ends) else len(diagonal)
    off = side[: length - 1]
    matrix = np.diag(diagonal[:length]) + np.diag(off, 1) + np.diag(off, -1)
    nodes, vectors = np.linalg.eigh(matrix)
    return tuple(nodes.tolist()), tuple((vectors[0] ** 2).tolist())
