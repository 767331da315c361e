"""Several trainings in one process: in threads, within each other, and with one engine."""

import multiprocessing
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import tiny
import torch

import fedflat as ff
from fedflat.engines.inprocess import InProcess


def in_threads(*actions: Callable[[], Any]) -> list[Any]:
    """What they return, or the error that they end with, all at the same time."""
    found: list[Any] = [None] * len(actions)

    def act(number: int) -> None:
        try:
            found[number] = actions[number]()
        except ff.FedflatError as problem:
            found[number] = problem

    threads = [threading.Thread(target=act, args=(number,)) for number in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def switching() -> Any:
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_two_trainings_in_threads_have_the_bits_of_one(switching: None):
    """With dropout, which draws from the generator of the whole process."""
    torch.manual_seed(5)
    expected = [tiny.train("fedsam", "inprocess", seed=seed) for seed in (0, 1, 2)]
    state = torch.get_rng_state()
    modules = [tiny.network(dropout=True) for _ in range(3)]
    torch.set_rng_state(state)
    found = in_threads(
        *(
            lambda seed=seed: tiny.train("fedsam", "inprocess", seed=seed, module=modules[seed])
            for seed in (0, 1, 2)
        )
    )
    for run, other in zip(found, expected, strict=True):
        tiny.same(run, other)
    assert torch.get_rng_state().equal(state)  # and whoever else draws from it does not notice


def test_trainings_side_by_side_share_their_number_of_threads():
    before = torch.get_num_threads()
    told: list[Any] = []

    def beside(round: ff.RoundRecord) -> None:
        told.extend(in_threads(lambda: tiny.train("fedavg", "inprocess", rounds=1, threads=2)))
        told.extend(in_threads(lambda: tiny.train("fedavg", "inprocess", rounds=1, threads=1)))
        assert torch.get_num_threads() == 1

    tiny.train("fedavg", "inprocess", rounds=1, threads=1, on_round=beside)
    assert "Another thread of this process trains with threads=1" in str(told[0])
    assert isinstance(told[1], ff.Run)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("engine", ["inprocess", "workers:2"])
def test_a_training_within_another_one(engine: str):
    """As for choosing a setting on the way: both are what they are alone."""
    inner: list[ff.Run] = []

    def look(round: ff.RoundRecord) -> None:
        inner.append(tiny.train("fedgmt", "inprocess", rounds=2, threads=2, seed=round.index))

    outer = tiny.train("scaffold", engine, rounds=3, on_round=look)
    tiny.same(outer, tiny.train("scaffold", "inprocess", rounds=3))
    for seed, run in enumerate(inner):
        tiny.same(run, tiny.train("fedgmt", "inprocess", rounds=2, threads=2, seed=seed))


@pytest.mark.parametrize("engine", [InProcess(), ff.Workers(2)], ids=["inprocess", "workers"])
def test_an_engine_runs_one_training_at_a_time(engine: Any):
    name = type(engine).__name__
    problems: list[str] = []

    def again(round: ff.RoundRecord) -> None:
        with pytest.raises(ff.FedflatError) as caught:
            tiny.train("fedavg", engine, rounds=1)
        problems.append(str(caught.value))
        problems.extend(map(str, in_threads(lambda: tiny.train("fedavg", engine, rounds=1))))

    run = tiny.train("fedavg", engine, rounds=2, on_round=again)
    assert len(problems) == 4
    assert set(problems) == {
        f"This {name} object runs another training already. Give each its own: {name}(...), or "
        f"engine='{name.lower()}'."
    }
    tiny.same(run, tiny.train("fedavg", "inprocess", rounds=2))  # the first one is none the worse
    tiny.same(run, tiny.train("fedavg", engine, rounds=2))  # and when it is over, the engine is free


def in_a_daemon(pipe: Connection) -> None:
    try:
        tiny.train("fedavg", "workers:2", rounds=1)
        pipe.send("")
    except ff.FedflatError as problem:
        pipe.send(str(problem))


def test_workers_in_a_daemon_are_one_sentence():
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=in_a_daemon, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert "this process is a daemon of multiprocessing's" in ours.recv()
    process.join()
