"""Trackers get every round's numbers, without a network."""

import contextlib
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedflat.cli import main
from fedflat.errors import FedflatError, MissingExtra
from fedflat.experiments.run import run_experiment
from fedflat.experiments.schema import Experiment
from fedflat.storage.metrics_file import read_metrics
from fedflat.training.trackers import TRACKERS, Trackers

SMALL = Experiment.model_validate(
    {"clients": 6, "participation": 3, "rounds": 3, "method": "fedgf", "local": {"epochs": 1}}
)

OFFLINE = """
import os, socket

def refuse(self, address, connect=socket.socket.connect):
    if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "localhost", "::1"):
        with open(os.environ["ATTEMPTS"], "a") as file:
            print(address, file=file)
        raise OSError(101, "Network is unreachable")
    return connect(self, address)

socket.socket.connect = refuse
"""


@pytest.mark.slow
def test_every_tracker_has_every_round(tmp_path: Path):
    """A run with all of them at once, in a process that cannot reach anything."""
    (tmp_path / "sitecustomize.py").write_text(OFFLINE)
    (tmp_path / "a.yaml").write_text(json.dumps({**SMALL.to_dict(), "trackers": list(TRACKERS)}))
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MLFLOW"))
    }
    variables |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])),
        "ATTEMPTS": str(tmp_path / "attempts"),
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "hub"),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "WANDB_ERROR_REPORTING": "false",
    }
    result = subprocess.run(
        [sys.executable, "-m", "fedflat", "run", "a.yaml", "--out", "run"],
        capture_output=True, text=True, env=variables, cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "attempts").exists()
    assert "failed" not in result.stdout
    for check in (check_tensorboard, check_wandb, check_mlflow, check_trackio):
        check(tmp_path)


def accuracies(tracked: Path) -> dict[int, float]:
    return {row["index"]: row["accuracy"] for row in read_metrics(tracked / "run")}


def check_tensorboard(tracked: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked / "run" / "tensorboard"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("accuracy")}
    assert found == pytest.approx(accuracies(tracked))
    assert {"loss", "scalars.c", "client_accuracy.worst_decile"} <= set(events.Tags()["scalars"])


def records(path: Path) -> Iterator[bytes]:
    """What is in a file of wandb: records in pieces, in blocks of 32 KiB."""
    data, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if place % 32768 > 32768 - 7:
            place += 32768 - place % 32768
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def check_wandb(tracked: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (tracked / "run" / "wandb").glob("offline-run-*/*.wandb")
    found, config = {}, {}
    for data in records(path):
        record = Record.FromString(data)
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if row:
            found[record.history.step.num] = row["accuracy"]
    assert found == accuracies(tracked)
    assert config["method"] == "fedgf"


def check_mlflow(tracked: Path) -> None:
    with contextlib.closing(sqlite3.connect(tracked / "run" / "mlflow" / "mlflow.db")) as database:
        found = dict(database.execute("SELECT step, value FROM metrics WHERE key = 'accuracy'"))
        parameters = dict(database.execute("SELECT key, value FROM params"))
        assert list(database.execute("SELECT name, status FROM runs")) == [("FedGF", "FINISHED")]
    assert found == accuracies(tracked)
    assert (parameters["local.epochs"], parameters["method"]) == ("1", "fedgf")
    assert not (tracked / "mlruns").exists()


def check_trackio(tracked: Path) -> None:
    with contextlib.closing(sqlite3.connect(tracked / "trackio" / "fedflat.db")) as database:
        rows = list(database.execute("SELECT step, metrics FROM metrics"))
    assert {step: json.loads(metrics)["accuracy"] for step, metrics in rows} == accuracies(tracked)


# -- without the packages --------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_names_the_extra(name: str, monkeypatch, capsys, tmp_path: Path):
    for module in list(sys.modules):
        if module.split(".")[0] == name or module.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=rf'needs {name}, .*pip install "fedflat\[{name}\]"'):
        Trackers([name], {}, tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedflat", "run", "--trackers", name, "--rounds", "1"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert f"The tracker {name} needs" in told and len(told.splitlines()) == 1


@pytest.mark.slow
def test_a_part_of_mlflow_is_missing(monkeypatch, tmp_path: Path):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setitem(sys.modules, "alembic", None)
    with pytest.raises(MissingExtra, match=r'The tracker mlflow needs alembic, .*"fedflat\[mlflow\]"'):
        Trackers(["mlflow"], {}, tmp_path)


def test_an_unknown_tracker():
    with pytest.raises(FedflatError, match=r"There is no tracker 'wandbb'. Did you mean 'wandb'"):
        Trackers(["wandbb"], {}, None)


class Noted:
    """Writes down what it is told, and fails when asked to."""

    @staticmethod
    def require() -> None:
        pass

    def __init__(self, title: str, settings: Mapping[str, Any], out: Path | None, first: int) -> None:
        if settings["seed"] == 8:
            raise ConnectionError("no login")
        self.settings, self.rounds, self.finished = settings, dict[int, Mapping[str, float]](), 0
        self.first = first
        noted.append(self)

    def round(self, index: int, numbers: Mapping[str, float]) -> None:
        self.rounds[index] = numbers
        if index == 1 and self.settings["seed"] == 7:
            raise OSError(28, "No space left on device")

    def finish(self) -> None:
        self.finished += 1


noted: list[Noted] = []


def test_what_a_tracker_is_told(monkeypatch):
    monkeypatch.setitem(TRACKERS, "noted", Noted)
    noted.clear()
    run = run_experiment(SMALL.model_copy(update={"trackers": ["noted"]}))
    (tracker,) = noted
    assert tracker.finished == 1
    assert tracker.settings["local"]["epochs"] == 1
    for row in run.history:
        told = tracker.rounds[row["index"]]
        assert told["accuracy"] == row["accuracy"]
        assert told["scalars.c"] == row["scalars"]["c"]
        assert told["client_accuracy.mean"] == row["client_accuracy"]["mean"]
        assert not {"clients", "rejected"} & set(told)


def test_a_tracker_that_fails_does_not_end_the_run(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(TRACKERS, "noted", Noted)
    noted.clear()
    failing = SMALL.model_copy(update={"trackers": ["noted"], "seed": 7})
    with pytest.warns(
        UserWarning, match="The tracker noted failed and is left out: .*No space left on device"
    ):
        run = run_experiment(failing, tmp_path / "run")
    assert len(run.history) == 3
    assert list(noted[0].rounds) == [0, 1]
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_tracker_that_cannot_begin_does_not_end_the_run(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(TRACKERS, "noted", Noted)
    noted.clear()
    failing = SMALL.model_copy(update={"trackers": ["noted"], "seed": 8})
    with pytest.warns(UserWarning, match="The tracker noted failed and is left out: no login"):
        run = run_experiment(failing, tmp_path / "run")
    assert len(run.history) == 3
    assert not noted


def test_a_missing_package_is_told_before_anything_begins(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(TRACKERS, "noted", Noted)
    monkeypatch.setitem(sys.modules, "wandb", None)
    noted.clear()
    with pytest.raises(MissingExtra):
        run_experiment(SMALL.model_copy(update={"trackers": ["noted", "wandb"]}), tmp_path / "run")
    assert not noted
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_refused_tells_no_tracker(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(TRACKERS, "noted", Noted)
    run_experiment(SMALL, tmp_path / "run")
    noted.clear()
    with pytest.raises(FedflatError, match="already holds a run"):
        run_experiment(SMALL.model_copy(update={"trackers": ["noted"]}), tmp_path / "run")
    assert not noted


def in_two_parts(out: Path, tracker: str) -> None:
    """A run that is stopped after two of its three rounds, and gone on with after one was lost."""
    tracked = SMALL.model_copy(update={"trackers": [tracker], "checkpoint_every": 1})
    done: list[int] = []
    run_experiment(tracked, out, on_round=lambda r: done.append(r.index), stop=lambda: len(done) == 2)
    last = max((out / "checkpoints").glob("round-*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="Going back"):
        run_experiment(tracked, out, resume=True)
    assert len(read_metrics(out)) == 3


def test_a_run_that_goes_on_says_where(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(TRACKERS, "noted", Noted)
    noted.clear()
    in_two_parts(tmp_path / "run", "noted")
    assert [tracker.first for tracker in noted] == [0, 1]
    assert [list(tracker.rounds) for tracker in noted] == [[0, 1], [1, 2]]


@pytest.mark.slow
def test_tensorboard_shows_every_round_once_after_going_on(tmp_path: Path):
    in_two_parts(tmp_path / "run", "tensorboard")
    check_tensorboard(tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("accuracy")] == [0, 1, 2]


@pytest.mark.slow
def test_mlflow_goes_on_with_its_run(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    in_two_parts(tmp_path / "run", "mlflow")
    check_mlflow(tmp_path)
