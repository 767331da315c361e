"""A term of the loss that knows its own gradient."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Pull(NamedTuple):
    """A term of the loss, given by its gradient `scale * vector` with respect to the model's outputs."""

    vector: Tensor
    scale: float = 1.0
