"""A run on disk: it explains itself, survives a crash at any byte, and can be resumed.

    experiment.yaml         the experiment, complete, where there is one
    run.json                settings, environment, when it began and ended
    preprocessing.json      how raw samples became the model's inputs, and what classes and clients are called
    metrics.jsonl           one line per round
    clients.jsonl           one line per client in some rounds, with clients_every
    checkpoints/            the server after the last rounds, the latest two
    state/                  client states after those rounds; sweeps remove both when a run is done
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
from .formats import RUN, OtherFormat
from .lock import Lock
from .metrics_file import read_metrics
from .run_files import (
    LAST_FINITE,
    difference,
    is_begun,
    read_settings,
    shortened,
)

PAUSE = 5.0
"""The fewest seconds between two checkpoints, unless `checkpoint_every` is given."""
SHARE = 60
"""The time between two checkpoints, in times that one checkpoint takes: 1.7 % of the run."""
EXACT = ("torch", "cpu")
"""Entries of the environment that the last digits of numbers depend on."""

MAY_CHANGE = (
    *("rounds", "how", "notes", "convolutions", "on_bad_upload", "on_divergence", "measure"),
    *("metrics", "monitor", "monitored", "clients_every"),
)
"""Settings that may differ when a run is resumed; the ways to convolve are kept, as far as the device has them."""


NOTICED = {
    "federation.fingerprint": "the data is not what it was",
    "module.layers": "the model's layers are not what they were",
    "module.code": "the code of the model's classes is not what it was",
    "module.frozen": "the parameters that are not trained are not what they were",
    "mechanism_code": "the code of a mechanism is not what it was",
    "loss.code": "the code of the loss is not what it was",
}
"""The meaning of a digest that differs when a run is resumed."""


class RunDirectory:
    """The directory that a run writes to; with `resume=True`, the run in it is resumed, if there is one.

    `settings` describe the run. To resume, they must be equal, except for `rounds`, the entries below `"how"`, which
    do not change the numbers, and `"convolutions"`, which `train` keeps. `"notes"`, what to know before comparing the
    run, are added to the earlier ones.
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
        """keep what resuming needs when the run is done, which can be far larger than the rest"""
        self.notices: list[str] = []
        """what a person should know about the resumed run"""
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
                f"{self.path} already holds a run. Resume it ({self._command()}), choose another directory, or "
                "remove this one."
            )
        before = read_settings(self.path, to_resume=True) if begun else {}
        self._check_same(before)
        if "finished" in before and not self._checkpoints():
            raise FedflatError(
                f"{self.path} is finished, and what resuming it needs was removed, as sweeps do unless they are "
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
        """Keep what the run began with; where the data has changed since, a person should know."""
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
                f"{file} describes other data than this run is resumed with: {shortened(found)}. The file is left "
                "as it is; if the data was changed, start anew in another directory."
            )

    def _command(self) -> str:
        """Return the command that resumes the run."""
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

    # -- resuming ----------------------------------------------------------------------------------

    def open_state(
        self, server: Server, budget: int | None, device: torch.device | str
    ) -> tuple[ClientStore, list[dict[str, Any]]]:
        """Restore the server from the last sound checkpoint; return the clients' store and the rows until then."""
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
            self.log(f"resumed after round {done}")
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
        """Cut the file to the first `done` rounds, and return their rows."""
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
        """Append the row of one round to the metrics."""
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
        """Save the run as it is after `done` rounds, and keep the checkpoint before."""
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
        """Add to an error of writing that earlier checkpoints are intact, and how to resume."""
        try:
            yield
        except FedflatError as problem:
            kept = "Earlier checkpoints are intact" if self._before else "There is no checkpoint yet"
            raise FedflatError(f"{problem} {kept}: make room, then {self._command()}.") from problem

    def diverge(self, module: nn.Module, sentence: str) -> Path:
        """Write the last finite model of a run that ends without a trained one, and return its path."""
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
        """Note a sentence that a person should read, and log it."""
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


def _weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.contiguous().clone() for name, value in module.state_dict().items()}


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(_finite(row), allow_nan=False) + "\n").encode()


def _json(value: Any) -> bytes:
    return (json.dumps(_finite(value), indent=2) + "\n").encode()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by None: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
