"""What an oracle is: it answers "what is the gradient there?". How it finds out is its own business."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..core.evaluation import LossFunction as LossFunction
from ..core.flat import Flat, Scalar, inverse_norm
from ..core.pull import Pull as Pull

Terms = Callable[[Tensor], Sequence[Tensor | Pull]]
"""From the model's outputs to the terms that mechanisms add to the loss."""


class Point:
    """A place in parameter space; an oracle's own kind of point may wait with writing `flat` out."""

    def __init__(self, flat: Flat) -> None:
        self._flat = flat

    @property
    def flat(self) -> Flat:
        """The place, written out."""
        return self._flat


class Gradient(Protocol):
    """The gradient of one batch's loss at one point. Its memory may be used again by the next one."""

    loss: Tensor
    """the plain loss there, without the mechanisms' terms"""

    def write(self, into: Flat) -> None:
        """Write the gradient out."""

    def add_to(self, w: Flat, scale: float, pull: float = 0.0) -> None:
        """`w ← w + scale·g + pull·w`.

        The pull is added to the gradient first: beside w itself a small one would be lost in rounding.
        """


class Oracle(Protocol):
    """The gradient of a loss at any point."""

    def begin(self, buffers: Tensor | None) -> None:
        """Begin a client's round, whose teachers have these buffers."""

    def gradient(self, point: Point, inputs: Tensor, targets: Tensor, terms: Terms | None) -> Gradient:
        """Take the gradient at a point, on a batch."""

    def ascend(
        self,
        point: Point,
        inputs: Tensor,
        targets: Tensor,
        terms: Terms | None,
        length: float,
        normalize: bool,
        into: Flat,
    ) -> Point:
        """Go to `point + length·n(g)`, or to `point + length·g`, with the gradient g there; `into` is room for it."""

    def outputs(self, w: Flat, inputs: Tensor) -> Tensor:
        """Compute a teacher's outputs: the model with other weights, in evaluation mode and without a graph."""


def step_along(length: float, normalize: bool, vector: Tensor) -> Scalar:
    """Find what to multiply a vector by to go `length` along it, or `length` times it; nowhere along nothing."""
    return length * inverse_norm(vector) if normalize else length


def total_pull(pulls: Sequence[Pull]) -> Tensor:
    """Add pulls up."""
    total = pulls[0].vector * pulls[0].scale
    for vector, scale in pulls[1:]:
        total = torch.add(total, vector, alpha=scale)
    return total.detach()
