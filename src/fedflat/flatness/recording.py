"""Measures that a run takes of itself while it goes on, each every so many rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..data.federation import Federation
from ..errors import FedflatError, nearest
from ..evaluation import LossFunction
from ..flat import FlatModel
from ..messages import Upload
from ..server import Server
from . import MEASURES
from .client_sharpness import ClientSharpness
from .discrepancy import Discrepancy
from .distance import FlatnessDistance
from .measure import Measure
from .sharpness import sharpness
from .update_sums import UpdateSums

FREE = ("distance", "drift")
"""From the uploads alone, without a pass over data."""
FROM_UPLOADS = (*FREE, "discrepancy")
"""Of the round that happens anyway; every other measure is taken of the global model after it."""
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
        """The name under which its numbers are recorded."""
        return self.measure.name if self.part == "train" else f"{self.measure.name} ({self.part})"

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
        return ["rho"] if "rho" in measure.defaults else []
    own = ("at", "loss", "clients")
    return [name for name in measure.defaults if name not in own]


class Recording:
    """Takes the wanted measures of a run: `open` before a round, `receive` with every upload, `finish` after it."""

    def __init__(
        self,
        given: Sequence[str | Mapping[str, Any]],
        model: FlatModel,
        federation: Federation,
        loss: LossFunction,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self._wanted = wanted(given)
        for one in self._wanted:
            one.measure.require()
        self._model, self._federation, self._loss = model, federation, loss
        self._announce = announce or (lambda _: None)
        self._own: FlatModel | None = None
        self.seconds = 0.0
        """of this round, spent on passes for measures between uploads"""
        if federation.test is None and (lost := [one for one in self._wanted if one.part == "test"]):
            raise FedflatError(
                f"measure {lost[0].label}: the federation '{federation.name}' has no test set."
            )

    def open(self, server: Server, index: int, last: bool) -> None:
        """Begin a round: `server` has opened it."""
        self._due = [one for one in self._wanted if one.due(index, last)]
        names = [one.measure.name for one in self._due]
        self._sums = UpdateSums() if any(name in FREE for name in names) else None
        self._local = _LocalSharpness() if "discrepancy" in names else None
        self._start, self._start_buffers = server.start, server.buffers
        self.seconds = 0.0

    def receive(self, upload: Upload) -> None:
        """Take from an accepted upload what is needed of it; it is not kept."""
        if self._sums is not None:
            self._sums.add(upload.update)
        if self._local is not None:
            began = time.perf_counter()
            buffers = self._start_buffers if upload.buffers is None else upload.buffers
            model = self._at(self._start + upload.update, buffers)
            data = self._federation.client(upload.client)
            rho = self._settings_of("discrepancy").get("rho", MEASURES["discrepancy"].defaults["rho"])
            self._local.add(upload.client, sharpness(model, data, rho, loss=self._loss), upload.samples)
            self.seconds += time.perf_counter() - began

    def finish(self, server: Server) -> dict[str, float | None]:
        """The numbers of the round, which is closed; none of what needs uploads if there were none."""
        numbers: dict[str, float | None] = {}
        for one in self._due:
            if one.measure.name in FROM_UPLOADS and not server.accepted:
                continue
            if one.measure.name not in FREE:
                self._announce(one.label)
            numbers |= one.measure.numbers(self._take(one, server), one.label)
        if self._due:
            self._announce("")
        return numbers

    def _take(self, one: Wanted, server: Server) -> Any:
        name = one.measure.name
        if name == "distance":
            assert self._sums is not None
            distances = [self._sums.distance(self._start, w) for w in (server.w, server.average)]
            return FlatnessDistance(*distances)
        if name == "drift":
            assert self._sums is not None
            return self._sums.drift()
        if name == "discrepancy":
            assert self._local is not None
            model = self._at(self._start, self._start_buffers)
            whole = sharpness(model, self._federation, loss=self._loss, **one.settings)
            each = self._local.result()
            return Discrepancy(abs(whole - each.mean), whole, each)
        model = self._at(server.w, server.buffers)
        return one.measure(model, self._federation, one.part, one.samples, loss=self._loss, **one.settings)

    def _settings_of(self, name: str) -> dict[str, Any]:
        return next(one.settings for one in self._due if one.measure.name == name)

    def _at(self, w: Tensor, buffers: Tensor | None) -> FlatModel:
        """A model of the recording's own, at some weights: that of the training is left alone."""
        if self._own is None:
            self._own = self._model.copy(self._model.vector.device)
        with torch.no_grad():
            self._own.vector.copy_(w)
        self._own.write_buffers(buffers)
        return self._own


class _LocalSharpness:
    """Sharpness of the local models of a round, as they come."""

    def __init__(self) -> None:
        self._clients: list[int] = []
        self._values: list[float] = []
        self._samples: list[int] = []

    def add(self, client: int, value: float, samples: int) -> None:
        self._clients.append(client)
        self._values.append(value)
        self._samples.append(samples)

    def result(self) -> ClientSharpness:
        return ClientSharpness.of(self._clients, self._values, self._samples)
