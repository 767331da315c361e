"""The loss at many points of weights, by several processes; kept in a file, a large grid can be resumed."""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.vector_memory import memory
from ..engines.workers.parent import end_with_parent
from ..errors import explained
from .surface import Surface


class Point(NamedTuple):
    """A place on a line or plane, and what it belongs to."""

    group: str
    coordinates: tuple[float, ...]


def losses_at(
    surface: Surface,
    origin: Tensor,
    basis: Sequence[Tensor],
    points: Sequence[Point],
    jobs: int = 1,
    keep: str | Path | None = None,
) -> list[float]:
    """`L(origin + Σ cᵢ basisᵢ)` for every point's coordinates c."""
    book = _Book(None if keep is None else Path(keep), _fingerprint(surface, origin, basis))
    missing = [point for point in points if point not in book.known]
    chart = (surface, origin, list(basis))
    if jobs <= 1 or len(missing) < 2:
        for point in missing:
            book.note(point, _loss(chart, point.coordinates))
    else:
        context: Any = torch.multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        with context.Pool(jobs, _prepare, (chart,)) as pool:
            answers = pool.imap(_loss_here, [point.coordinates for point in missing], chunksize=1)
            for point, loss in zip(missing, answers, strict=True):
                book.note(point, loss)
    return [book.known[point] for point in points]


Chart = tuple[Surface, Tensor, list[Tensor]]
_chart: Chart | None = None


def _prepare(chart: Chart) -> None:
    """In every process: one thread, and what all points have in common."""
    global _chart
    end_with_parent()
    torch.set_num_threads(1)
    _chart = chart


def _loss_here(coordinates: tuple[float, ...]) -> float:
    assert _chart is not None
    return _loss(_chart, coordinates)


def _loss(chart: Chart, coordinates: tuple[float, ...]) -> float:
    surface, origin, basis = chart
    w = origin.clone()
    for coordinate, direction in zip(coordinates, basis, strict=True):
        w.add_(direction, alpha=coordinate)
    return surface.value(w)


def _fingerprint(surface: Surface, origin: Tensor, basis: Sequence[Tensor]) -> str:
    """Changes with the place, the directions and the number of samples."""
    sums = [zlib.crc32(memory(vector)) for vector in (origin, *basis)]
    return hashlib.blake2b(json.dumps([*sums, len(surface.data)]).encode(), digest_size=8).hexdigest()


class _Book:
    """What is known already, in a file of one JSON line per point; nowhere without one."""

    def __init__(self, path: Path | None, mark: str) -> None:
        self._path, self._mark = path, mark
        self.known: dict[Point, float] = {}
        self._torn = False
        """whether the file ends within a line"""
        if path is None or not path.exists():
            return
        with explained(f"{path} cannot be read"):
            text = path.read_text()
        self._torn = not text.endswith("\n")
        for line in text.splitlines():
            try:
                mark, group, coordinates, loss = json.loads(line)
            except ValueError:  # cut off by a crash: that point is computed again
                continue
            if mark == self._mark:
                self.known[Point(group, tuple(coordinates))] = float("nan") if loss is None else loss

    def note(self, point: Point, loss: float) -> None:
        self.known[point] = loss
        if self._path is not None:
            line = json.dumps([self._mark, point.group, point.coordinates, loss if loss == loss else None])
            with explained(f"{self._path} cannot be written"), self._path.open("a") as file:
                file.write("\n" * self._torn + line + "\n")
            self._torn = False
