"""What a measure is to an experiment file: a name, a function, its settings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import FedflatError, nearest, require
from .estimate import Estimate

if TYPE_CHECKING:
    from torch import nn

    from ..core.flat import FlatModel
    from ..data.federation import Federation, Shard


@dataclass(frozen=True)
class Measure:
    """A measure by name; its function, and with it torch, is imported when it is first needed."""

    name: str
    description: str
    home: str
    """`module.function` in this package"""
    federated: bool = False
    """whether it needs to know which samples are whose"""
    needs: tuple[str, str] | None = None
    """a package that does not come with fedflat, and the extra that brings it"""

    def require(self) -> None:
        """An error if what it needs is not installed."""
        if self.needs is not None:
            package, extra = self.needs
            require(package, package, extra, f"The measure {self.name}")

    @property
    def function(self) -> Callable[..., Any]:
        """The function, such as `fedflat.sharpness`."""
        module, _, function = self.home.rpartition(".")
        found: Callable[..., Any] = getattr(import_module(f".{module}", __package__), function)
        return found

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings and their default values."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}

    def __call__(
        self,
        model: nn.Module | FlatModel,
        data: Federation | Shard,
        part: str = "train",
        samples: int | None = None,
        **settings: Any,
    ) -> Any:
        """Take the measure on the `train` or the `test` part of a federation, on at most `samples` of it."""
        known = self.defaults
        unknown = [setting for setting in settings if setting not in known]
        if unknown:
            raise FedflatError(f"{self.name} has no setting '{unknown[0]}'.{nearest(unknown[0], known)}")
        return self.function(model, self._choose(data, part, samples), **settings)

    def _choose(self, data: Federation | Shard, part: str, samples: int | None) -> Federation | Shard:
        from ..data.federation import Federation

        if part not in ("train", "test"):
            raise FedflatError(f"part='{part}' is not possible.{nearest(part, ('train', 'test'))}")
        if self.federated:
            if not isinstance(data, Federation) or part == "test" or samples is not None:
                raise FedflatError(
                    f"{self.name} looks at clients: give a federation, not a part of its samples."
                )
            return data
        if isinstance(data, Federation) and part == "test":
            if data.test is None:
                raise FedflatError(f"{self.name}: the federation '{data.name}' has no test set.")
            data = data.test
        if samples is None:
            return data
        if samples < 1:
            raise FedflatError(f"samples={samples}: give at least 1.")
        return (data.union() if isinstance(data, Federation) else data).thinned(samples)

    def numbers(self, result: Any, label: str | None = None) -> dict[str, float | None]:
        """What of a result to follow over the rounds: the first under the measure's own name or label, no lists.

        >>> MEASURES["trace"].numbers(Estimate(3.0, 2.5, 3.5, draws=10))
        {'trace': 3.0, 'trace low': 2.5, 'trace high': 3.5}
        """
        return dict(_numbers(label or self.name, result))


def _numbers(name: str, result: Any) -> list[tuple[str, float | None]]:
    if result is None or isinstance(result, float):
        return [(name, result)]
    if isinstance(result, Estimate):
        return [(name, result.value), (f"{name} low", result.low), (f"{name} high", result.high)]
    if hasattr(result, "numbers"):  # a curve, which says at which places to look
        return [(f"{name} {place}", value) for place, value in result.numbers().items()]
    if not dataclasses.is_dataclass(result):
        return []
    parts = [field.name for field in dataclasses.fields(result)]
    labels = [name, *(f"{name} {part.replace('_', ' ')}" for part in parts[1:])]
    pairs = zip(labels, parts, strict=True)
    return [number for label, part in pairs for number in _numbers(label, getattr(result, part))]
