"""*The* metric of a run: what runs are compared by. Importing this does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import FedflatError


@dataclass(frozen=True)
class Monitor:
    """A metric by its name, which way is better, and how a person reads it."""

    name: str = "accuracy"
    larger_is_better: bool = True
    share: bool = True
    """whether it is a fraction, shown in per cent"""

    @classmethod
    def of_run(cls, settings: Mapping[str, Any]) -> Monitor:
        """That of a run, from what its run.json says; accuracy where it says nothing."""
        said = settings.get("monitored")
        if not isinstance(said, Mapping):
            return cls()
        name, larger, share = (said.get(key) for key in ("name", "larger_is_better", "share"))
        if not isinstance(name, str) or not isinstance(larger, bool) or not isinstance(share, bool):
            raise FedflatError(f"run.json: {dict(said)} is no metric to compare by; was it edited?")
        return cls(name, larger, share)

    def to_dict(self) -> dict[str, Any]:
        """As run.json has it."""
        return asdict(self)

    @property
    def title(self) -> str:
        """Its name in words."""
        return TITLES.get(self.name, self.name.replace("-", " ").replace("_", " "))

    def of(self, row: Mapping[str, Any]) -> float | None:
        """Its value in a round's row; None where the round was not tested, or the metric is not defined."""
        place = row if self.name in ("accuracy", "loss") else row.get("metrics") or {}
        value = place.get(self.name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def judged(self, row: Mapping[str, Any]) -> float | None:
        """The value that settings are chosen by: on the validation part, where the round was tested there."""
        return self.of(row.get("validation") or row)

    @property
    def sign(self) -> int:
        """What a value is multiplied with so that a larger one is better."""
        return 1 if self.larger_is_better else -1

    def best(self, values: Iterable[float]) -> float:
        """The best of some values."""
        return max(values) if self.larger_is_better else min(values)

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is at least as good as a target."""
        return value >= target if self.larger_is_better else value <= target

    def check_target(self, target: float | None) -> None:
        """Whether a target may be reached at all."""
        if target is not None and self.share and not 0 <= target <= 1:
            raise FedflatError(f"target={target:g}: give {self.title} as a fraction, such as 0.8.")

    def text(self, value: float, digits: int = 1) -> str:
        """A value as a person reads it: 89.8% or 0.7932."""
        return f"{value:.{digits}%}" if self.share else self.number(value)

    def number(self, value: float) -> str:
        """A value in a table whose head has the unit."""
        return f"{100 * value:.2f}" if self.share else f"{value:#.4g}".rstrip(".")

    def goal(self, target: float) -> str:
        """A target as a person gave it."""
        return f"{100 * target:g}%" if self.share else f"{target:.4g}"


TITLES = {"auroc": "AUROC", "f1": "F1", "mse": "mean squared error", "mae": "mean absolute error", "r2": "R²"}
