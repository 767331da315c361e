"""What travels from the server to a client or back: named vectors, numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

Values = Mapping[str, Tensor | float]


def vectors_in(values: Values) -> int:
    """How many of the values are vectors."""
    return sum(isinstance(value, Tensor) for value in values.values())


def bytes_in(values: Values) -> int:
    """How many bytes the values take: vectors as they are, numbers as doubles."""
    return sum(
        value.numel() * value.element_size() if isinstance(value, Tensor) else 8 for value in values.values()
    )


@dataclass
class Download:
    """What one client receives: the point to start from and whatever the method sends beside it."""

    round: int
    lr: float
    start: Tensor
    values: Values = field(default_factory=dict)
    buffers: Tensor | None = None

    @property
    def vectors(self) -> int:
        """Model-sized vectors in it."""
        return 1 + vectors_in(self.values)

    @property
    def bytes(self) -> int:
        """Its size on the wire, without framing."""
        return bytes_in({**self.values, "start": self.start, **_buffers(self.buffers)})


@dataclass
class Upload:
    """What one client returns, and what a simulation learns beside it."""

    client: int
    round: int
    samples: int
    steps: int
    update: Tensor
    """`Δ_i = w_{i,K} − w_{i,0}`, descent-signed."""
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Tensor | None = None
    loss: float = float("nan")
    """mean training loss over the local steps, at the points where gradients were taken"""
    forward: int = 0
    backward: int = 0
    """passes over a batch that the method makes"""
    spared_forward: int = 0
    spared_backward: int = 0
    """those of them that did not have to be computed"""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """what the client keeps for its next round; committed only if the upload is accepted"""
    report: Mapping[str, float] = field(default_factory=dict)
    """what the client found of the model it received, on data of its own: accuracy, loss, samples"""
    notes: tuple[str, ...] = ()
    """sentences on what else the client sent and was left out, without the client and the round"""
    trained: Tensor | None = None
    """`Δ_i` as it was trained, where measures ask and a mechanism's `end` has changed it since: for looking at only,
    in a simulation; it does not travel"""
    borrowed: bool = False
    """its vectors lie in memory that is used again for the next upload: copy what is kept"""

    @property
    def local_update(self) -> Tensor:
        """What the client trained, as far as it is to be seen."""
        return self.update if self.trained is None else self.trained

    def numbers(self) -> dict[str, float]:
        """Everything that is no vector."""
        names = ["client", "round", "samples", "steps", "loss"]
        names += ["forward", "backward", "spared_forward", "spared_backward"]
        return {name: getattr(self, name) for name in names}

    @property
    def bytes(self) -> int:
        """Its size on the wire, without framing."""
        return bytes_in({**self.vectors, "update": self.update, **_buffers(self.buffers)})


@dataclass(frozen=True)
class Missing:
    """A client that an engine gave up waiting for: it gave no upload, and the round goes on without it."""

    client: int
    reason: str
    """a sentence, without the client and the round"""


def _buffers(buffers: Tensor | None) -> Values:
    return {} if buffers is None else {"buffers": buffers}
