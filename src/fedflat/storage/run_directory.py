"""A run on disk: it explains itself, survives a crash at any byte, and can be gone on with.

    experiment.yaml         the experiment, complete, where there is one
    run.json                settings, environment, when it began and ended
    preprocessing.json      how raw samples became the model's inputs, and what classes and clients are called
    metrics.jsonl           one line per round
    checkpoints/            the server after the last rounds, the latest two
    state/                  what is kept per client, as of the same rounds; sweeps remove both when a run is done
    model.safetensors       the trained model, when the run is done
    last_finite.safetensors the last model that was finite, where the run ended because the next was not
    log.txt                 what happened, with times

One process at a time writes to it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from safetensors.torch import save
from torch import nn

from ..data.on_nodes import GO_ON, ON_NODES
from ..data.preprocessing import METADATA
from ..errors import FedflatError, explained
from ..server.server import Server
from .checkpoint import check_version, read_checkpoint, write_checkpoint
from .client_store import ClientStore
from .environment import environment
from .files import replace_file, sync_directory
from .formats import RUN, OtherFormat, check_run
from .lock import Lock
from .metrics_file import read_json, read_metrics as read_metrics

PAUSE = 5.0
"""Seconds at least between two checkpoints, if nothing else is asked for."""
SHARE = 60
"""Between two checkpoints at least so many times what one takes: 1.7 % of the run."""
LAST_FINITE = "last_finite.safetensors"
EXACT = ("torch", "cpu")
"""What of the environment the last digits of numbers depend on."""

MAY_CHANGE = ("rounds", "how", "notes", "convolutions", "on_divergence")
"""Settings that need not be the same to go on; the ways to convolve are kept, as far as the device has them."""


NOTICED = {
    "federation.fingerprint": "the data is not what it was",
    "module.layers": "the model's layers are not what they were",
    "module.code": "the code of the model's classes is not what it was",
    "loss.code": "the code of the loss is not what it was",
}
"""What digests mean that are not the same when a run is gone on with."""
KINDS: dict[str, type] = {
    **dict.fromkeys(("rounds", "seed", "parameters"), int),
    **dict.fromkeys(("notes", "resumed"), list),
    **dict.fromkeys(("federation", "local", "environment", "how"), dict),
}
"""What entries of run.json must be, where they are there."""


class RunDirectory:
    """Where a run writes; with `resume=True` a run that is there already is gone on with.

    `settings` says what the run is. To go on, those must be the same, except for `rounds`, what is below `"how"`,
    which does not change the numbers, and `"convolutions"`, which `train` keeps. `"notes"`, what to know before
    comparing it, are added to those of before.
    """

    def __init__(
        self,
        path: str | Path,
        settings: dict[str, Any],
        resume: bool = False,
        checkpoint_every: int | None = None,
        experiment: Mapping[str, Any] | None = None,
        keep_states: bool = True,
        preprocessing: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        self.keep_states = keep_states
        """whether the run can be gone on with when it is done; what that takes can be far larger than the rest"""
        self.notices: list[str] = []
        """what a person should know about going on"""
        self._every = checkpoint_every
        self._cost, self._last = 0.0, time.monotonic()
        self._before: str | None = None
        """name of the last checkpoint"""
        self._metrics: IO[bytes] | None = None
        self._settings, self._experiment, self._preprocessing = settings, experiment, preprocessing
        try:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.path / "lock")
        except OSError as problem:
            raise FedflatError(
                f"Cannot write to {self.path} ({problem.strerror}). Choose another directory."
            ) from None
        if not self._lock.acquire():
            raise FedflatError(
                f"Another process is writing to {self.path}. Wait for it, or choose another directory."
            )
        try:
            self._open(resume)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, resume: bool) -> None:
        begun = is_begun(self.path)
        if begun and not resume:
            raise FedflatError(
                f"{self.path} already holds a run. Go on with it ({self._command()}), choose another directory, or "
                "remove this one."
            )
        before = read_settings(self.path, to_go_on=True) if begun else {}
        self._check_same(before)
        if "finished" in before and not self._checkpoints():
            raise FedflatError(
                f"{self.path} is finished, and what going on with it needs was removed, as sweeps do unless they are "
                "told --keep-states. To train longer, choose another directory."
            )
        for path in self._checkpoints():
            check_version(path)  # before anything is written
        with explained(f"{self.path} cannot be written"):
            for leftover in self.path.rglob(".*.unfinished"):
                leftover.unlink()
            (self.path / LAST_FINITE).unlink(missing_ok=True)
        now = environment()
        first = before.get("environment", now)
        again = [*before.get("resumed", ()), {"time": _now(), "environment": now}] if begun else []
        self._about = {
            "format": RUN,
            **self._settings,
            "notes": list(dict.fromkeys([*before.get("notes", ()), *self._settings.get("notes", ())])),
            "environment": first,
            "started": before.get("started", _now()),
            **({"resumed": again} if again else {}),
        }
        changed = [f"{key} {first[key]} then, {now[key]} now" for key in EXACT if first.get(key) != now[key]]
        replace_file(self.path / "run.json", _json(self._about))
        if self._experiment is not None:
            text = yaml.safe_dump(dict(self._experiment), sort_keys=False)
            replace_file(self.path / "experiment.yaml", text.encode())
        if self._preprocessing is not None:
            self._keep_preprocessing(self.path / "preprocessing.json", begun, _json(self._preprocessing))
        if changed and "environment" in before:
            self.notice(
                f"{self.path} began elsewhere ({'; '.join(changed)}): its numbers may differ in their last digits "
                "from those of a run that was never stopped."
            )

    def _keep_preprocessing(self, file: Path, begun: bool, content: bytes) -> None:
        """What the run began with stays: where the data gives something else by now, a person should know."""
        if not begun or not file.exists():
            replace_file(file, content)
            return
        with explained(f"{file} cannot be read"):
            text = file.read_bytes()
        if text == content:
            return
        try:
            found = difference(json.loads(text), json.loads(content))
        except ValueError:
            raise FedflatError(f"{file} is not JSON; was it edited? Put it back, or remove it.") from None
        if found is not None:
            self.notice(
                f"{file} describes other data than this run now goes on with: {_shortened(found)}. The file is left "
                "as it is; if the data was changed, start anew in another directory."
            )

    def _command(self) -> str:
        """How a person goes on with the run."""
        if self._experiment is None:
            return "train(..., resume=True)"
        return GO_ON if self._experiment.get("dataset") == ON_NODES else f"`fedflat resume {self.path}`"

    def _check_same(self, before: dict[str, Any]) -> None:
        now = json.loads(_json({k: v for k, v in self._settings.items() if k not in MAY_CHANGE}))
        found = difference(before, now)
        if found is not None:
            hint = next((f": {words}" for key, words in NOTICED.items() if found.startswith(key)), "")
            raise FedflatError(
                f"{self.path} holds a run with {found}{hint}. Choose another directory, or give the same settings."
            )

    # -- going on ----------------------------------------------------------------------------------

    def open_state(
        self, server: Server, budget: int | None, device: torch.device | str
    ) -> tuple[ClientStore, list[dict[str, Any]]]:
        """Put the server where the last sound checkpoint left it; the clients' store and the rows until then."""
        problems: list[str] = []
        for path in reversed(self._checkpoints()):
            try:
                vectors, numbers = read_checkpoint(path)
                stores = [
                    ClientStore(self.path / "state" / side, budget, device, path.stem)
                    for side in ("clients", "server")
                ]
                for store in stores:
                    store.verify()
            except OtherFormat:
                raise
            except FedflatError as problem:
                problems.append(str(problem))
                continue
            done = numbers.pop("rounds done")
            rows = self._cut_metrics(done)
            server.restore(vectors, numbers)
            clients, server.per_client = stores
            self._before = path.stem
            for sentence in problems:
                self.notice(f"{sentence} Going back to the checkpoint before it, after round {done}.")
            self.log(f"going on after round {done}")
            return clients, rows
        if problems:
            raise FedflatError(
                f"No checkpoint in {self.path} is sound. {' '.join(problems)} Remove the directory to start anew, "
                "or use another."
            )
        clients, server.per_client = (
            ClientStore(self.path / "state" / side, budget, device) for side in ("clients", "server")
        )
        with explained(f"{self.path} cannot be written"):
            sync_directory(self.path / "state")
        self._cut_metrics(0)
        self.log("started")
        return clients, []

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("round-*.safetensors"))

    def _cut_metrics(self, done: int) -> list[dict[str, Any]]:
        """The rows of the rounds before `done`, which alone stay in the file."""
        path = self.path / "metrics.jsonl"
        rows = [dict(row) for row in read_metrics(self.path)[:done]] if done else []
        if len(rows) < done:
            raise FedflatError(
                f"{path} has {len(rows)} rounds, the checkpoint {done}; lines were removed. Put them back, or start "
                "anew in another directory."
            )
        replace_file(path, b"".join(_line(row) for row in rows))
        with explained(f"{path} cannot be written"):
            self._metrics = path.open("ab", buffering=0)
        return rows

    # -- during the run ----------------------------------------------------------------------------

    def round(self, row: dict[str, Any]) -> None:
        """Append one round."""
        assert self._metrics is not None
        with self._keeping_checkpoints(), explained(f"{self.path / 'metrics.jsonl'} cannot be written"):
            line = _line(row)
            while line:
                line = line[self._metrics.write(line) :]
        for sentence in row.get("rejected", ()):
            self.log(f"left out: {sentence}")
        for sentence in row.get("clipped", ()):
            self.log(f"upload clipped: {sentence}")
        for sentence in row.get("dropped", ()):
            self.log(f"upload kept: {sentence}")

    def due(self, done: int) -> bool:
        """Whether it is time for a checkpoint."""
        if self._every is not None:
            return done % self._every == 0
        return time.monotonic() - self._last >= max(PAUSE, SHARE * self._cost)

    def checkpoint(self, server: Server, clients: ClientStore, done: int) -> None:
        """Keep everything as it is after `done` rounds, beside the checkpoint before."""
        began = time.monotonic()
        name = f"round-{done:07d}"
        place = self.path / "checkpoints"
        with self._keeping_checkpoints(), explained(f"{place} cannot be written"):
            self._sync_metrics()
            clients.checkpoint(name)
            server.per_client.checkpoint(name)
            vectors, numbers = server.snapshot()
            write_checkpoint(place / f"{name}.safetensors", vectors, {"rounds done": done, **numbers})
            for old in self._checkpoints():
                if old.stem not in (name, self._before):
                    old.unlink()
        self._before, self._last = name, time.monotonic()
        self._cost = self._last - began

    def _sync_metrics(self) -> None:
        assert self._metrics is not None
        with explained(f"{self.path / 'metrics.jsonl'} cannot be written"):
            os.fsync(self._metrics.fileno())

    @contextlib.contextmanager
    def _keeping_checkpoints(self) -> Iterator[None]:
        """What cannot be written does no harm to what has been."""
        try:
            yield
        except FedflatError as problem:
            kept = "Earlier checkpoints are intact" if self._before else "There is no checkpoint yet"
            raise FedflatError(f"{problem} {kept}: make room, then {self._command()}.") from problem

    def diverge(self, module: nn.Module, sentence: str) -> Path:
        """Write the last finite model of a run that ends without a trained one; where it is."""
        path = self.path / LAST_FINITE
        with self._keeping_checkpoints():
            self._sync_metrics()
            replace_file(path, save(_weights(module), self._metadata()))
            replace_file(self.path / "run.json", _json({**self._about, "diverged": sentence}))
            self.log(f"diverged: {sentence}")
        return path

    def finish(self, module: nn.Module) -> None:
        """Write the trained model."""
        with self._keeping_checkpoints():
            self._sync_metrics()
            replace_file(self.path / "model.safetensors", save(_weights(module), self._metadata()))
            replace_file(self.path / "run.json", _json({**self._about, "finished": _now()}))
            self.log("finished")
        if not self.keep_states:
            for name in ("checkpoints", "state"):  # states last: no checkpoint is ever without its own
                with explained(f"{self.path / name} cannot be removed"):
                    shutil.rmtree(self.path / name)

    def _metadata(self) -> dict[str, str] | None:
        """What travels with the weights: the preprocessing that the run began with, as JSON."""
        file = self.path / "preprocessing.json"
        if not file.exists():
            return None
        with (
            explained(f"{file} cannot be read"),
            contextlib.suppress(ValueError),
        ):  # an edited one stays behind
            return {METADATA: json.dumps(json.loads(file.read_bytes()), separators=(",", ":"))}
        return None

    def notice(self, sentence: str) -> None:
        """Say something that a person should know, and log it."""
        self.notices.append(sentence)
        self.log(sentence)

    def log(self, sentence: str) -> None:
        """Add a line to the log."""
        with (
            explained(f"{self.path / 'log.txt'} cannot be written"),
            (self.path / "log.txt").open("a") as file,
        ):
            file.write(f"{_now()} {sentence}\n")

    def close(self) -> None:
        """Let other processes write here."""
        if self._metrics is not None:
            self._metrics.close()
        self._lock.release()


def read_settings(path: str | Path, to_go_on: bool = False) -> dict[str, Any]:
    """What `run.json` says; an error if this version cannot read such a run, or cannot go on with it."""
    file = Path(path) / "run.json"
    if not file.exists():
        raise FedflatError(f"{path} is not a run: there is no {file.name} in it.")
    try:
        with explained(f"{file} cannot be read"):
            settings: dict[str, Any] = read_json(file.read_bytes())
    except ValueError as problem:
        if isinstance(problem, FedflatError):
            raise
        raise FedflatError(f"{file} cannot be read: {problem}.") from None
    if not isinstance(settings, dict):
        raise FedflatError(f"{file} cannot be read: it holds no settings.")
    check_run(Path(path), settings, to_go_on)
    for key, kind in KINDS.items():
        if key in settings and (not isinstance(settings[key], kind) or isinstance(settings[key], bool)):
            raise FedflatError(
                f"{file}: '{key}' cannot be {_shortened(str(settings[key]), 60)}; was it edited?"
            )
    return settings


def is_begun(path: str | Path) -> bool:
    """Whether a round was finished: a run that failed before leaves nothing that could be lost."""
    metrics = Path(path) / "metrics.jsonl"
    with explained(f"{path} cannot be read"):
        written = metrics.exists() and metrics.stat().st_size > 0
        return written or any((Path(path) / "checkpoints").glob("round-*.safetensors"))


def _weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.contiguous().clone() for name, value in module.state_dict().items()}


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(_finite(row), allow_nan=False) + "\n").encode()


def _json(value: Any) -> bytes:
    return (json.dumps(_finite(value), indent=2) + "\n").encode()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def difference(was: Any, now: Any, name: str = "") -> str | None:
    """The first thing that is not what it was; what was not noted then is not compared."""
    if isinstance(was, dict) and isinstance(now, dict):
        inner = (difference(was[key], now[key], f"{name}.{key}") for key in now if key in was)
        return next((found for found in inner if found is not None), None)
    return None if was == now else f"{name.removeprefix('.')} {was}, not {now}"


def _shortened(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."


def _finite(value: Any) -> Any:
    """NaN and infinity as null: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
