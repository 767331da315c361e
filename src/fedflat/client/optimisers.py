"""The clients' optimisers: how long a client trains, at which rates, by which steps.

Importing this does not import torch: experiment files are checked against these fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ..core.parameters import check_parameters, choice, flag, number, text
from ..errors import FedflatError, nearest
from .schedules import Linear, Schedule, parse_schedule, parse_within

if TYPE_CHECKING:
    from torch import Tensor


class Rule(Protocol):
    """An optimiser's step, with the memory it keeps within a client's round."""

    def step(self, w: Tensor, d: Tensor, lr: float, index: int) -> None:
        """Take step `index` from w along −d, in place; `d` may be overwritten. Step 0 forgets the last client."""


@dataclass(frozen=True)
class LocalOptimiser:
    """What all local optimisers share.

    `K_i = epochs * ceil(n_i / batch_size)` steps, the last partial batch kept; or exactly `steps` steps.
    `batch_size=None` is the full batch, so that `epochs=3` is then three steps.
    """

    lr: float = number(default=0.1, above=0, help="learning rate")
    weight_decay: float = number(default=0.0, at_least=0, help="factor on the weights, beside the gradient")
    epochs: int | None = number(
        default=None, at_least=1, optional=True, whole=True, help="over the client's samples, every round"
    )
    batch_size: int | None = number(
        default=50, at_least=1, optional="full", whole=True, help="samples of a local step, or full"
    )
    steps: int | None = number(default=None, at_least=1, optional=True, whole=True, help="instead of epochs")
    lr_decay: float = number(default=1.0, above=0, at_most=1, help="factor on lr every round")
    schedule: str = text(
        default="constant",
        help="of lr over rounds: constant, exponential:0.998, step:200:0.1, cosine:500:0.01, warmup:10/cosine:500",
    )
    within: str = text(
        default="constant",
        help="of lr over the steps of a client's round: constant, or linear:0.1, down to that fraction",
    )
    clip_norm: float | None = number(
        default=None, above=0, optional=True, help="clip the local direction or gradient to this norm"
    )
    clip_stage: str = choice(
        "direction",
        "gradient",
        default="direction",
        help="clip the corrected direction, or the raw gradient before any correction",
    )

    name: ClassVar[str] = "optimiser"
    sums_gradients: ClassVar[bool] = False
    """whether `Δ_i = −Σ_k η_k d_k` up to momentum, so that `Δ_i / Σ_k η_k` is a mean gradient"""

    def __post_init__(self) -> None:
        check_parameters(self, type(self).__name__)
        if self.epochs is not None and self.steps is not None:
            raise FedflatError(f"{type(self).__name__}: give epochs or steps, not both.")
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 1)
        _ = self._over_rounds, self._within  # a mistake in them shows now

    @cached_property
    def _over_rounds(self) -> Schedule:
        return parse_schedule(self.schedule)

    @cached_property
    def _within(self) -> Linear | None:
        return parse_within(self.within)

    def lr_in(self, round: int) -> float:
        """`η_t`."""
        return self.lr * self.lr_decay**round * self._over_rounds.factor(round)

    def rates(self, lr: float, steps: int) -> list[float]:
        """`η_k` of every step of a client's round."""
        return [lr] * steps if self._within is None else self._within.rates(lr, steps)

    def rate_sum(self, lr: float, steps: int) -> float:
        """`Σ_k η_k` of a client's round."""
        return steps * lr if self._within is None else math.fsum(self._within.rates(lr, steps))

    def steps_for(self, samples: int) -> int:
        """`K_i`."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * math.ceil(samples / (self.batch_size or samples))

    def to_dict(self) -> dict[str, Any]:
        """Write the settings down, with the optimiser's name."""
        return {"optimiser": self.name, **asdict(self)}

    @property
    def folds(self) -> bool:
        """Whether a step is `w ← w − η (d + λ w)` and nothing else, so that corrections fold into one sweep."""
        return False

    def rule(self, like: Tensor) -> Rule:
        """Make the step, for vectors like this one."""
        raise NotImplementedError


@dataclass(frozen=True)
class LocalSGD(LocalOptimiser):
    """SGD, its momentum started anew every round: `b ← μ b + d + λ w`, `w ← w − η b`.

    With `nesterov` the step is along `d + λ w + μ b` with the new b.
    """

    momentum: float = number(default=0.0, at_least=0, below=1, help="of SGD, anew every round")
    nesterov: bool = flag(default=False, help="Nesterov's form of SGD's momentum")

    name: ClassVar[str] = "sgd"
    sums_gradients: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise FedflatError("LocalSGD: nesterov needs a momentum above 0.")

    @property
    def folds(self) -> bool:
        return not self.momentum and self.clip_norm is None

    def rule(self, like: Tensor) -> Rule:
        return _SGD(self, like)


class _SGD:
    def __init__(self, sgd: LocalSGD, like: Tensor) -> None:
        self._sgd, self._momentum = sgd, [like.new_empty(like.shape)] if sgd.momentum else None

    def step(self, w: Tensor, d: Tensor, lr: float, index: int) -> None:
        from ..core.flat import sgd_

        sgd = self._sgd
        sgd_([w], [d], self._momentum, sgd.momentum, sgd.weight_decay, lr, sgd.nesterov, first=index == 0)


@dataclass(frozen=True)
class LocalAdam(LocalOptimiser):
    """Adam, its moments started anew every round, with weight decay as part of the gradient.

    `m ← β1 m + (1−β1) d`, `v ← β2 v + (1−β2) d²`, `w ← w − η m̂ / (√v̂ + ε)` with `m̂ = m/(1−β1^k)`, `v̂ = v/(1−β2^k)`.
    """

    lr: float = number(default=0.001, above=0, help="learning rate")
    beta1: float = number(default=0.9, at_least=0, below=1, help="how much Adam keeps of its mean gradient")
    beta2: float = number(default=0.999, at_least=0, below=1, help="how much Adam keeps of its mean square")
    epsilon: float = number(default=1e-8, above=0, help="Adam's smallest divisor")

    name: ClassVar[str] = "adam"
    decoupled: ClassVar[bool] = False

    def rule(self, like: Tensor) -> Rule:
        return _Adam(self, like)


@dataclass(frozen=True)
class LocalAdamW(LocalAdam):
    """Adam with decoupled weight decay: `w ← w − η (m̂ / (√v̂ + ε) + λ w)`, the moments of d alone."""

    weight_decay: float = number(default=0.01, at_least=0, help="factor on the weights, beside the gradient")

    name: ClassVar[str] = "adamw"
    decoupled: ClassVar[bool] = True


class _Adam:
    def __init__(self, adam: LocalAdam, like: Tensor) -> None:
        self._adam = adam
        self._first, self._second = like.new_empty(like.shape), like.new_empty(like.shape)

    def step(self, w: Tensor, d: Tensor, lr: float, index: int) -> None:
        adam, first, second = self._adam, self._first, self._second
        if index == 0:
            first.zero_()
            second.zero_()
        if adam.weight_decay and not adam.decoupled:
            d.add_(w, alpha=adam.weight_decay)
        first.lerp_(d, 1.0 - adam.beta1)
        second.mul_(adam.beta2).addcmul_(d, d, value=1.0 - adam.beta2)
        correction = math.sqrt(1.0 - adam.beta2 ** (index + 1))
        length = second.sqrt().div_(correction).add_(adam.epsilon)
        along = d.copy_(first).div_(length).div_(1.0 - adam.beta1 ** (index + 1))
        if adam.weight_decay and adam.decoupled:
            along.add_(w, alpha=adam.weight_decay)
        w.add_(along, alpha=-lr)


def read_optimiser(given: Mapping[str, Any]) -> LocalOptimiser:
    """Make an optimiser from what `to_dict` wrote."""
    name, rest = given.get("optimiser", "sgd"), {k: v for k, v in given.items() if k != "optimiser"}
    if name not in OPTIMISERS:
        raise FedflatError(f"There is no optimiser '{name}'.{nearest(str(name), OPTIMISERS)}")
    return OPTIMISERS[name](**rest)


OPTIMISERS: dict[str, type[LocalOptimiser]] = {kind.name: kind for kind in (LocalSGD, LocalAdam, LocalAdamW)}
"""By the name that files have for them; the fields of all are keys of `local`."""


@dataclass(frozen=True)
class OptimiserChoice:
    """Which optimiser clients have."""

    optimiser: str = choice(*OPTIMISERS, default="sgd", help="the clients' optimiser")
