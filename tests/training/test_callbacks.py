"""Callbacks are told of a run from its beginning to its end, and may end it."""

from pathlib import Path
from typing import Any

import pytest
import tiny

import fedflat as ff
from fedflat.storage.metrics_file import read_metrics


class Noting(ff.Callback):
    """Writes down what it is told; says True after some round."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.told: list[Any] = []
        self.stop_after = stop_after

    def begin(self, run: ff.Run) -> None:
        self.run = run
        self.told.append(("begin", len(run.history), run.settings.rounds))

    def round(self, record: Any) -> bool | None:
        assert self.run.history[-1]["index"] == record.index == record.server.round
        assert self.run.server is record.server
        self.told.append(record.index)
        return True if record.index == self.stop_after else None

    def end(self, run: ff.Run) -> None:
        assert run is self.run
        self.told.append(("end", len(run.history)))


@pytest.mark.parametrize("engine", ["inprocess", "workers:2"])
def test_a_callback_is_told_in_order(engine: str):
    noting = Noting()
    run = tiny.train("fedavg", engine, rounds=3, callbacks=[noting])
    assert noting.told == [("begin", 0, 3), 0, 1, 2, ("end", 3)]
    assert noting.run is run
    tiny.same(run, tiny.train("fedavg", "inprocess", rounds=3))


@pytest.mark.parametrize("overlap", [None, True])
def test_a_callback_ends_a_run_that_can_be_resumed(overlap: bool | None, tmp_path: Path):
    first, second = Noting(stop_after=1), ff.Callback()
    part = tiny.train("scaffold", "inprocess", callbacks=[first, second], out=tmp_path, overlap=overlap)
    assert first.told == [("begin", 0, 5), 0, 1, ("end", 2)]
    assert len(part.history) == len(read_metrics(tmp_path)) == 2
    assert not (tmp_path / "model.safetensors").exists()
    again = Noting()
    whole = tiny.train("scaffold", "inprocess", callbacks=[again], out=tmp_path, resume=True)
    assert again.told == [("begin", 2, 5), 2, 3, 4, ("end", 5)]
    tiny.same(whole, tiny.train("scaffold", "inprocess"))
    assert (tmp_path / "model.safetensors").exists()


class Patient(Noting):
    """Reads the record only."""

    may_lag = True

    def round(self, record: Any) -> bool | None:
        self.told.append(record.index)
        self.accuracies = [*getattr(self, "accuracies", []), record.accuracy]
        return True if record.index == self.stop_after else None


def test_a_patient_callback_may_be_told_later_and_ends_the_run_all_the_same():
    patient = Patient(stop_after=1)
    run = tiny.train("fedavg", "workers:2", callbacks=[patient])
    plain = tiny.train("fedavg", "inprocess", rounds=len(run.history))
    assert len(run.history) in (2, 3)  # the next round may have begun
    assert patient.told == [("begin", 0, 5), *range(len(run.history)), ("end", len(run.history))]
    assert patient.accuracies == [row["accuracy"] for row in run.history]
    tiny.same(run, plain)


def test_all_are_told_of_the_round_after_which_one_ends_the_run():
    first, last, seen = Noting(stop_after=0), Noting(), []
    tiny.train(
        "fedavg", "inprocess", callbacks=[first, last], on_round=lambda record: seen.append(record.index)
    )
    assert first.told == last.told == [("begin", 0, 5), 0, ("end", 1)]
    assert seen == [0]


def test_the_end_comes_whatever_happens():
    noting = Noting()

    def fail(record: Any) -> None:
        raise KeyError(record.index)

    with pytest.raises(KeyError):
        tiny.train("fedavg", "inprocess", callbacks=[noting], on_round=fail)
    assert noting.told == [("begin", 0, 5), 0, ("end", 1)]


def test_only_what_has_begun_is_ended():
    class Failing(Noting):
        def begin(self, run: ff.Run) -> None:
            raise KeyError

    first, failing, last = Noting(), Failing(), Noting()
    with pytest.raises(KeyError):
        tiny.train("fedavg", "inprocess", callbacks=[first, failing, last])
    assert first.told == [("begin", 0, 5), ("end", 0)]
    assert failing.told == last.told == []


@pytest.mark.filterwarnings("ignore:client 0, round 0")
def test_a_diverged_run_has_its_end():
    noting = Noting()
    with pytest.raises(ff.Diverged) as problem:
        tiny.train(
            "fedavg", "inprocess", callbacks=[noting], loss=lambda outputs, _: (outputs * float("inf")).sum()
        )
    assert noting.told[-1] == ("end", len(problem.value.run.history))


def test_progress_in_a_script(capsys):
    tiny.train("fedavg", "inprocess", rounds=3, progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [["FedAvg", f"round {done}/3"] for done in (1, 2, 3)]
    assert all("accuracy" in line and "s left" in line for line in lines)
    tiny.train("fedavg", "inprocess", rounds=3)
    assert capsys.readouterr().out == ""


def test_progress_of_a_resumed_run_counts_on(capsys, tmp_path: Path):
    tiny.train("fedavg", "inprocess", rounds=1, out=tmp_path)
    tiny.train("fedavg", "inprocess", rounds=3, out=tmp_path, resume=True, progress=True)
    assert [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()] == [
        "round 2/3",
        "round 3/3",
    ]
