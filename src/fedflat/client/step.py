"""What a mechanism sees of one local step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..core.flat import Scalar, axpy
from ..core.tasks import task_of
from ..errors import FedflatError
from ..gradients.base import Gradient, Point, Pull
from ..methods.checks import check_term
from .batches import Batch
from .teachers import Transform

if TYPE_CHECKING:
    from .round import ClientRound

TOO_LATE = "The point is moved in a mechanism's hook `shift`, before the gradient is taken there."


class Step:
    """One local step: where the client is (`w`), and where its gradient will be taken (`point`)."""

    def __init__(self, round: ClientRound, index: int, batch: Batch) -> None:
        self.local, self.index, self.batch = round.local, index, batch
        self.inputs, self.targets = batch.inputs, batch.targets
        self._round = round
        self._point = Point(round.w)
        self._terms = self._all_terms if round.terms else None
        self._taken = False
        """whether a gradient is taken at the point, which then stays"""

    @property
    def w(self) -> Tensor:
        """The local iterate `w_{i,k}`; read it, never write it."""
        return self.local.w

    @property
    def point(self) -> Tensor:
        """Where the gradient will be taken: the iterate plus the shifts so far; read it, never write it."""
        return self._point.flat.vector

    def gradient(self) -> Tensor:
        """Take the gradient at the point, on this step's batch: one more forward and backward pass.

        The vector is written again when a gradient is next asked for, by whichever mechanism: copy what is kept.
        """
        taken = self._taken
        self.differentiate().write(self._round.first)
        self._taken = taken
        return self._round.first.vector

    def move(self, vector: Tensor, scale: Scalar = 1.0) -> None:
        """Move the point by `scale * vector`."""
        if self._taken:
            raise FedflatError(TOO_LATE)
        there = self._round.away
        axpy(self._point.flat.vector, vector, scale, out=there.vector)
        self._point = Point(there)

    def ascend(self, length: float, normalize: bool = True) -> None:
        """Move the point by `length` along the gradient there, or by `length` times it: one more pass each way."""
        if self._taken:
            raise FedflatError(TOO_LATE)
        round, self._taken = self._round, True
        round.passes.make(1, 1)
        self._point = round.oracle.ascend(
            self._point, self.inputs, self.targets, self._terms, length, normalize, into=round.away
        )
        self._taken = False

    def teacher(self, vector: Tensor, then: Transform | None = None) -> Tensor:
        """Compute the outputs of the model with other weights, constant in this round, on this step's batch.

        The method makes one more forward pass; mostly it is skipped, since samples are known beforehand. `then` is
        applied to the outputs, to many samples at once.
        """
        return self._round.teacher(vector, then).outputs(self.batch)

    def task(self, outputs: Tensor) -> str:
        """What is predicted: classification, multi-label, regression or unknown; see `task_of`."""
        return task_of(self._round.loss, outputs, self.targets)

    def skip(self, forward: int, backward: int) -> None:
        """Count passes that the method makes but whose result is not needed in this step."""
        self._round.passes.skip(forward, backward)

    def differentiate(self) -> Gradient:
        """Take the gradient at the point, in the form the oracle gives it."""
        self._taken = True
        self._round.passes.make(1, 1)
        return self._round.oracle.gradient(self._point, self.inputs, self.targets, self._terms)

    def _all_terms(self, outputs: Tensor) -> Sequence[Tensor | Pull]:
        return [check_term(m, m.loss(self, outputs), outputs) for m in self._round.terms]
