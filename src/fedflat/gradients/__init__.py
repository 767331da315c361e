"""Oracles, which answer one question about a model: what its gradient is at a point."""

from __future__ import annotations

from ..core.flat import FlatModel
from .autograd import Autograd
from .base import LossFunction, Oracle
from .dense import Dense

ORACLES = ("auto", "autograd")
"""The fastest exact way for the model, or always autograd: for debugging and for proofs."""


def make_oracle(name: str, model: FlatModel, loss: LossFunction) -> Oracle:
    """Choose how a model's gradients are taken."""
    by_hand = Dense.of(model, loss) if name == "auto" else None
    return by_hand or Autograd(model, loss)
