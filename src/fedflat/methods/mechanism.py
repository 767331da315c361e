"""What a mechanism is: one idea of federated optimisation, its client half beside its server half.

A mechanism is a small frozen dataclass. It overrides only the hooks it needs; they follow the life of a round:

    check_task    refuse what the mechanism is not defined for      (once)
    server_state  what the server keeps, with initial values        (once)
    start         where the clients start, if not at w              (server)
    send          what only this one client receives                (server, per client)
    begin         prepare the local round                           (client)
    steady_shift  move the point where gradients are taken, in every step alike (client, once)
    shift         move it in any other way                          (client, per step)
    loss          a term added to the loss, or its gradient         (client, per gradient)
    correction    correct the descent direction, in every step alike (client, once)
    direction     correct it in any other way                       (client, per step)
    end           update what the client keeps, name what it uploads (client)
    leave         change what leaves the client, after all the rest (client)
    receive       look at one accepted upload, in client order      (server, per client)
    combine       transform the aggregated update                   (server)
    finish        refresh references and scalars for the next round (server)
    deliver       which vector is tested, measured and saved        (server)

Its `contract` says what moves because of it and what it costs; `Method` checks contracts when it is built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, dataclass_transform

from torch import Tensor

from ..core.flat import Scalar
from ..core.parameters import check_parameters, choice, number
from ..core.pull import Pull
from ..errors import FedflatError
from .checks import check_class, refuse_change

if TYPE_CHECKING:
    from ..client.local import Local
    from ..client.step import Step
    from ..core.messages import Upload
    from ..server.server import Server

Move = tuple[Tensor, Scalar]
"""A vector and its scale."""
Value = Tensor | float
"""What state is made of: a vector (or None while it does not exist yet) or a number."""


@dataclass(frozen=True)
class Correction:
    """`d ← scale·d + pull·w + Σ weight·vector`, with the same numbers and vectors in every step of a round.

    All corrections of a method are folded into one before the first step: one sweep over memory per step.
    """

    scale: float = 1.0
    pull: float = 0.0
    vectors: tuple[tuple[Tensor, float], ...] = ()

    def then(self, other: Correction) -> Correction:
        """Itself and then another, as one."""
        scaled = tuple((vector, weight * other.scale) for vector, weight in self.vectors)
        return Correction(
            self.scale * other.scale, self.pull * other.scale + other.pull, (*scaled, *other.vectors)
        )

    def apply(self, d: Tensor, w: Tensor) -> None:
        """Correct a direction in place."""
        if self.scale != 1.0:
            d.mul_(self.scale)
        if self.pull:
            d.add_(w, alpha=self.pull)
        for vector, weight in self.vectors:
            d.add_(vector, alpha=weight)


@dataclass(frozen=True)
class Noise:
    """What a mechanism's `leave` does to every vector that leaves a client: `v min(1, C/‖v‖) + N(0, σ²C²)`."""

    clip: float
    """`C` of the update"""
    noise: float
    """the multiplier σ"""
    clip_extra: float | None = None
    """`C` of the vectors beside it, if that is another"""


STAGES = {
    "shift": ("extrapolate", "ascend"),
    "direction": ("mix", "blend", "correct", "pull"),
    "combine": ("correct", "momentum", "scale"),
}
"""The order of mechanisms that do not commute: along a method's list, a phase's stages come in this order."""


@dataclass(frozen=True)
class Contract:
    """What a mechanism keeps, moves, needs and costs, beyond the model and its update."""

    client: tuple[str, ...] = ()
    """vectors kept per client, by the client"""
    server_per_client: tuple[str, ...] = ()
    """vectors kept per client, by the server"""
    down: tuple[str, ...] = ()
    """names of server state that every client receives"""
    each: tuple[str, ...] = ()
    """vectors made by `send` for one client at a time"""
    up: tuple[str, ...] = ()
    """vectors that `end` uploads beside the update"""
    reads: tuple[str, ...] = ()
    """names of server state or of sent vectors that another mechanism must provide"""
    forward: int = 0
    """forward passes added to every local step"""
    backward: int = 0
    """backward passes added to every local step"""
    mean_gradient: bool = False
    """whether updates are divided by `Σ_k η_k`, which makes a mean gradient of them where clients train by SGD"""
    noise: Noise | None = None
    """on everything that leaves a client, if its `leave` adds any"""
    stage: Mapping[str, str] = field(default_factory=dict)
    """where it stands in a phase, such as {"shift": "ascend"}: see `STAGES`"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, str):
                raise FedflatError(f"Contract: write {name}=({value!r},), a tuple of names, not {value!r}.")
        for phase, stage in self.stage.items():
            if stage not in STAGES.get(phase, ()):
                known = "; ".join(f"{name}: {', '.join(stages)}" for name, stages in STAGES.items())
                raise FedflatError(f"Contract: there is no stage {stage!r} of {phase!r}. There are {known}.")


registry: dict[str, type[Mechanism]] = {}
"""Every mechanism by the name it has in a composition, such as `local-ascent`."""


@dataclass_transform(frozen_default=True, field_specifiers=(number, choice))
class Mechanism:
    """One idea. Subclasses become frozen dataclasses and get a name: `LocalAscent` is `local-ascent`."""

    name: ClassVar[str] = "mechanism"

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()
        ours = registry[cls.name].__module__ if cls.name in registry else ""
        if ours.startswith(f"{__package__}.") and not cls.__module__.startswith(f"{__package__}."):
            raise FedflatError(
                f"fedflat has a mechanism {cls.name} already; call {cls.__name__} something else."
            )
        check_class(cls, Mechanism)
        dataclass(frozen=True)(cls)
        cls.__setattr__ = refuse_change  # type: ignore[method-assign]
        registry[cls.name] = cls

    def __post_init__(self) -> None:
        check_parameters(self, self.name)

    def contract(self) -> Contract:
        """What it keeps, moves, needs and costs."""
        return Contract()

    # -- hooks, in the order of a round ------------------------------------------------------------

    def check_task(self, task: str, outputs: Tensor) -> None:
        """Refuse a task that the mechanism is not defined for; `outputs` are the model's for one sample."""

    def server_state(self, w: Tensor) -> Mapping[str, Value | None]:
        """Name what the server keeps, with initial values; None is "nothing yet"."""
        return {}

    def start(self, server: Server, w: Tensor) -> Tensor:
        """Where clients start this round; updates, proximal terms and duals are relative to it."""
        return w

    def send(self, server: Server, client: int) -> Mapping[str, Tensor]:
        """Vectors that only this client receives."""
        return {}

    def begin(self, local: Local) -> None:
        """Prepare the client's round."""

    def steady_shift(self, local: Local) -> Move | None:
        """How the point is moved in every step of this round; None if not at all, or if `shift` does it."""
        return None

    def shift(self, step: Step) -> None:
        """Move the point where the gradient is taken, with `step.move`."""

    def loss(self, step: Step, outputs: Tensor) -> Tensor | Pull:
        """A term added to the loss, from the model's outputs on the step's batch; or its gradient as a `Pull`."""
        return outputs.new_zeros(())

    def correction(self, local: Local) -> Correction | None:
        """How the descent direction is corrected in every step of this round; None if `direction` does it."""
        return None

    def direction(self, step: Step, d: Tensor) -> None:
        """Correct the descent direction `d` in place."""

    def end(self, local: Local) -> Mapping[str, Tensor]:
        """Update `local.state`; return the named vectors to upload beside the update."""
        return {}

    def leave(self, local: Local, upload: Upload) -> None:
        """Change, in place, what is about to leave the client."""

    def receive(self, server: Server, upload: Upload) -> None:
        """Look at one accepted upload, in client order; keep sums (`server.add`), never the upload."""

    def combine(self, server: Server, update: Tensor) -> Tensor:
        """Transform the aggregated update (in place or into another vector)."""
        return update

    def finish(self, server: Server) -> None:
        """Refresh references and scalars; `server.w` is the new model, `server.step` what led to it."""

    def deliver(self, server: Server) -> Tensor:
        """Name the vector that is tested, measured and saved."""
        return server.w


def overrides(mechanism: Mechanism, hook: str) -> bool:
    """Whether a mechanism has its own version of a hook."""
    return getattr(type(mechanism), hook) is not getattr(Mechanism, hook)
