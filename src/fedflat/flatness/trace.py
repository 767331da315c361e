"""The trace of the Hessian."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.evaluation import LossFunction
from ..core.flat import FlatModel
from ..data.federation import Federation, Shard
from ..errors import FedflatError, nearest
from .directions import signs
from .estimate import Estimate, at_least
from .surface import Surface

TOGETHER = 8
"""Products with the Hessian that share a pass: they take this many vectors of memory, twice."""


def hessian_trace(
    model: nn.Module | FlatModel,
    data: Shard | Federation,
    products: int = 30,
    method: str = "hutch++",
    confidence: float = 0.95,
    seed: int = 0,
    at: Tensor | None = None,
    loss: LossFunction = F.cross_entropy,
) -> Estimate:
    """`tr ∇²L(w)`, L the mean loss on all of `data`, from a number of Hessian-vector products.

    `method="hutchinson"`: the mean of `zᵀ H z` over random signs z (Hutchinson 1990). `"hutch++"`: a third of the
    products finds a basis Q of where H is large, a third gives the trace there exactly, `tr QᵀHQ`, and a third
    estimates the rest in that way, `zᵀ P H P z` with `P = I − QQᵀ` (Meyer et al. 2021, Hutch++, Algorithm 1): more
    exact where a few eigenvalues are large, as in networks. The interval is Student's for what is estimated.
    """
    surface = Surface(model, data, loss, at)
    if method == "hutchinson":
        at_least("products", products, 2)
        return Estimate.of(_forms(surface, seed, products), confidence)
    if method != "hutch++":
        raise FedflatError(f"method='{method}' is not possible.{nearest(method, ['hutchinson', 'hutch++'])}")
    at_least("products", products, 6)
    third = min(products // 3, surface.size)
    sketch = torch.cat(
        [surface.hessian_times(rows) for rows in _blocks(surface, seed, "trace sketch", third)]
    )
    basis = torch.linalg.qr(sketch.T)[0].T.contiguous()
    images = torch.cat([surface.hessian_times(rows) for rows in basis.split(TOGETHER)])
    inside = torch.sum(images * basis, dtype=torch.float64).item()

    def outside(rows: Tensor) -> Tensor:
        return rows.sub(rows @ basis.T @ basis)

    return Estimate.of(_forms(surface, seed, products - 2 * third, outside), confidence, offset=inside)


def _forms(
    surface: Surface, seed: int, number: int, project: Callable[[Tensor], Tensor] = lambda rows: rows
) -> list[float]:
    """`zᵀ H z` for a number of random z, projected before."""
    draws: list[float] = []
    for rows in _blocks(surface, seed, "trace", number):
        inner = project(rows)
        draws += torch.sum(inner * surface.hessian_times(inner), dim=1, dtype=torch.float64).tolist()
    return draws


def _blocks(surface: Surface, seed: int, purpose: str, number: int) -> Iterator[Tensor]:
    """Random vectors of signs as rows, some at a time."""
    for first in range(0, number, TOGETHER):
        last = min(first + TOGETHER, number)
        yield torch.stack([signs(surface, seed, purpose, which) for which in range(first, last)])
