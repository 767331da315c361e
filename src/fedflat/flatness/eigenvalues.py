"""The largest eigenvalues of the Hessian."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.evaluation import LossFunction
from ..core.flat import FlatModel
from ..core.randomness import generator
from ..data.federation import Federation, Shard
from ..errors import FedflatError, MissingExtra
from .directions import gaussian
from .estimate import at_least
from .surface import Surface


@dataclass(frozen=True)
class Eigenvalues:
    """The largest eigenvalues of the Hessian."""

    largest: float
    """λ_max"""
    values: tuple[float, ...]
    """as many as were asked for, the largest first"""
    residuals: tuple[float, ...]
    """`‖H v − λ v‖` of each unit eigenvector v: an eigenvalue of H lies at most that far from λ"""
    products: int
    """Hessian-vector products that were needed"""


def hessian_eigenvalues(
    model: nn.Module | FlatModel,
    data: Shard | Federation,
    top: int = 1,
    tolerance: float = 1e-3,
    seed: int = 0,
    at: Tensor | None = None,
    loss: LossFunction = F.cross_entropy,
) -> Eigenvalues:
    """`λ_1 ≥ … ≥ λ_top` of `H = ∇²L(w)`, L the mean loss on all of `data`; FedGF's λ_max is the first.

    By implicitly restarted Lanczos iterations (ARPACK, through scipy) on Hessian-vector products, to a relative
    `tolerance`: where power iterations lead, in far fewer products. Largest means most positive, not in magnitude.
    """
    return hessian_eigenpairs(Surface(model, data, loss, at), top, tolerance, seed)[0]


def hessian_eigenpairs(
    surface: Surface, top: int = 1, tolerance: float = 1e-3, seed: int = 0
) -> tuple[Eigenvalues, Tensor]:
    """The eigenvalues, and their unit eigenvectors, one a row."""
    try:
        from scipy.sparse.linalg import (  # type: ignore[import-untyped]
            ArpackError,
            ArpackNoConvergence,
            LinearOperator,
            eigsh,
        )
    except ImportError:
        raise MissingExtra("scipy", "flatness", "The measure eigenvalues") from None
    at_least("top", top, 1)
    if top >= surface.size:
        raise FedflatError(f"top={top}: the model has {surface.size} weights; ask for fewer eigenvalues.")
    products, largest_product = 0, 0.0

    def multiply(vector: np.ndarray) -> np.ndarray:
        nonlocal products, largest_product
        row = torch.as_tensor(vector).to(surface.w).view(1, -1)
        product: np.ndarray = surface.hessian_times(row)[0].cpu().numpy()
        products, largest_product = products + 1, max(largest_product, float(np.abs(product).max()))
        if not np.isfinite(product).all():
            raise FedflatError("The Hessian holds NaN or infinite values: has the training diverged?")
        return product

    start = gaussian(surface, seed, "eigenvalues", 0).cpu().numpy()
    hessian = LinearOperator((surface.size, surface.size), matvec=multiply, dtype=start.dtype)
    rng = generator(seed, "flatness eigenvalues", 1)  # for where the iterations find a subspace of their own
    try:
        values, vectors = eigsh(hessian, top, which="LA", tol=tolerance, v0=start, rng=rng)
    except ArpackNoConvergence:
        raise FedflatError(
            f"The {top} largest eigenvalues did not settle to {tolerance:g} in {products:,} products with the "
            "Hessian; give a larger tolerance, ask for fewer, or compute in float64."
        ) from None
    except ArpackError:
        if largest_product > 0:
            raise
        values, vectors = np.zeros(top), np.eye(surface.size, top)  # there is no curvature
    largest = torch.from_numpy(vectors.T[::-1].copy()).to(surface.w)
    scales = torch.from_numpy(values[::-1].copy()).to(surface.w)
    errors = surface.hessian_times(largest) - scales[:, None] * largest
    residuals = torch.linalg.vector_norm(errors, dim=1).tolist()
    found = tuple(scales.tolist())
    return Eigenvalues(found[0], found, tuple(residuals), products + top), largest
