"""Measures that a run takes of itself, each at its own interval of rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.evaluation import LossFunction
from ..core.flat import FlatModel
from ..core.messages import Upload
from ..data.federation import Federation
from ..errors import FedflatError, nearest
from ..server.server import Server
from ..training.callbacks import RoundObserver
from . import MEASURES
from .client_sharpness import ClientSharpness
from .discrepancy import Discrepancy, flatness_discrepancy
from .distance import FlatnessDistance
from .local_round import RunState
from .measure import Measure
from .sharpness import sharpness
from .update_sums import UpdateSums

if TYPE_CHECKING:
    from ..client.optimisers import LocalOptimiser
    from ..training.record import RoundRecord
    from ..training.train import Run

FREE = ("distance", "drift")
"""From the uploads alone, without a pass over data."""
FROM_UPLOADS = (*FREE, "discrepancy")
"""Of the round that happens anyway; every other measure is taken of the global model after it."""
OVER = ("active", "all")
"""Clients that the discrepancy may be over."""
USUALLY_EVERY = 10
"""Rounds between two measurements that cost passes over data."""


@dataclass(frozen=True)
class Wanted:
    """A measure, when to take it, on what, and with which settings."""

    measure: Measure
    every: int
    part: str = "train"
    samples: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name under which its numbers are recorded; it says what the plain measure is not of."""
        of_some = self.measure.name == "discrepancy" and not self.of_all
        kind = "active" if of_some else self.part
        return self.measure.name if kind == "train" else f"{self.measure.name} ({kind})"

    @property
    def of_all(self) -> bool:
        """Whether clients are trained for it that do not take part in the round."""
        return self.settings.get("clients") == "all"

    def due(self, index: int, last: bool) -> bool:
        """Whether it is taken in the round with this index."""
        return last or (index + 1) % self.every == 0


def wanted(given: Sequence[str | Mapping[str, Any]]) -> list[Wanted]:
    """From what an experiment says: names, or `{name: {every: 10, samples: 2000, rho: 0.05}}`."""
    found = [_one(entry) for entry in given]
    labels = [one.label for one in found]
    if len(set(labels)) < len(labels):
        raise FedflatError(f"measure has {max(labels, key=labels.count)} twice; keep one.")
    return found


def _one(entry: str | Mapping[str, Any]) -> Wanted:
    name, settings = (entry, {}) if isinstance(entry, str) else _named(entry)
    if name not in MEASURES:
        raise FedflatError(f"There is no measure '{name}'.{nearest(name, MEASURES)}")
    measure = MEASURES[name]
    every = settings.pop("every", 1 if name in FREE else USUALLY_EVERY)
    part, samples = settings.pop("part", "train"), settings.pop("samples", None)
    for key, value in (("every", every), ("samples", samples)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise FedflatError(f"{name}: {key} must be a whole number, at least 1, not {value}.")
    if part not in ("train", "test"):
        raise FedflatError(f"{name}: part '{part}' is not possible.{nearest(str(part), ('train', 'test'))}")
    if measure.federated and (part != "train" or samples is not None):
        raise FedflatError(f"{name} looks at the clients of a round: part and samples do not go with it.")
    known = _settings(measure)
    for key in settings:
        if key not in known:
            raise FedflatError(
                f"{name} has no setting '{key}'.{nearest(key, (*known, 'every', 'part', 'samples'))}"
            )
    if settings.get("clients", "active") not in OVER:
        raise FedflatError(f"{name}: clients must be active or all, not {settings['clients']}.")
    return Wanted(measure, every, part, samples, settings)


def _named(entry: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if len(entry) != 1:
        raise FedflatError("write each measure as a name or as {name: {setting: value}}.")
    ((name, settings),) = entry.items()
    if settings is not None and not isinstance(settings, Mapping):
        raise FedflatError(f"write {name}: {{setting: value}}, such as {name}: {{every: 10}}.")
    return name, dict(settings or {})


def _settings(measure: Measure) -> list[str]:
    """What may be set: numbers and words, not the things that the run itself knows."""
    if measure.name in FROM_UPLOADS:
        return ["rho", "clients"] if measure.name == "discrepancy" else []
    own = ("at", "loss", "clients")
    return [name for name in measure.defaults if name not in own]


class Recording(RoundObserver):
    """Takes the wanted measures of a run."""

    may_lag = True

    def __init__(
        self,
        given: Sequence[str | Mapping[str, Any]],
        model: FlatModel,
        federation: Federation,
        loss: LossFunction,
        sgd: LocalOptimiser,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self._wanted = wanted(given)
        for one in self._wanted:
            one.measure.require()
        self._model, self._federation, self._loss, self._sgd = model, federation, loss, sgd
        self._announce = announce or (lambda _: None)
        self._own: FlatModel | None = None
        self._initial_buffers = model.read_buffers()
        if federation.test is None and (lost := [one for one in self._wanted if one.part == "test"]):
            raise FedflatError(
                f"measure {lost[0].label}: the federation '{federation.name}' has no test set."
            )

    @property
    def from_uploads(self) -> bool:
        """Whether anything is taken of the clients' updates."""
        return any(one.measure.name in FROM_UPLOADS for one in self._wanted)

    def begin(self, run: Run) -> None:
        self._run = run

    def open(self, index: int) -> None:
        server, settings = self._run.server, self._run.settings
        self._due = [one for one in self._wanted if one.due(index, index == settings.rounds - 1)]
        self._sums = UpdateSums() if any(one.measure.name in FREE for one in self._due) else None
        self._local: _LocalSharpness | None = None
        self._of_all: Discrepancy | None = None
        self._w, self._start, self._start_buffers = server.w, server.start, server.buffers
        began, self.seconds = time.perf_counter(), 0.0
        for one in self._due:
            if one.measure.name == "discrepancy" and one.of_all:
                self._announce(one.label)
                self._of_all = flatness_discrepancy(
                    self._at(server.w, server.buffers),
                    self._federation,
                    _rho(one),
                    self._sgd,
                    seed=settings.seed,
                    loss=self._loss,
                    after=RunState(server, self._run.clients, index, settings.buffers, self._initial_buffers),
                )
                self._announce("")
                self.seconds = time.perf_counter() - began
            elif one.measure.name == "discrepancy":
                self._local = _LocalSharpness(_rho(one))

    def receive(self, upload: Upload) -> None:
        if self._sums is not None:
            self._sums.add(upload.local_update)
        if self._local is not None:
            began = time.perf_counter()
            buffers = self._start_buffers if upload.buffers is None else upload.buffers
            model = self._at(self._start + upload.local_update, buffers)
            data = self._federation.client(upload.client)
            value = sharpness(model, data, self._local.rho, loss=self._loss)
            self._local.add(upload.client, value, upload.samples)
            self.seconds += time.perf_counter() - began

    def close(self, record: RoundRecord) -> None:
        server = record.server
        for one in self._due:
            if one.measure.name in FROM_UPLOADS and not server.accepted:  # there is nothing to take it of
                continue
            if one.measure.name not in FREE:
                self._announce(one.label)
            record.measures |= one.measure.numbers(self._take(one, server), one.label)
        if self._due:
            self._announce("")

    def _take(self, one: Wanted, server: Server) -> Any:
        name = one.measure.name
        if name == "distance":
            assert self._sums is not None
            return FlatnessDistance(self._sums.distance(), self._sums.distance_to(self._start, server.w))
        if name == "drift":
            assert self._sums is not None
            return self._sums.drift()
        if name == "discrepancy" and one.of_all:
            return self._of_all
        if name == "discrepancy":
            assert self._local is not None
            model = self._at(self._w, self._start_buffers)
            whole = sharpness(model, self._federation, self._local.rho, loss=self._loss)
            each = self._local.result()
            return Discrepancy(abs(whole - each.mean), whole, each)
        model = self._at(server.delivered, server.buffers)
        return one.measure(model, self._federation, one.part, one.samples, loss=self._loss, **one.settings)

    def _at(self, w: Tensor, buffers: Tensor | None) -> FlatModel:
        """A model of the recording's own, at some weights: that of the training is left alone."""
        if self._own is None:
            self._own = self._model.copy(self._model.vector.device)
        with torch.no_grad():
            self._own.vector.copy_(w)
        self._own.write_buffers(buffers)
        return self._own


def _rho(one: Wanted) -> float:
    rho: float = one.settings.get("rho", one.measure.defaults["rho"])
    return rho


class _LocalSharpness:
    """Sharpness of the local models of a round, as they come."""

    def __init__(self, rho: float) -> None:
        self.rho = rho
        self._clients: list[int] = []
        self._values: list[float] = []
        self._samples: list[int] = []

    def add(self, client: int, value: float, samples: int) -> None:
        self._clients.append(client)
        self._values.append(value)
        self._samples.append(samples)

    def result(self) -> ClientSharpness:
        return ClientSharpness.of(self._clients, self._values, self._samples)
