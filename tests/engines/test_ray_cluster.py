"""Ray clusters of several nodes: nodes die and come, Ctrl-C, and what is left afterwards."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Slow, same, send_with_their_classes, train

import fedflat as ff


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with room for one actor."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    send_with_their_classes(sys.modules[__name__])
    settings = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=settings)
    yield cluster
    cluster.shutdown()


def add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)


class OnNode(Slow):
    """Says which node trains it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import ray

        if self.training:
            (self.folder / ray.get_runtime_context().get_node_id()).touch()
            time.sleep(0.05)
        return super().forward(x)


def eventually(happens: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_node_killed_in_the_middle_changes_nothing_and_another_is_used(cluster, tmp_path, monkeypatch):
    import ray

    expected = train("scaffold", "inprocess", rounds=4, module=Slow())
    nodes = [add_node(cluster)]
    cluster.wait_for_nodes()
    engine, again = ff.Ray(address=cluster.address), []
    lost = engine._lost
    monkeypatch.setattr(engine, "_lost", lambda event, *more: again.append(event.lost) or lost(event, *more))

    def is_up(actors: int) -> bool:
        engine._pool.wait(time.monotonic() + 0.1)
        return engine._pool.up == actors

    def kill() -> None:
        eventually((tmp_path / nodes[0].node_id).exists)
        cluster.remove_node(nodes[0], allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)

    def between(round: ff.RoundRecord) -> None:
        if round.index == 0:
            eventually(lambda: is_up(2))
            killer.start()
        if round.index == 1:
            killer.join()
            nodes.append(add_node(cluster))
            eventually(lambda: is_up(2))

    run = train("scaffold", engine, rounds=4, module=OnNode(tmp_path), on_round=between)
    same(run, expected)
    assert len(again) == 1, "no client was run again"
    assert (tmp_path / nodes[1].node_id).exists(), "the node that came was not used"
    assert not ray.is_initialized(), "what was opened was not closed"
    cluster.remove_node(nodes[1])


def test_a_connection_that_was_there_stays(cluster):
    import ray

    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    try:
        same(train("fedavg", "ray"), train("fedavg", "inprocess"))
        assert ray.is_initialized()
        eventually(lambda: ray.available_resources().get("CPU") == 1)  # no actor is left
        with pytest.raises(ff.FedflatError, match=r"this process is connected to .* already"):
            train("fedavg", ff.Ray(address="192.0.2.1:6379"))
        assert ray.is_initialized()
    finally:
        ray.shutdown()


def fedflat(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fedflat", *(str(argument) for argument in arguments)]


@pytest.mark.slow
def test_the_command_line_with_an_address(cluster, tmp_path):
    common = ["run", "-m", "scaffold", "--rounds", 2, "--epochs", 1, "--clients", 4, "--participation", 2]
    there = ["--engine", "ray", "--ray-address", cluster.address, "--set", "ray.data=nodes"]
    for name, more in (("ray", there), ("here", ["--engine", "inprocess"])):
        done = subprocess.run(
            fedflat(*common, *more, "--out", tmp_path / name), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "ray" not in done.stderr.lower(), done.stderr
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("ray", "here")]
    assert models[0] == models[1]


@pytest.mark.slow
def test_an_address_without_a_cluster_or_without_the_engine(tmp_path):
    nowhere = fedflat("run", "-m", "fedavg", "--engine", "ray", "--ray-address", "127.0.0.1:1")
    done = subprocess.run(nowhere, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "No Ray cluster answers at '127.0.0.1:1'" in done.stderr
    assert "Traceback" not in done.stderr
    done = subprocess.run(fedflat("run", "--ray-address", "auto"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "engine ray" in done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_cleanly_and_leaves_nothing(tmp_path):
    command = fedflat("run", "-m", "scaffold", "--engine", "ray:1", "--rounds", 100000, "--out", tmp_path)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    rows = tmp_path / "metrics.jsonl"
    eventually(lambda: process.poll() is not None or (rows.exists() and rows.stat().st_size > 0), 150)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everyone in the group
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, output + errors
    assert f"fedflat resume {tmp_path}" in output
    assert "Traceback" not in errors
    with contextlib.suppress(ProcessLookupError):  # Ray's processes need a moment to end
        eventually(lambda: os.killpg(process.pid, 0) is not None, 30)
