"""The clients' optimisers as they are written down: their parameters. Importing this does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.parameters import check_parameters, choice, number
from ..errors import FedflatError


@dataclass(frozen=True)
class LocalSGD:
    """The clients' optimiser: SGD, its momentum started anew every round.

    `K_i = epochs * ceil(n_i / batch_size)` steps, the last partial batch kept; or exactly `steps` steps.
    `batch_size=None` is the full batch, so that `epochs=3` is then three steps.
    """

    lr: float = number(default=0.1, above=0, help="learning rate")
    momentum: float = number(default=0.0, at_least=0, below=1, help="of SGD, anew every round")
    weight_decay: float = number(default=0.0, at_least=0, help="factor on the weights, added to the gradient")
    epochs: int | None = number(
        default=None,
        at_least=1,
        optional=True,
        whole=True,
        help="over the client's samples, every round",
    )
    batch_size: int | None = number(
        default=50, at_least=1, optional="full", whole=True, help="samples of a local step, or full"
    )
    steps: int | None = number(default=None, at_least=1, optional=True, whole=True, help="instead of epochs")
    lr_decay: float = number(default=1.0, above=0, at_most=1, help="factor on lr every round")
    """the learning rate of round t is `lr * lr_decay**t`"""
    clip_norm: float | None = number(
        default=None, above=0, optional=True, help="clip the local direction or gradient to this norm"
    )
    clip_stage: str = choice(
        "direction",
        "gradient",
        default="direction",
        help="clip the corrected direction, or the raw gradient before any correction",
    )

    def __post_init__(self) -> None:
        check_parameters(self, "LocalSGD")
        if self.epochs is not None and self.steps is not None:
            raise FedflatError("LocalSGD: give epochs or steps, not both.")
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 1)

    def lr_in(self, round: int) -> float:
        """`η_t`."""
        return self.lr * self.lr_decay**round

    def steps_for(self, samples: int) -> int:
        """`K_i`."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * math.ceil(samples / (self.batch_size or samples))


OPTIMISERS: dict[str, type[LocalSGD]] = {"sgd": LocalSGD}
"""By the name that files have for them; the fields of all are keys of `local`."""


@dataclass(frozen=True)
class OptimiserChoice:
    """Which optimiser clients have."""

    optimiser: str = choice(*OPTIMISERS, default="sgd", help="the clients' optimiser")
