"""Worker processes give the same bits as one process, also when they die."""

import multiprocessing
import os
import signal
import threading
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny import Slow, network, same, train
from torch import nn

import fedflat as ff
from fedflat.engines.workers import shared_memory


def by_hand() -> nn.Module:
    """A network that is differentiated without autograd."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 3))


@cache
def alone(method: str, momentum: float, module: nn.Module | None) -> ff.Run:
    return train(method, "inprocess", momentum=momentum, module=module)


@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 3))])
@pytest.mark.parametrize(("momentum", "module"), [(0.0, None), (0.5, None), (0.0, by_hand())])
@pytest.mark.parametrize("method", sorted(ff.METHODS))
def test_all_methods_have_the_same_bits_with_any_number_of_workers(method, momentum, module, count):
    """Without momentum of its own a client's steps take corrections in by a fused update."""
    run = train(method, ff.Workers(count), momentum=momentum, module=module)
    same(run, alone(method, momentum, module))


@pytest.mark.parametrize("policy", ["average", "local", "server", "reset"])
def test_buffers_travel_too(policy):
    runs = [
        train("scaffold", e, module=network(norm=True), buffers=policy) for e in ("inprocess", ff.Workers(2))
    ]
    same(*runs)
    states = [run.model.state_dict() for run in runs]
    assert all(states[0][name].equal(states[1][name]) for name in states[0])


def test_spawned_workers_give_the_same_bits():
    same(train("fedgmt", ff.Workers(2, start_method="spawn")), train("fedgmt", "inprocess"))


def test_workers_share_devices_in_turn():
    engine = ff.Workers(3, devices=["cpu", "cpu"])
    same(train("fedavg", engine), train("fedavg", "inprocess"))


def our_workers() -> list:
    return [p for p in multiprocessing.active_children() if p.name.startswith("fedflat-worker")]


@pytest.mark.parametrize("method", ["scaffold", "fedwmsam", "fedgmt_v2"])
def test_a_worker_killed_in_the_middle_changes_nothing(method):
    expected = train(method, "inprocess", rounds=3, module=Slow())
    killed = []

    def kill() -> None:
        while len(killed) < 2 and not finished.wait(0.25):
            for worker in our_workers()[:1]:
                os.kill(worker.pid, signal.SIGKILL)
                killed.append(worker.pid)

    finished = threading.Event()
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        run = train(method, ff.Workers(2), rounds=3, module=Slow())
    finally:
        finished.set()
        killer.join()
    assert killed
    same(run, expected)


class Deadly(nn.Module):
    """Takes its process down."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.home = os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(x)


def test_a_client_that_always_kills_its_worker_ends_the_run():
    with pytest.raises(ff.FedflatError, match=r"client \d, round 0: its worker process died 3 times"):
        train("fedavg", ff.Workers(2), module=Deadly())


def test_a_failure_in_a_worker_names_client_and_round():
    with pytest.raises(ff.FedflatError, match=r"client \d, round 0: training failed in step 0 .* shapes"):
        train("fedavg", ff.Workers(2), module=nn.Linear(5, 3))


def test_no_process_and_no_file_is_left(tmp_path, monkeypatch):
    """What torch shares is named after its process, and other tests' processes share things meanwhile."""
    monkeypatch.setattr(shared_memory, "_SHARED_MEMORY", tmp_path)
    ours = {os.getpid()}
    before = set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))
    train("scaffold", ff.Workers(2), rounds=2, on_round=lambda _: ours.update(p.pid for p in our_workers()))
    assert not our_workers() and len(ours) == 3
    assert not list(tmp_path.iterdir())
    assert not {path for pid in ours for path in Path("/dev/shm").glob(f"torch_{pid}_*")} - before


def test_impossible_numbers_of_workers():
    with pytest.raises(ff.FedflatError, match="at least 1"):
        ff.Workers(0)
