"""The loss over a line or a plane of weights.

Random directions are filter-normalised (Li et al. 2018, Visualizing the Loss Landscape of Neural Nets): networks
whose layers are scaled up and down against each other compute the same and then look the same. Several models are
shown along the same random numbers, each in the scale of its own filters, so that surfaces can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.evaluation import LossFunction
from ..core.flat import FlatModel
from ..data.federation import Federation, Shard
from ..errors import FedflatError
from .directions import gaussian
from .points import Point, losses_at
from .surface import Surface

Data = Shard | Federation
Weights = Tensor | nn.Module | FlatModel
"""A point: all weights as one vector, or a model that has them."""


@dataclass(frozen=True)
class Landscape:
    """Losses on a grid: of every model on every kind of data, an array with a dimension per axis."""

    axes: tuple[np.ndarray, ...]
    """coordinates along each direction, in units of the filters' lengths"""
    losses: dict[str, dict[str, np.ndarray]]
    """by model, then by data"""


def filter_normalised(surface: Surface, seed: int, number: int) -> Tensor:
    """A random direction in which every filter is as long as the model's: `d_f ← ‖w_f‖ d_f/‖d_f‖`.

    A filter is all that leads to one output; vectors (biases, norms) are left where they are, `d = 0`.
    """
    direction = gaussian(surface, seed, "landscape", number)
    model = surface.model
    for d, w in zip(model.layout.split(direction), model.layout.split(surface.w), strict=True):
        if d.dim() < 2:
            d.zero_()
            continue
        rows = tuple(range(1, d.dim()))
        lengths = torch.linalg.vector_norm(d, dim=rows, keepdim=True)
        d.mul_(torch.linalg.vector_norm(w, dim=rows, keepdim=True) / lengths.clamp_min(1e-12))
    return direction


def landscape(
    models: Mapping[str, nn.Module | FlatModel],
    data: Mapping[str, Data] | Data,
    reach: float = 1.0,
    points: int = 25,
    dimensions: int = 2,
    seed: int = 0,
    loss: LossFunction = F.cross_entropy,
    jobs: int = 1,
    keep: str | Path | None = None,
) -> Landscape:
    """`L(w + a d₁ + b d₂)` for every model and kind of data, with a and b from −reach to reach.

    Args:
        models: by name; all are seen along the same random directions.
        data: by name, such as `{"train": federation, "test": federation.test}`, or one.
        reach: how far to look, in units of the filters' lengths.
        points: per direction; an odd number has the model itself in the middle.
        dimensions: 1 for a line, 2 for a surface.
        seed: of the directions.
        loss: from outputs and targets to the mean loss of a batch.
        jobs: processes that compute side by side.
        keep: a file in which losses are kept as they are computed: called again, what is there is not computed again.
    """
    if dimensions not in (1, 2) or points < 2 or reach <= 0:
        raise FedflatError(
            f"dimensions={dimensions}, points={points}, reach={reach}: give 1 or 2 dimensions, at least 2 points and "
            "a reach above 0."
        )
    if not isinstance(models, Mapping):
        raise FedflatError("Give models by name, such as {'FedSAM': run.model}.")
    named = data if isinstance(data, Mapping) else {"train": data}
    axis = np.linspace(-reach, reach, points)
    grid = np.stack(np.meshgrid(*[axis] * dimensions, indexing="ij"), axis=-1).reshape(-1, dimensions)
    losses: dict[str, dict[str, np.ndarray]] = {}
    for name, model in models.items():
        losses[name] = {}
        for kind, samples in named.items():
            surface = Surface(model, samples, loss)
            basis = [filter_normalised(surface, seed, number) for number in range(dimensions)]
            wanted = [Point(f"{name}/{kind}", tuple(row.tolist())) for row in grid]
            values = losses_at(surface, surface.w, basis, wanted, jobs, keep)
            losses[name][kind] = np.array(values).reshape([points] * dimensions)
    return Landscape((axis,) * dimensions, losses)


@dataclass(frozen=True)
class Plane:
    """The loss on the plane through three points of weights, and where they and others lie on it."""

    axes: tuple[np.ndarray, np.ndarray]
    losses: dict[str, np.ndarray]
    """by data"""
    corners: np.ndarray
    """coordinates of the three points, a row each"""
    paths: dict[str, np.ndarray]
    """projections of other weights, such as the steps of a training"""


def plane(
    model: nn.Module | FlatModel,
    corners: Sequence[Weights],
    data: Mapping[str, Data] | Data,
    paths: Mapping[str, Sequence[Tensor]] | None = None,
    points: int = 25,
    margin: float = 0.2,
    loss: LossFunction = F.cross_entropy,
    jobs: int = 1,
    keep: str | Path | None = None,
) -> Plane:
    """`L(w₀ + a u + b v)` with u, v the Gram-Schmidt basis of w₁ − w₀ and w₂ − w₀ (Garipov et al. 2018).

    The grid reaches `margin` of its size beyond the three points and the paths, which are projected onto the plane.
    Points are vectors, such as `run.server.w`, or models.
    """
    if len(corners) != 3:
        raise FedflatError(f"A plane goes through three points, not {len(corners)}.")
    three = [_vector(corner) for corner in corners]
    origin = three[0]
    u = three[1] - origin
    u = u / torch.linalg.vector_norm(u)
    v = three[2] - origin
    v = v - torch.dot(v, u) * u
    length = torch.linalg.vector_norm(v)
    if not bool(length > 1e-9 * torch.linalg.vector_norm(three[2] - origin)) or not bool(u.isfinite().all()):
        raise FedflatError("The three points lie on a line, which no single plane goes through.")
    v = v / length

    def placed(weights: Sequence[Tensor]) -> np.ndarray:
        offsets = torch.stack([w - origin for w in weights])
        return (offsets @ torch.stack([u, v]).T).double().cpu().numpy()

    marks = placed(three)
    lines = {name: placed(steps) for name, steps in (paths or {}).items()}
    everything = np.concatenate([marks, *lines.values()])
    low, high = everything.min(axis=0), everything.max(axis=0)
    low, high = low - margin * (high - low), high + margin * (high - low)
    first, second = (np.linspace(low[n], high[n], points) for n in range(2))
    grid = np.stack(np.meshgrid(first, second, indexing="ij"), axis=-1).reshape(-1, 2)
    losses = {}
    for kind, samples in (data if isinstance(data, Mapping) else {"train": data}).items():
        surface = Surface(model, samples, loss)
        wanted = [Point(kind, tuple(row.tolist())) for row in grid]
        losses[kind] = np.array(losses_at(surface, origin, [u, v], wanted, jobs, keep)).reshape(
            points, points
        )
    return Plane((first, second), losses, marks, lines)


def merged(losses: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of surfaces, each scaled to [0, 1] (FedGMT, Figure 6: local and global loss in one picture)."""
    scaled = [(one - one.min()) / max(float(np.ptp(one)), 1e-12) for one in losses]
    return np.sum(scaled, axis=0)  # type: ignore[no-any-return]


def interpolation(
    model: nn.Module | FlatModel,
    start: Weights,
    end: Weights,
    data: Data,
    points: int = 21,
    beyond: float = 0.25,
    loss: LossFunction = F.cross_entropy,
    jobs: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """`L((1−t) start + t end)` with t from −beyond to 1 + beyond: fractions and losses.

    Both ends are vectors, such as `run.server.w`, or models.
    """
    first, last = _vector(start), _vector(end)
    fractions = np.linspace(-beyond, 1 + beyond, points)
    surface = Surface(model, data, loss)
    wanted = [Point("line", (float(t),)) for t in fractions]
    return fractions, np.array(losses_at(surface, first, [last - first], wanted, jobs, None))


def _vector(point: Weights) -> Tensor:
    return point if isinstance(point, Tensor) else FlatModel.of(point).vector.clone()
