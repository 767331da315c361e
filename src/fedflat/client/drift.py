"""What is added to the descent direction in every step of a client's round alike."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.flat import FlatModel


class Drift:
    """A sum of vectors, each times a weight; a single one is left where it is."""

    def __init__(self, model: FlatModel) -> None:
        self._model = model
        self._vector: Tensor | None = None
        self._weight = 1.0
        self._sum: Tensor | None = None
        self._views: list[Tensor] | None = None

    def clear(self) -> None:
        """Turn to the next round: it is nothing."""
        self._vector = self._views = None

    def add(self, vector: Tensor, weight: float) -> None:
        """One more vector."""
        if self._vector is None:
            self._vector, self._weight = vector, weight
        else:
            self._gather().add_(vector, alpha=weight)

    def carry(self, w: Tensor, by: float) -> None:
        """`w ← w + by · drift`."""
        if self._vector is not None:
            w.add_(self._vector, alpha=by * self._weight)

    @property
    def views(self) -> list[Tensor] | None:
        """It as one tensor per parameter; None where it is nothing."""
        if self._views is None and self._vector is not None:
            self._views = self._model.split(self._gather())
        return self._views

    def _gather(self) -> Tensor:
        """The sum in a vector of its own."""
        assert self._vector is not None
        if self._sum is None:
            self._sum = torch.empty_like(self._model.vector)
        if self._vector is not self._sum:
            torch.mul(self._vector, self._weight, out=self._sum)
            self._vector, self._weight = self._sum, 1.0
        return self._sum
