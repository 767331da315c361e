"""Gradients by PyTorch's autograd: of any module, any loss, on any device."""

from __future__ import annotations

from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from ..core.flat import Flat, FlatModel, Gradients, Pieces, all_dense, axpy, sgd_, write_gradients
from .base import LossFunction, Point, Pull, Terms, step_along, total_pull


class Autograd:
    """The oracle that always works."""

    def __init__(self, model: FlatModel, loss: LossFunction) -> None:
        self._model, self._loss = model, loss
        self._buffers: Tensor | None = None
        self._teacher: FlatModel | None = None
        """a module of its own, since a teacher's passes must not touch the student's"""
        self._ready = False
        """whether it has this round's buffers"""

    @cached_property
    def room(self) -> Flat:
        """Room for a gradient."""
        return self._model.layout.empty()

    def begin(self, buffers: Tensor | None) -> None:
        self._buffers, self._ready = buffers, False

    def gradient(
        self, point: Point, inputs: Tensor, targets: Tensor, terms: Terms | None
    ) -> AutogradGradient:
        model = self._model
        model.stand_on(point.flat)
        outputs = model.outputs(inputs)
        # a loss may change its outputs in place, of which terms have their own idea
        loss = total = self._loss(outputs if terms is None else outputs.clone(), targets)
        pulls: list[Pull] = []
        for term in terms(outputs) if terms is not None else ():
            if isinstance(term, Pull):
                pulls.append(term)
            else:
                total = total + term
        if pulls:
            heads, seeds = [total, outputs], [None, total_pull(pulls)]
            pieces = torch.autograd.grad(heads, model.parameters, seeds, allow_unused=True)
        else:
            pieces = torch.autograd.grad(total, model.parameters, allow_unused=True)
        return AutogradGradient(self, pieces, loss.detach())

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
        self.gradient(point, inputs, targets, terms).write(self.room)
        along = self.room.vector
        axpy(point.flat.vector, along, step_along(length, normalize, along), out=into.vector)
        return Point(into)

    def outputs(self, w: Flat, inputs: Tensor) -> Tensor:
        if self._teacher is None:
            self._teacher = self._model.copy(self._model.vector.device)
            self._teacher.module.eval()
        if not self._ready:
            self._teacher.write_buffers(self._buffers)
            self._ready = True
        self._teacher.stand_on(w)
        with torch.no_grad():
            return self._teacher.outputs(inputs)


class AutogradGradient:
    """A gradient as autograd gives it: one tensor per parameter."""

    def __init__(self, oracle: Autograd, pieces: Gradients, loss: Tensor) -> None:
        self._oracle, self._pieces, self.loss = oracle, pieces, loss

    def write(self, into: Flat) -> None:
        write_gradients(self._pieces, into.pieces)

    def add_to(self, w: Flat, scale: float, pull: float = 0.0) -> None:
        if all_dense(self._pieces):
            pieces = cast("tuple[Tensor, ...]", self._pieces)
            if not pull:
                torch._foreach_add_(w.pieces, pieces, alpha=scale)
            else:
                add_with_pull(w.pieces, self._lying_alike(w, pieces), scale, pull)
        elif pull:
            self.write(self._oracle.room)
            add_with_pull(w.pieces, self._oracle.room.pieces, scale, pull)
        else:  # of an embedding only the rows in the batch
            for view, piece in zip(w.pieces, self._pieces, strict=True):
                if piece is not None and piece.is_sparse:
                    piece = piece.coalesce()
                    view.index_add_(0, piece.indices()[0], piece.values(), alpha=scale)
                elif piece is not None:
                    view.add_(piece, alpha=scale)

    def _lying_alike(self, w: Flat, pieces: tuple[Tensor, ...]) -> list[Tensor]:
        """Gradients that lie in memory as the parameters do, which a fused update takes for granted."""
        return [
            piece if piece.stride() == view.stride() else room.copy_(piece)
            for piece, view, room in zip(pieces, w.pieces, self._oracle.room.pieces, strict=True)
        ]


def add_with_pull(w: Pieces, g: Pieces, scale: float, pull: float) -> None:
    """`w ← w + scale·(g + pull/scale·w)` in one sweep over memory."""
    if scale:
        sgd_(w, g, None, 0.0, pull / scale, -scale)
    else:
        torch._foreach_add_(w, w, alpha=pull)
