"""Sending metrics elsewhere while a run goes on: TensorBoard, Weights & Biases, MLflow, trackio; each an extra.

A tracker is told the settings once, then a flat row of numbers after every round, then that the run has ended.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from .errors import FedflatError, MissingExtra, nearest


class Tracker(Protocol):
    """Somewhere metrics go."""

    def round(self, index: int, numbers: Mapping[str, float]) -> None:
        """One round's numbers."""

    def finish(self) -> None:
        """The run has ended, or was interrupted."""


class TensorBoard:
    """Event files in the run directory; `tensorboard --logdir runs` shows them."""

    def __init__(self, name: str, settings: Mapping[str, Any], out: Path | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtra("tensorboard", "tensorboard", "The tracker tensorboard") from None
        self._writer: Any = SummaryWriter(str((out or Path("runs") / name) / "tensorboard"))
        self._writer.add_text("settings", f"```\n{_yaml(settings)}```")

    def round(self, index: int, numbers: Mapping[str, float]) -> None:
        """As scalars."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, index)

    def finish(self) -> None:
        """Flush."""
        self._writer.close()


class WandB:
    """Weights & Biases; offline unless the environment says otherwise (WANDB_MODE=online)."""

    def __init__(self, name: str, settings: Mapping[str, Any], out: Path | None) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtra("wandb", "wandb", "The tracker wandb") from None
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(
            project="fedflat", name=name, config=dict(settings), dir=str(out or "."), mode=mode
        )

    def round(self, index: int, numbers: Mapping[str, float]) -> None:
        """As a step."""
        self._run.log(dict(numbers), step=index)

    def finish(self) -> None:
        """Close the run."""
        self._run.finish()


class MLflow:
    """MLflow; into the run directory unless MLFLOW_TRACKING_URI says otherwise."""

    def __init__(self, name: str, settings: Mapping[str, Any], out: Path | None) -> None:
        here = "MLFLOW_TRACKING_URI" not in os.environ
        try:
            import mlflow

            for needed in ("sqlalchemy", "alembic") if here else ():
                import_module(needed)
        except ImportError as problem:
            raise MissingExtra(problem.name or "mlflow", "mlflow", "The tracker mlflow") from None
        if here:
            place = ((out or Path()) / "mlflow").resolve()
            place.mkdir(parents=True, exist_ok=True)
            mlflow.set_tracking_uri(f"sqlite:///{place / 'mlflow.db'}")
        mlflow.set_experiment("fedflat")
        self._mlflow: Any = mlflow
        mlflow.start_run(run_name=name)
        mlflow.log_params({key: str(value)[:500] for key, value in _flat(settings).items()})

    def round(self, index: int, numbers: Mapping[str, float]) -> None:
        """As metrics of a step."""
        self._mlflow.log_metrics(dict(numbers), step=index)

    def finish(self) -> None:
        """Close the run."""
        self._mlflow.end_run()


class Trackio:
    """trackio: a local database and dashboard; `trackio show` opens it."""

    def __init__(self, name: str, settings: Mapping[str, Any], out: Path | None) -> None:
        try:
            import trackio
        except ImportError:
            raise MissingExtra("trackio", "trackio", "The tracker trackio") from None
        self._trackio: Any = trackio
        trackio.init(project="fedflat", name=name, config=dict(settings))

    def round(self, index: int, numbers: Mapping[str, float]) -> None:
        """As a log entry."""
        self._trackio.log(dict(numbers), step=index)

    def finish(self) -> None:
        """Close the run."""
        self._trackio.finish()


TRACKERS: dict[str, Callable[[str, Mapping[str, Any], Path | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def check_trackers(names: Sequence[str]) -> None:
    """Whether there are such trackers."""
    for name in names:
        if name not in TRACKERS:
            raise FedflatError(f"There is no tracker '{name}'.{nearest(name, TRACKERS)}")


class Trackers:
    """Several trackers at once; use it as a context. One that fails is left out: the run is worth more."""

    def __init__(
        self, names: Sequence[str], title: str, settings: Mapping[str, Any], out: str | Path | None
    ) -> None:
        check_trackers(names)
        place = None if out is None else Path(out)
        self._trackers: dict[str, Tracker] = {}
        try:
            for name in names:
                self._trackers[name] = TRACKERS[name](title, settings, place)
        except BaseException:
            self._each(lambda tracker: tracker.finish())
            raise

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._each(lambda tracker: tracker.finish())

    def round(self, row: Mapping[str, Any]) -> None:
        """Tell all of them about a round."""
        if self._trackers:
            numbers = {name: value for name, value in _flat(row).items() if _is_number(value)}
            self._each(lambda tracker: tracker.round(int(row["index"]), numbers))

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            except Exception as problem:
                del self._trackers[name]
                warnings.warn(f"The tracker {name} failed and is left out: {problem}", stacklevel=2)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings with dotted names."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            result |= _flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _yaml(settings: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(settings), sort_keys=False)
