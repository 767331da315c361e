"""A round's model is tested while the next round trains, and nothing else changes."""

import os
import signal

import pytest
import torch
from tiny import Slow, network, same, train
from torch import nn

import fedflat as ff
from fedflat.engines.workers.engine import Workers


@pytest.fixture
def meanwhile(monkeypatch) -> list[range]:
    """The shares of tests that were handed out while clients were at work."""
    found: list[range] = []
    plain = Workers._let_test

    def watched(self, worker):
        busy = [w for w in self._workers if isinstance(w.task, int)]
        plain(self, worker)
        if busy and worker.task is not None:
            found.append(worker.task)

    monkeypatch.setattr(Workers, "_let_test", watched)
    return found


@pytest.mark.parametrize("eval_every", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_same_run_as_without(count, eval_every, meanwhile):
    options = {"eval_every": eval_every, "participation": 2, "module": Slow()}
    apart = train("scaffold", ff.Workers(count), overlap=False, **options)
    assert not meanwhile
    together = train("scaffold", ff.Workers(count), overlap=True, **options)
    assert bool(meanwhile) is (count > 1), "a worker without a client tests"
    same(together, apart)
    same(together, train("scaffold", "inprocess", overlap=True, **options))


def test_the_average_and_statistics_are_tested_as_they_were():
    options = {"evaluate": "average", "module": network(norm=True), "participation": 2}
    apart = train("fedavgm", ff.Workers(3), overlap=False, **options)
    same(train("fedavgm", ff.Workers(3), overlap=True, **options), apart)


def test_by_default_where_nobody_looks_on(meanwhile):
    train("fedavg", ff.Workers(3), participation=2, module=Slow(), on_round=lambda round: None)
    train("fedavg", ff.Workers(3), participation=2, module=Slow(), stop=lambda: False)
    assert not meanwhile
    train("fedavg", ff.Workers(3), participation=2, module=Slow())
    assert meanwhile


def test_rounds_are_told_of_in_order_and_only_once():
    seen: list[tuple[int, float | None]] = []
    run = train("fedavg", ff.Workers(3), overlap=True, on_round=lambda r: seen.append((r.index, r.accuracy)))
    assert seen == [(row["index"], row["accuracy"]) for row in run.history]
    assert [index for index, _ in seen] == list(range(5)) and all(accuracy for _, accuracy in seen)


class FailsInRound2(ff.Mechanism):
    def begin(self, local) -> None:
        if local.round == 2:
            raise ff.FedflatError("enough")


def test_a_round_is_told_of_when_the_next_one_fails(tmp_path):
    seen: list[tuple[int, bool]] = []
    note = {"on_round": lambda r: seen.append((r.index, r.accuracy is not None)), "out": tmp_path / "run"}
    with pytest.raises(ff.FedflatError, match="enough"):
        train([FailsInRound2()], ff.Workers(2), overlap=True, **note)
    assert seen == [(0, True), (1, False)]
    assert len(ff.read_metrics(tmp_path / "run")) == 2


@pytest.mark.parametrize("every", [1, 2, 3])
def test_stopped_and_gone_on_with(every, tmp_path):
    whole = train("scaffold", "inprocess")
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked >= 3

    options = {"out": tmp_path / "run", "checkpoint_every": every, "overlap": True}
    part = train("scaffold", ff.Workers(2), stop=stop, **options)
    assert 0 < len(part.history) < 5
    same(train("scaffold", ff.Workers(2), resume=True, **options), whole)


class DiesOnce(nn.Module):
    """Takes its process down the first time that it is tested elsewhere."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.inner, self.home, self.mark = network(), os.getpid(), mark

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and os.getpid() != self.home and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(x)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_worker_that_dies_while_it_tests_changes_nothing(overlap, tmp_path):
    (tmp_path / "before").touch()
    expected = train("fedavg", "inprocess", module=DiesOnce(str(tmp_path / "before")))
    run = train("fedavg", ff.Workers(3), module=DiesOnce(str(tmp_path / "died")), overlap=overlap)
    assert (tmp_path / "died").exists()
    same(run, expected)
