"""What travels from the server to a client or back: named vectors, numbers; and how any transport packs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..errors import FedflatError

Values = Mapping[str, Tensor | float]

Parts = dict[str, dict[str, Any]]
"""A packed message: vectors and numbers by part and name. A transport only has to carry these."""

NUMBERS = (
    "client",
    "round",
    "samples",
    "steps",
    "forward",
    "backward",
    "spared_forward",
    "spared_backward",
)
"""The whole numbers of an upload."""


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


# -- packing ---------------------------------------------------------------------------------------


def pack_download(
    client: int, download: Download, state: Mapping[str, Tensor], each: Collection[str]
) -> Parts:
    """Pack what a client's round starts from.

    The part `common` is alike for all clients of a round; the vectors in `each` are every client's own.
    """
    vectors = {name: value for name, value in download.values.items() if isinstance(value, Tensor)}
    shared = {name: vector for name, vector in vectors.items() if name not in each}
    return {
        "order": {"client": client, "round": download.round, "lr": download.lr},
        "common": _vectors("start", download.start, shared, download.buffers),
        "each": {name: vector for name, vector in vectors.items() if name in each},
        "scalars": {name: float(v) for name, v in download.values.items() if name not in vectors},
        "state": dict(state),
    }


def unpack_download(parts: Parts) -> tuple[int, Download, dict[str, Tensor]]:
    """Unpack a client's number, what it receives, and what it has kept."""
    order, common = parts["order"], dict(parts["common"])
    start, buffers = common.pop("start"), common.pop("buffers", None)
    values = {**common, **parts.get("each", {}), **parts.get("scalars", {})}
    download = Download(order["round"], order["lr"], start, values, buffers)
    return order["client"], download, dict(parts.get("state", {}))


def pack_upload(upload: Upload) -> Parts:
    """Pack an upload; `state` and `trained` are for a simulation, and stay on the node of a real client."""
    return {
        "vectors": _vectors("update", upload.update, upload.vectors, upload.buffers),
        "numbers": {**{name: int(getattr(upload, name)) for name in NUMBERS}, "loss": float(upload.loss)},
        "report": {name: float(value) for name, value in upload.report.items()},
        "state": dict(upload.state),
        "trained": {} if upload.trained is None else {"update": upload.trained},
    }


def unpack_upload(parts: Parts, **more: Any) -> Upload:
    """Unpack an upload; `more` is what the receiver knows of it."""
    vectors = dict(parts["vectors"])
    return Upload(
        **parts["numbers"],
        update=vectors.pop("update"),
        buffers=vectors.pop("buffers", None),
        vectors=vectors,
        report=parts.get("report", {}),
        state=parts.get("state", {}),
        trained=parts.get("trained", {}).get("update"),
        **more,
    )


def pack_model(w: Tensor, buffers: Tensor | None) -> Parts:
    """Pack a model that is to be tested."""
    return {"model": {"w": w, **_buffers(buffers)}}


def convert(parts: Parts, kind: type, change: Callable[[str, Any], Any]) -> Parts:
    """The message with `change(place, value)` for every value of a kind, such as another form for every vector."""
    return {
        part: {
            name: change(f"{part} {name}", value) if isinstance(value, kind) else value
            for name, value in values.items()
        }
        for part, values in parts.items()
    }


def _buffers(buffers: Tensor | None) -> dict[str, Tensor]:
    return {} if buffers is None else {"buffers": buffers}


def _vectors(
    name: str, main: Tensor, of_method: Mapping[str, Tensor], buffers: Tensor | None
) -> dict[str, Tensor]:
    """A message's main vector, those of the method, which must not have its names, and the buffers."""
    for taken in of_method.keys() & {name, "buffers"}:
        raise FedflatError(
            f"A mechanism sends a vector named '{taken}', which messages have already: rename it."
        )
    return {name: main, **of_method, **_buffers(buffers)}
