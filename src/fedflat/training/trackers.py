"""Sending metrics elsewhere while a run goes on: TensorBoard, Weights & Biases, MLflow, trackio; each an extra.

A tracker is told the settings once, then a flat row of numbers after every round, then that the run has ended. A
resumed run is resumed in its trackers: `first` is then not 0, and what a tracker has heard of that round and later
ones is out of date.
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import FedflatError, MissingExtra, nearest
from .callbacks import Callback

if TYPE_CHECKING:
    from .record import RoundRecord
    from .train import Run


class Tracker(Protocol):
    """Somewhere metrics go."""

    def __init__(self, name: str, settings: Mapping[str, Any], out: Path | None, first: int) -> None:
        """Begin, before the round `first`."""

    @staticmethod
    def require() -> None:
        """An error if a package is missing."""

    def round(self, index: int, numbers: Mapping[str, float]) -> None:
        """One round's numbers."""

    def finish(self) -> None:
        """The run has ended, or was interrupted."""


class TensorBoard:
    """Event files in the run directory; `tensorboard --logdir runs` shows them."""

    @staticmethod
    def require() -> None:
        """PyTorch's writer needs the package."""
        _require("tensorboard", "torch.utils.tensorboard", "tensorboard")

    def __init__(self, name: str, settings: Mapping[str, Any], out: Path | None, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = str((out or Path("runs") / name) / "tensorboard")
        self._writer: Any = SummaryWriter(place, purge_step=first or None)
        self._writer.add_text("settings", f"```\n{_yaml(settings)}```", first)

    def round(self, index: int, numbers: Mapping[str, float]) -> None:
        """As scalars."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, index)

    def finish(self) -> None:
        """Flush."""
        self._writer.close()


class WandB:
    """Weights & Biases; offline unless the environment says otherwise (WANDB_MODE=online)."""

    @staticmethod
    def require() -> None:
        """The package."""
        _require("wandb", "wandb")

    def __init__(self, name: str, settings: Mapping[str, Any], out: Path | None, first: int) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(
            project="fedflat",
            name=name,
            config=dict(settings),
            dir=str(out or "."),
            mode=mode,
            id=_kept(out, "wandb-id", lambda: uuid.uuid4().hex),
            resume="allow" if first and mode == "online" else None,
        )

    def round(self, index: int, numbers: Mapping[str, float]) -> None:
        """As a step."""
        self._run.log(dict(numbers), step=index)

    def finish(self) -> None:
        """Close the run."""
        self._run.finish()


class MLflow:
    """MLflow; into the run directory unless MLFLOW_TRACKING_URI says otherwise."""

    @staticmethod
    def require() -> None:
        """The package, and its database where there is no server."""
        _require(
            "mlflow", "mlflow", *(() if "MLFLOW_TRACKING_URI" in os.environ else ("sqlalchemy", "alembic"))
        )

    def __init__(self, name: str, settings: Mapping[str, Any], out: Path | None, first: int) -> None:
        import mlflow

        if "MLFLOW_TRACKING_URI" not in os.environ:
            place = ((out or Path()) / "mlflow").resolve()
            place.mkdir(parents=True, exist_ok=True)
            mlflow.set_tracking_uri(f"sqlite:///{place / 'mlflow.db'}")
        mlflow.set_experiment("fedflat")
        self._mlflow: Any = mlflow
        if first and (known := _kept(out, "mlflow-run")) is not None:
            mlflow.start_run(run_id=known)
            return
        started = mlflow.start_run(run_name=name)
        _kept(out, "mlflow-run", lambda: started.info.run_id)
        mlflow.log_params({key: str(value)[:500] for key, value in _flat(settings).items()})

    def round(self, index: int, numbers: Mapping[str, float]) -> None:
        """As metrics of a step."""
        self._mlflow.log_metrics(dict(numbers), step=index)

    def finish(self) -> None:
        """Close the run."""
        self._mlflow.end_run()


class Trackio:
    """trackio: a local database and dashboard; `trackio show` opens it."""

    @staticmethod
    def require() -> None:
        """The package."""
        _require("trackio", "trackio")

    def __init__(self, name: str, settings: Mapping[str, Any], out: Path | None, first: int) -> None:
        import trackio

        self._trackio: Any = trackio
        unique = _kept(out, "trackio-name", lambda: f"{name} {uuid.uuid4().hex[:6]}")
        trackio.init(
            project="fedflat", name=unique, config=dict(settings), resume="allow" if first else "never"
        )

    def round(self, index: int, numbers: Mapping[str, float]) -> None:
        """As a log entry."""
        self._trackio.log(dict(numbers), step=index)

    def finish(self) -> None:
        """Close the run."""
        self._trackio.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def _require(extra: str, *modules: str) -> None:
    for module in modules:
        try:
            import_module(module)
        except ImportError as problem:
            raise MissingExtra(problem.name or extra, extra, f"The tracker {extra}") from None


def _kept(out: Path | None, name: str, make: Callable[[], str] | None = None) -> str | None:
    """By what a service knows the run: kept in the run directory, so that it is the same when the run goes on."""
    place = None if out is None else out / "trackers" / name
    if place is not None and place.exists():
        return place.read_text().strip()
    made = None if make is None else make()
    if place is not None and made is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(made + "\n")
    return made


def check_trackers(names: Sequence[str]) -> None:
    """Whether there are trackers of these names."""
    for name in names:
        if name not in TRACKERS:
            raise FedflatError(f"There is no tracker '{name}'.{nearest(name, TRACKERS)}")


class Trackers(Callback):
    """Several trackers at once. One that fails is left out: the run is worth more."""

    may_lag = True

    def __init__(self, names: Sequence[str], settings: Mapping[str, Any], out: str | Path | None) -> None:
        check_trackers(names)
        for name in names:
            TRACKERS[name].require()
        self._names, self._settings = names, settings
        self._place = None if out is None else Path(out)
        self._trackers: dict[str, Tracker] = {}

    def begin(self, run: Run) -> None:
        title, first = run.method.name, len(run.history)
        for name in self._names:
            with self._left_out(name):
                self._trackers[name] = TRACKERS[name](title, self._settings, self._place, first)

    def round(self, record: RoundRecord) -> None:
        if self._trackers:
            numbers = {name: value for name, value in _flat(record.row()).items() if _is_number(value)}
            self._each(lambda tracker: tracker.round(record.index, numbers))

    def end(self, run: Run) -> None:
        self._each(lambda tracker: tracker.finish())

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._left_out(name):
                action(tracker)

    @contextmanager
    def _left_out(self, name: str) -> Iterator[None]:
        """A tracker's failure is told, and it is not asked again."""
        try:
            yield
        except Exception as problem:
            self._trackers.pop(name, None)
            warnings.warn(f"The tracker {name} failed and is left out: {problem}", stacklevel=4)


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
