"""A run that is killed, interrupted or out of room goes on and ends with the same bits as without that."""

import contextlib
import json
import linecache
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import fedflat as ff
from fedflat.cli import main
from fedflat.data.fingerprint import checksum, fingerprint
from fedflat.engines.workers import shared_memory as arena
from fedflat.experiments.run import stopping_at_round_end
from fedflat.storage import run_directory as rundirectory
from fedflat.storage.checkpoint import read_checkpoint
from fedflat.storage.client_store import ClientStore
from fedflat.storage.metrics_file import read_metrics
from fedflat.storage.run_directory import RunDirectory
from fedflat.storage.vector_table import Table
from fedflat.training.record import RoundRecord

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

SIX = ("fedavg", "scaffold", "feddyn", "fedsmoo", "fedgmt_v2", "fedwmsam")
"""Methods whose state differs."""
ROUNDS = 60
KILLS = 10
"""of each method, on each engine"""
PATIENCE = 60
"""seconds after which a test gives up on a process"""


def federation(seed: int = 0) -> ff.Federation:
    rng = torch.Generator().manual_seed(seed)
    clients = [
        (torch.randn(n, 6, generator=rng) + i, torch.randint(3, (n,), generator=rng))
        for i, n in enumerate([5, 20, 12, 15, 7, 11])
    ]
    return ff.Federation(clients, (torch.randn(40, 6, generator=rng), torch.randint(3, (40,), generator=rng)))


def network() -> nn.Module:
    """With buffers and with chance."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


WITHOUT_MOMENTUM = ("scaffold", "feddyn", "fedwmsam")
"""whose local steps are then one fused update each"""


def train(method: str = "fedsmoo", out: Path | None = None, rounds: int = ROUNDS, **more: Any) -> ff.Run:
    momentum = 0.0 if method in WITHOUT_MOMENTUM else 0.5
    settings: dict[str, Any] = {
        "local": ff.LocalSGD(lr=0.1, lr_decay=0.99, momentum=momentum, epochs=1, batch_size=8),
        "participation": 3,
        **more,
    }
    return ff.train(
        settings.pop("data", None) or federation(), network(), method, rounds=rounds, out=out, **settings
    )


def stopped(out: Path, method: str = "fedsmoo", after: int = 6, **more: Any) -> None:
    """A run with checkpoints after rounds 4 and 6 of 8."""
    done: list[int] = []
    more = {"rounds": 8, "checkpoint_every": 2, **more}
    train(method, out, on_round=lambda r: done.append(r.index), stop=lambda: len(done) == after, **more)


def bits(vectors: dict[str, Any]) -> dict[str, Any]:
    return {k: v.numpy().tobytes() if isinstance(v, torch.Tensor) else v for k, v in vectors.items()}


def everything(run: ff.Run) -> dict[str, Any]:
    """All that a run ends with, bit by bit."""
    server = run.server
    return {
        "server": bits({"w": server.w, "buffers": server.buffers, "step": server.step, **server.state}),
        "clients": {client: bits(run.clients.get(client)) for client in run.clients.clients()},
        "per client": {client: bits(server.of(client)) for client in server.per_client.clients()},
        "model": bits(dict(run.model.state_dict())),
    }


def rows(out: Path) -> list[dict[str, Any]]:
    """What has been measured, without the time it took."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_metrics(out)]


class Child:
    """A forked process in a group of its own that does something and may say so, a byte at a time."""

    def __init__(self, action: Callable[[Callable[[], object]], object]) -> None:
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                os.setpgid(0, 0)
                action(lambda: os.write(writer, b"."))
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writer)
        with contextlib.suppress(OSError):
            os.setpgid(self.pid, self.pid)  # whoever of the two comes first

    def wait_for(self, words: int) -> None:
        """Until it has said something so many times, or ended."""
        for _ in range(words):
            assert select.select([self._reader], [], [], PATIENCE)[0], "nothing happens"
            if not os.read(self._reader, 1):
                return

    def kill(self, group: bool = True) -> bool:
        """End it; whether it was still alive."""
        if group:
            os.killpg(self.pid, signal.SIGKILL)
        else:
            os.kill(self.pid, signal.SIGKILL)
        return os.WIFSIGNALED(self.end())

    def end(self) -> int:
        os.close(self._reader)
        return os.waitpid(self.pid, 0)[1]


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch) -> None:
    """Where a kill leaves things that a test should not."""
    (tmp_path / "shared").mkdir()
    monkeypatch.setattr(arena, "_SHARED_MEMORY", tmp_path / "shared")


# -- kill -9 ---------------------------------------------------------------------------------------


QUICK = (("scaffold", "inprocess"), ("fedwmsam", "workers:2"))


@pytest.mark.parametrize(
    ("method", "engine"),
    [
        pytest.param(method, engine, marks=() if (method, engine) in QUICK else pytest.mark.slow)
        for method in SIX
        for engine in ("inprocess", "workers:2")
    ],
)
def test_killed_at_any_moment(method: str, engine: str, tmp_path: Path):
    """A run is killed time and again: while it starts, trains, writes rows, writes checkpoints."""
    expected = train(method, tmp_path / "whole")
    draw, out = random.Random(f"{method} {engine}"), tmp_path / "killed"
    for number in range(KILLS):
        every = draw.choice([1, 1, 2, 3, None])
        memory = draw.choice([None, "500B", "0"])
        slowness = draw.choice([0, 0.002, 0.005])

        def live(tell: Callable[[], object], every=every, memory=memory, slowness=slowness) -> None:
            def on_round(r: RoundRecord) -> None:
                tell()
                if r.index >= ROUNDS - 2:  # who kills it may be late
                    for _ in range(7):
                        tell()
                    time.sleep(PATIENCE)

            os.fsync = lambda _: time.sleep(slowness)  # a checkpoint has ten of them
            settings = {"engine": engine, "checkpoint_every": every, "state_memory": memory}
            train(method, out, resume=True, on_round=on_round, **settings)

        child = Child(live)
        child.wait_for(draw.randrange(0, 7) if number else 5)
        time.sleep(draw.choice([0, draw.uniform(0, 0.01), draw.uniform(0, 0.06)]))
        assert child.kill()
    run = train(method, out, engine=engine, resume=True)
    assert everything(run) == everything(expected)
    assert rows(out) == rows(tmp_path / "whole")
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


STEPS = ((os, "fsync"), (Path, "replace"), (Path, "unlink"), (Path, "touch"), (Path, "mkdir"))
"""of writing"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedsmoo", "fedwmsam"])
def test_killed_at_every_step_of_writing(method: str, tmp_path: Path, monkeypatch):
    """From the start of a resumed run over two checkpoints to its end, before every change of the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    stopped(tmp_path / "begun", method)
    expected = everything(train(method, tmp_path / "whole", rounds=8))

    def live(out: Path, when: int) -> None:
        count = 0

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def step(*arguments: Any, **more: Any) -> Any:
                nonlocal count
                count += 1
                if count == when:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **more)

            return step

        for where, what in STEPS:
            setattr(where, what, counted(getattr(where, what)))
        train(method, out, rounds=8, resume=True, checkpoint_every=1)

    when, killed = 1, True
    while killed:
        out = tmp_path / f"killed-{when}"
        shutil.copytree(tmp_path / "begun", out)
        child = Child(lambda _, out=out, when=when: live(out, when))
        killed = os.WIFSIGNALED(child.end())
        run = train(method, out, rounds=8, resume=True)
        assert everything(run) == expected
        assert rows(out) == rows(tmp_path / "whole")
        assert not list(out.rglob(".*")), "leftovers"
        shutil.rmtree(out)
        when += 1 if method == "fedsmoo" else 3
    assert when > 30  # steps that there are


def test_going_on_at_once_while_workers_outlive_the_main_process(tmp_path: Path):
    """Only the main process is killed; its workers are busy with a client and notice later."""

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if slow:
                busy.touch()
                wait_until(free.exists)
            return self.inner(x)

    def live(**more: Any) -> ff.Run:
        return ff.train(federation(), Slow(), "scaffold", rounds=2, engine="workers:2", **more)

    busy, free = tmp_path / "busy", tmp_path / "free"
    slow = False
    torch.manual_seed(0)
    expected = live()
    slow = True
    torch.manual_seed(0)
    child = Child(lambda _: live(out=tmp_path / "run"))
    wait_until(busy.exists)
    assert child.kill(group=False)
    slow = False
    torch.manual_seed(0)
    assert everything(live(out=tmp_path / "run", resume=True)) == everything(expected)
    free.touch()


# -- going on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3, None])
def test_stopping_and_going_on_longer(every: int | None, tmp_path: Path):
    """A finished run with more rounds is what the longer run would have been."""
    expected = train(out=tmp_path / "whole", rounds=9)
    out = tmp_path / "run"
    stopped(out, after=2, rounds=5, checkpoint_every=every)
    assert not (out / "model.safetensors").exists()
    for rounds in (5, 5, 9):
        run = train(out=out, rounds=rounds, resume=True, checkpoint_every=every)
        assert len(run.history) == rounds
    assert everything(run) == everything(expected)
    assert rows(out) == rows(tmp_path / "whole")
    assert len(list((out / "checkpoints").iterdir())) <= 2


def test_a_run_remembers_where_it_began_and_went_on(tmp_path: Path):
    stopped(tmp_path)
    about = json.loads((tmp_path / "run.json").read_text())
    assert "resumed" not in about
    began = about["environment"] | {"torch": "1.0"}
    (tmp_path / "run.json").write_text(json.dumps(about | {"environment": began}))
    with pytest.warns(UserWarning, match=f"began elsewhere .torch 1.0 then, {torch.__version__[:4]}"):
        train(out=tmp_path, resume=True, rounds=8)
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["environment"] == began
    assert [entry["environment"]["torch"] for entry in about["resumed"]] != ["1.0"]


def test_another_engine_goes_on_with_the_same_bits(tmp_path: Path):
    stopped(tmp_path / "run")
    run = train(out=tmp_path / "run", rounds=8, resume=True, engine="workers:2", threads=2, state_memory="0")
    assert everything(run) == everything(train(rounds=8))


def test_a_run_that_is_not_there_yet_is_started(tmp_path: Path):
    run = train(out=tmp_path / "run", rounds=3, resume=True)
    assert everything(run) == everything(train(rounds=3))


def test_a_torn_last_line_is_left_out(tmp_path: Path):
    out = tmp_path / "run"
    stopped(out)
    whole = (out / "metrics.jsonl").read_bytes()
    for torn in (b"", b"{", whole[:100], b"\0" * 50, b"\xff\xfe"):
        (out / "metrics.jsonl").write_bytes(whole + torn)
        assert [row["index"] for row in read_metrics(out)] == list(range(6))
    train(out=out, rounds=8, resume=True)
    assert [row["index"] for row in read_metrics(out)] == list(range(8))


def test_lines_that_were_edited_or_removed(tmp_path: Path):
    out = tmp_path / "run"
    stopped(out)
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join([*lines[:2], "hello\n", *lines[3:]]))
    with pytest.raises(ff.FedflatError, match=r"metrics.jsonl, line 3, is not JSON; was it edited"):
        train(out=out, rounds=8, resume=True)
    (out / "metrics.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(ff.FedflatError, match=r"line 1, is round 1, not 0; lines were removed"):
        train(out=out, rounds=8, resume=True)
    assert (out / "metrics.jsonl").read_text() == "".join(lines[1:])
    (out / "metrics.jsonl").unlink()
    with pytest.raises(ff.FedflatError, match=r"metrics.jsonl cannot be read: No such file"):
        train(out=out, rounds=8, resume=True)
    with pytest.raises(ff.FedflatError, match=r"already holds a run"):
        train(out=out, rounds=8)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("method FedSMOO, not FedAvg", {"method": "fedavg"}),
        ("mechanisms .*rho=0.2.*", {"method": "fedsmoo(rho=0.2)"}),
        ("local.lr 0.1, not 0.2", {"local": ff.LocalSGD(lr=0.2, lr_decay=0.99, momentum=0.5, batch_size=8)}),
        ("participation Uniform.*3.*, not Everyone.*", {"participation": None}),
        ("seed 0, not 1", {"seed": 1}),
        ("weighting samples, not uniform", {"weighting": "uniform"}),
        ("evaluate server, not average", {"evaluate": "average"}),
        ("eval_every 1, not 2", {"eval_every": 2}),
        ("buffers average, not local", {"buffers": "local"}),
        ("dtype float32, not float64", {"dtype": torch.float64}),
        ("federation.split [0-9a-f]{8}, not [0-9a-f]{8}", {"data": federation(1)}),
    ],
)  # fmt: skip
def test_other_settings_are_refused_by_name(name: str, changes: dict[str, Any], tmp_path: Path):
    out = tmp_path / "run"
    stopped(out, after=1, rounds=2)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ff.FedflatError, match=f"holds a run with {name}. Choose another directory"):
        train(out=out, **{"rounds": 2, "resume": True, **changes})
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


# -- what changed meanwhile ------------------------------------------------------------------------

NET = """
import torch
from torch import nn

import fedflat as ff

LEVEL = 0.5

def lifted(x):
    return lift(x)

def lift(x):
    return x + LEVEL

class Base(nn.Module):
    def forward(self, x):
        return self.last(lifted(self.bend(torch.tanh(self.first(x)))) * self.scale)

class Net(Base):
    def __init__(self, scale=1.0, middle=8, bend=torch.relu):
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(6, middle), nn.Linear(middle, 3), scale
        self.bend = bend

class Half(ff.Mechanism):
    name = "half"

    def combine(self, server, update):
        return update / 2

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)

def weighted(weight):
    return lambda outputs, targets: weight * nn.functional.cross_entropy(outputs, targets)
"""


def loaded(folder: Path, source: str = NET) -> Any:
    """A module of Python as a process has it that starts afterwards."""
    path = folder / "net.py"
    path.write_text(source)
    linecache.clearcache()
    found = types.ModuleType("net")
    exec(compile(source, str(path), "exec"), found.__dict__)
    return found


def with_net(out: Path, net: Any, data: ff.Federation | None = None, rounds: int = 2, **more: Any) -> ff.Run:
    torch.manual_seed(0)
    model = more.pop("model", None) or net.Net()
    options = {"loss": net.loss, "local": ff.LocalSGD(lr=0.1), "resume": True, "method": net.Half(), **more}
    return ff.train(data or federation(), model, rounds=rounds, out=out, **options)


def with_inputs_changed(test: bool) -> ff.Federation:
    """The labels, and who has them, are the same; one number of one sample is not."""
    clients, held = [federation().client(n).stored() for n in range(6)], federation().test
    assert held is not None
    pair = held.stored() if test else clients[3]
    pair[0][4, 2] += 1e-3
    return ff.Federation(clients, held.stored() if not test else pair)


CHANGES: dict[str, tuple[str, Callable[[Any, Path], dict[str, Any]]]] = {
    "an input": ("federation.fingerprint .*: the data", lambda net, _: {"data": with_inputs_changed(False)}),
    "an input of the test set": (
        "federation.fingerprint .*: the data",
        lambda net, _: {"data": with_inputs_changed(True)},
    ),
    "a number in the model": ("module.layers .*: the model's layers", lambda net, _: {"model": net.Net(2.0)}),
    "what is trained": ("module.layers", lambda net, _: {"model": frozen(net.Net())}),
    "the code of a base class": (
        "module.code .*: the code of the model",
        lambda net, place: {"net": loaded(place, NET.replace("torch.tanh", "torch.sin"))},
    ),
    "the code of the loss": (
        "loss.code .*: the code of the loss",
        lambda net, place: {"net": loaded(place, NET.replace("return nn.f", "return 2 * nn.f"))},
    ),
    "a function that the model calls": (
        "module.code .*: the code of the model",
        lambda net, place: {"net": loaded(place, NET.replace("return x + LEVEL", "return x - LEVEL"))},
    ),
    "a number that such a function takes": (
        "module.code .*: the code of the model",
        lambda net, place: {"net": loaded(place, NET.replace("LEVEL = 0.5", "LEVEL = 0.7"))},
    ),
    "a function in the model": ("module.layers", lambda net, _: {"model": net.Net(bend=torch.sigmoid)}),
    "a lambda in the model": ("module.layers", lambda net, _: {"model": net.Net(bend=lambda x: 3 * x)}),
    "the code of a mechanism": (
        "mechanism_code .*: the code of a mechanism",
        lambda net, place: {"net": loaded(place, NET.replace("update / 2", "update / 3"))},
    ),
    "the loss": ("loss.name loss, not cross_entropy", lambda net, _: {"loss": nn.functional.cross_entropy}),
}


def frozen(net: nn.Module) -> nn.Module:
    net.first.bias.requires_grad_(False)
    return net


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_since_a_run_began_is_noticed(change: str, tmp_path: Path):
    says, changes = CHANGES[change]
    out, net = tmp_path / "run", loaded(tmp_path)
    with_net(out, net)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ff.FedflatError, match=f"holds a run with {says}.*Choose another directory"):
        with_net(out, rounds=3, **{"net": net, **changes(net, tmp_path)})
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_values_that_are_not_trained_are_noticed(tmp_path: Path):
    """They are in no checkpoint: the module brings them."""
    out, net = tmp_path / "run", loaded(tmp_path)
    other = frozen(net.Net())
    other.first.bias.data.add_(1e-3)
    torch.manual_seed(0)
    with_net(out, net, model=frozen(net.Net()))
    torch.manual_seed(0)
    same = frozen(net.Net())
    with pytest.raises(ff.FedflatError, match=r"module\.frozen .*: the parameters that are not trained"):
        with_net(out, net, model=other, rounds=3)
    assert len(with_net(out, net, model=same, rounds=3).history) == 3


def test_numbers_that_a_loss_closes_over_are_noticed(tmp_path: Path):
    net = loaded(tmp_path)
    with_net(tmp_path / "run", net, loss=net.weighted(1.0))
    with pytest.raises(ff.FedflatError, match=r"loss\.code"):
        with_net(tmp_path / "run", net, loss=net.weighted(2.0), rounds=3)
    with_net(tmp_path / "run", net, loss=net.weighted(1.0), rounds=3)


def test_comments_layout_and_runs_from_before_make_no_difference(tmp_path: Path):
    out = tmp_path / "run"
    with_net(out, loaded(tmp_path))
    other = NET.replace("(self, x):\n", "(self, x):  # a comment\n\n").replace("weight * nn", "weight  *  nn")
    assert other != NET
    assert len(with_net(out, loaded(tmp_path, other), rounds=3).history) == 3
    about = json.loads((out / "run.json").read_text())
    for key in ("module", "loss", "on_divergence", "mechanism_code"):
        del about[key]
    del about["federation"]["fingerprint"]
    (out / "run.json").write_text(json.dumps(about))
    assert len(with_net(out, loaded(tmp_path), with_inputs_changed(False), rounds=4).history) == 4


def test_the_fingerprint_reads_all_of_it_or_blocks_of_what_is_huge(monkeypatch):
    """Against a checksum over everything, in one piece."""
    x = torch.arange(5000, dtype=torch.float32).reshape(500, 10)
    y = torch.arange(500) % 3
    plain = ff.Federation([(x, y)])
    for changed in (0, 250, 499):
        other = x.clone()
        other[changed, 7] += 1
        assert fingerprint(ff.Federation([(other, y)])) != fingerprint(plain)
    assert fingerprint(ff.Federation([(x.t().contiguous().t(), y)])) == fingerprint(plain)
    monkeypatch.setattr("fedflat.data.fingerprint.BLOCK", 400)
    whole = zlib.crc32(x.numpy().tobytes(), zlib.crc32(b"torch.float32 (500, 10)"))
    assert checksum([x]) == whole
    monkeypatch.setattr("fedflat.data.fingerprint.MOST", 10_000)  # every second block
    half = b"".join(x[n : n + 10].numpy().tobytes() for n in range(0, 500, 20))
    assert checksum([x]) == zlib.crc32(half, zlib.crc32(b"torch.float32 (500, 10)"))


def test_two_processes_cannot_write_one_run(tmp_path: Path):
    out = tmp_path / "run"
    go_on, stop = os.pipe()

    def live(tell: Callable[[], object]) -> None:
        train(out=out, rounds=3, on_round=lambda r: (tell(), os.read(go_on, 1)), engine="workers:2")

    child = Child(live)
    child.wait_for(1)
    for resume in (True, False):
        with pytest.raises(ff.FedflatError, match=r"Another process is writing to .*run\. Wait for it"):
            train(out=out, rounds=3, resume=resume)
    os.write(stop, b"...")
    assert child.end() == 0
    assert rows(out) == rows_of(train(rounds=3))
    os.close(go_on)
    os.close(stop)


def rows_of(run: ff.Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in run.history]


# -- damage ----------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path, place: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    path.write_bytes(data)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip_fresh_slot(path: Path) -> None:
    """In a vector that only this table refers to."""
    newest, before = Table.read(path), Table.read(path.with_name("round-0000004.table"))
    kind = newest.kinds[0]
    slot = min(newest.slots(kind.size) - before.slots(kind.size))
    flip(path.parent / f"vectors-{kind.size}.bin", slot * kind.size + 5)


CHECKPOINT, CLIENTS, SERVER = (
    f"{place}/round-0000006.{suffix}"
    for place, suffix in (
        ("checkpoints", "safetensors"),
        ("state/clients", "table"),
        ("state/server", "table"),
    )
)
DAMAGES = [(file, how) for file in (CHECKPOINT, CLIENTS, SERVER) for how in (cut, empty, flip, zeros)]
DAMAGES += [(CHECKPOINT, lambda path: flip(path, 20)), (CHECKPOINT, lambda path: flip(path, -1))]
DAMAGES += [(CLIENTS, Path.unlink), (SERVER, Path.unlink)]


@pytest.mark.parametrize("method", ["fedsmoo", "fedwmsam"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(method: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    stopped(tmp_path / "run", method)
    expected = everything(train(method, tmp_path / "whole", rounds=8))
    slot = (CLIENTS if method == "fedsmoo" else SERVER, flip_fresh_slot)
    for number, (file, damage) in enumerate([*DAMAGES, slot]):
        out = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", out)
        damage(out / file)
        with pytest.warns(
            UserWarning, match=r"Going back to the checkpoint before it, after round 4\."
        ) as caught:
            run = train(method, out, rounds=8, resume=True, checkpoint_every=3)
        assert len(caught) == 1
        told = str(caught[0].message)
        assert str(out / file) in told or "round-0000006" in told or "vectors-" in told
        assert told in (out / "log.txt").read_text()
        assert everything(run) == expected
        assert rows(out) == rows(tmp_path / "whole")
        # the damaged one is not counted among the last two
        kept = sorted(path.stem for path in (out / "checkpoints").iterdir())
        assert kept == ["round-0000006", "round-0000008"]
        assert sorted(path.stem for path in (out / "state" / "clients").glob("*.table")) == kept


def test_two_damaged_checkpoints_are_an_error(tmp_path: Path):
    out = tmp_path / "run"
    stopped(out)
    cut(out / CHECKPOINT)
    flip(out / "state/clients/round-0000004.table")
    before = {
        path: path.read_bytes() for path in out.rglob("*.*") if path.is_file() and path.name != "run.json"
    }
    with pytest.raises(
        ff.FedflatError,
        match=r"(?s)No checkpoint in .*run is sound. .*round-0000006.safetensors is damaged.*round-0000004.table is "
        r"damaged.* Remove the directory to start anew, or use another.",
    ):
        train(out=out, rounds=8, resume=True)
    assert before.items() <= {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}.items()


def test_a_damaged_run_json(tmp_path: Path):
    out = tmp_path / "run"
    stopped(out)
    cut(out / "run.json")
    with pytest.raises(ff.FedflatError, match=r"run.json cannot be read"):
        train(out=out, rounds=8, resume=True)
    (out / "run.json").write_text('{"format": 99}')
    with pytest.raises(ff.FedflatError, match=r"written by a newer version of fedflat"):
        train(out=out, rounds=8, resume=True)


# -- the command line ------------------------------------------------------------------------------

SMALL = {
    "dataset": "digits",
    "method": "fedsmoo",
    "clients": 8,
    "participation": 4,
    "rounds": 8,
    "local": {"epochs": 1},
    "engine": "inprocess",
    "checkpoint_every": 2,
}


def written(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return path


def fedflat(*arguments: object, before: Callable[[], object] = lambda: None) -> tuple[int, str, str]:
    """The command line in a process of its own, without a start from scratch: exit code, output, errors."""
    pipes = [os.pipe() for _ in range(2)]

    def act(_: object) -> None:
        sys.stdout, sys.stderr = (open(writer, "w") for _, writer in pipes)  # noqa: SIM115
        sys.argv = ["fedflat", *map(str, arguments)]
        before()
        try:
            main()
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    child = Child(act)
    said = []
    for reader, writer in pipes:
        os.close(writer)
        with open(reader) as file:
            said.append(file.read())
    return os.waitstatus_to_exitcode(child.end()), said[0], said[1]


def same_run(out: Path, other: Path) -> None:
    """What is on disk of two finished runs."""
    assert rows(out) == rows(other)
    assert (out / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    name, states = f"round-{len(rows(out)):07d}", []
    for run in (out, other):
        vectors, numbers = read_checkpoint(run / "checkpoints" / f"{name}.safetensors")
        stores = [ClientStore.restore(run / "state" / side, name) for side in ("clients", "server")]
        kept = [{client: bits(store.get(client)) for client in store.clients()} for store in stores]
        states.append((bits(vectors), numbers, kept))
    assert states[0] == states[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run from the command line that nothing happened to."""
    place = tmp_path_factory.mktemp("whole")
    code, _, errors = fedflat("run", written(place / "a.yaml"), "--out", place / "run")
    assert code == 0, errors
    return place / "run"


class Terminal:
    """A real process with a person before it."""

    def __init__(self, *arguments: object) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fedflat", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def press_ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)  # a terminal tells the workers, too

    def deaf(self) -> int:
        """How many workers are there that do not hear Ctrl-C."""
        count = 0
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ProcessLookupError):
                if os.getpgid(int(place.name)) == self.process.pid:
                    ignored = re.search(r"SigIgn:\s*(\w+)", (place / "status").read_text())
                    count += ignored is not None and int(ignored[1], 16) >> signal.SIGINT - 1 & 1
        return count

    def read_until(self, words: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if words in line:
                return
        raise AssertionError(f"it never said {words}")

    def end(self) -> tuple[int, str]:
        said, _ = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, said


def wait_until(happened: Callable[[], object]) -> None:
    limit = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < limit, "nothing happens"
        time.sleep(0.005)


def test_a_forked_process_leaves_ctrl_c_to_its_parent():
    told: list[int] = []
    with stopping_at_round_end(lambda: told.append(os.getpid())) as stop:

        def press_twice(_: object) -> None:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            sys.exit(1 if told or stop() else 0)

        assert Child(press_twice).end() == 0
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        assert told == [os.getpid()]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="signals are read from /proc")
def test_ctrl_c_ends_after_the_round_and_says_how_to_go_on(tmp_path: Path):
    """The second one ends it at once."""
    out, long, whole = tmp_path / "run", tmp_path / "long", tmp_path / "whole"
    file = written(tmp_path / "a.yaml", checkpoint_every=100, engine="workers:2", rounds=40)
    endless = written(tmp_path / "b.yaml", local={"steps": 10**7}, engine="workers:2")
    assert fedflat("run", file, "--out", whole, "--set", "engine=inprocess")[0] == 0
    first = Terminal("run", file, "--out", out)
    wait_until(lambda: (out / "metrics.jsonl").exists() and rows(out))
    first.press_ctrl_c()
    code, said = first.end()
    assert code == 130
    assert "Stopping after this round; press Ctrl-C again to stop at once." in said
    done = len(rows(out))
    assert f"Stopped after round {done} of 40. Resume it with\n  fedflat resume {out}\n" in said
    assert "Traceback" not in said
    second = Terminal("run", endless, "--out", long)
    # an interruption that hits while processes are forked may be lost: Python ignores exceptions there
    wait_until(lambda: second.deaf() == 2)
    second.press_ctrl_c()
    second.read_until("Stopping after this round")
    second.press_ctrl_c()
    code, said = second.end()  # its first round would never end
    assert code == 130
    assert f"fedflat resume {long}" in said
    assert "Traceback" not in said
    code, said, errors = fedflat("resume", out)
    assert code == 0, errors
    assert f"Written to {out}" in said
    same_run(out, whole)


def test_resume_says_when_there_is_nothing_to_do(whole: Path, tmp_path: Path):
    shutil.copytree(whole, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    code, said, _ = fedflat("resume", tmp_path / "run")
    assert code == 0
    assert "is done: nothing is left of its 8 rounds" in said
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_resume_with_more_rounds(whole: Path, tmp_path: Path):
    shutil.copytree(whole, tmp_path / "run")
    assert fedflat("resume", tmp_path / "run", "--rounds", 11)[0] == 0
    assert fedflat("run", written(tmp_path / "a.yaml", rounds=11), "--out", tmp_path / "long")[0] == 0
    same_run(tmp_path / "run", tmp_path / "long")


def test_resume_of_what_is_no_run(tmp_path: Path):
    stopped(tmp_path / "python", after=1)
    for place, says in (
        (tmp_path / "nowhere", "is not a run: there is no run.json in it"),
        (tmp_path, "is not a run: there is no run.json in it"),
        (tmp_path / "python", "resume it in Python, with the same arguments and train"),
    ):
        code, _, errors = fedflat("resume", place)
        assert code == 2
        assert says in errors
        assert len(errors.splitlines()) == 1


def test_resume_says_that_it_fell_back(whole: Path, tmp_path: Path):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    (out / "model.safetensors").unlink()
    cut(out / "checkpoints" / "round-0000008.safetensors")
    code, said, errors = fedflat("resume", out)
    assert code == 0, errors
    assert "Note:" in said and "Going back to the checkpoint before it, after round 6." in said
    same_run(out, whole)
    for path in (out / "checkpoints").iterdir():
        cut(path)
    (out / "model.safetensors").unlink()
    code, _, errors = fedflat("resume", out)
    assert code == 2
    assert "No checkpoint in" in errors
    assert len(errors.splitlines()) == 1


# -- no room, no permission ------------------------------------------------------------------------


def limited(owner: Any, call: str, times: int, size: int) -> Callable[[], None]:
    """From such a call on, no file can grow beyond a size: writes really fail."""

    def act() -> None:
        inner, left = getattr(owner, call), [times]

        def limiting(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            return inner(*arguments)

        setattr(owner, call, limiting)

    return act


@pytest.mark.parametrize(
    ("owner", "call", "times", "size", "file"),
    [
        (RunDirectory, "__init__", 1, 0, "run.json"),
        (RunDirectory, "round", 1, 0, "metrics.jsonl"),
        (RunDirectory, "round", 5, 1000, "metrics.jsonl"),
        (RunDirectory, "checkpoint", 2, 0, "vectors-"),
        (Table, "write", 4, 10, "server/round-0000004.table"),
        (rundirectory, "write_checkpoint", 3, 800_000, "round-0000006.safetensors"),
        (RunDirectory, "finish", 1, 0, "model.safetensors"),
    ],
)
def test_a_full_disk(owner: Any, call: str, times: int, size: int, file: str, whole: Path, tmp_path: Path):
    out = tmp_path / "run"
    arguments = ("run", written(tmp_path / "a.yaml"), "--out", out)
    code, _, errors = fedflat(*arguments, before=limited(owner, call, times, size))
    assert code == 2
    assert len(errors.splitlines()) == 1, errors
    assert file in errors and "cannot be written: File too large" in errors
    if call == "__init__":
        code, _, errors = fedflat(*arguments)
    else:
        first = (call, times) == ("round", 1)
        kept = "There is no checkpoint yet" if first else "Earlier checkpoints are intact"
        assert f"{kept}: make room, then `fedflat resume {out}`" in errors
        code, _, errors = fedflat("resume", out)
    assert code == 0, errors
    same_run(out, whole)


def become_nobody() -> None:
    """Whom permissions mean something to."""
    if os.geteuid() == 0:
        os.setegid(65534)
        os.seteuid(65534)


def open_as_nobody() -> None:
    inner = RunDirectory.__init__

    def opening(*arguments: Any, **more: Any) -> None:
        become_nobody()
        inner(*arguments, **more)

    RunDirectory.__init__ = opening  # type: ignore[method-assign]


def test_a_directory_that_cannot_be_written(whole: Path):
    """Neither a new run nor one to go on with; nothing changes, and later it goes on."""
    place = Path(tempfile.mkdtemp())
    out = place / "run"
    shutil.copytree(whole, out)
    (out / "model.safetensors").unlink()
    place.chmod(0o755)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for path in (out, *out.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)

    try:
        file = written(place / "a.yaml")
        for arguments in (("run", file, "--out", out / "new"), ("resume", out)):
            code, _, errors = fedflat(*arguments, before=open_as_nobody)
            assert code == 2
            assert "Cannot write to" in errors and "(Permission denied). Choose another directory." in errors
            assert len(errors.splitlines()) == 1
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    finally:
        for path in (out, *out.rglob("*")):
            path.chmod(0o755)
    assert fedflat("resume", out)[0] == 0
    same_run(out, whole)
    shutil.rmtree(place)


def test_a_directory_that_becomes_read_only(whole: Path, tmp_path: Path):
    out = tmp_path / "run"

    def refuse() -> None:
        inner = RunDirectory.checkpoint

        def refusing(self: RunDirectory, server: Any, clients: Any, done: int) -> None:
            if done == 6:
                (out / "checkpoints").chmod(0o555)
                become_nobody()
            inner(self, server, clients, done)

        RunDirectory.checkpoint = refusing  # type: ignore[method-assign]

    code, _, errors = fedflat("run", written(tmp_path / "a.yaml"), "--out", out, before=refuse)
    assert code == 2, errors
    assert "cannot be written: Permission denied. Earlier checkpoints are intact" in errors
    (out / "checkpoints").chmod(0o755)
    assert fedflat("resume", out)[0] == 0
    same_run(out, whole)


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nowhere"])
def test_what_is_no_directory(out: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    code, _, errors = fedflat("run", written(tmp_path / "a.yaml"), "--out", tmp_path / out)
    assert code == 2
    assert "Cannot write to" in errors and "Choose another directory." in errors
    assert len(errors.splitlines()) == 1
