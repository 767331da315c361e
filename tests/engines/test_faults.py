"""What the machine does to a run: a killed process, no room, too few files, Ctrl-C; each is a sentence at most."""

import contextlib
import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import Child, federation, fedflat, same_run, train, wait_until, written
from torch import nn

import fedflat as ff
from fedflat.engines.workers import parent, shared_memory
from fedflat.engines.workers.shared_memory import SharedMemory

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are read from /proc")


# -- the end of a parent ---------------------------------------------------------------------------


class Endless(nn.Module):
    """A worker is busy with it until it is killed; it says that it has begun."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.file = file

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()}\n")
        threading.Event().wait()
        return self.inner(x)


def alive(process: int) -> bool:
    """A process that has ended may still have an entry, until somebody asks how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("by_system", [True, False], ids=["by the system", "by a thread"])
def test_busy_workers_end_with_their_parent(by_system: bool, tmp_path: Path, monkeypatch):
    if not by_system:
        monkeypatch.setattr(parent, "_ask_the_system", lambda: None)
    busy = tmp_path / "busy"

    def live(_: object) -> None:
        ff.train(federation(), Endless(busy), "fedavg", rounds=1, engine="workers:3", fast=False)

    child = Child(live)
    wait_until(lambda: busy.exists() and len(busy.read_text().split()) == 3)
    workers = [int(word) for word in busy.read_text().split()]
    assert all(map(alive, workers))
    assert child.kill(group=False)
    try:
        wait_until(lambda: not any(map(alive, workers)))  # none would ever end by itself
    finally:
        for worker in filter(alive, workers):
            os.kill(worker, signal.SIGKILL)


# -- no room, too few files ------------------------------------------------------------------------

CLONE_NEWNS = 0x20000


def mount(place: Path | str, kilobytes: int) -> None:
    """A small disk in memory, for this process alone."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)], check=True)


def alone() -> None:
    """What is mounted from now on is mounted for this process only."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


@pytest.fixture(scope="module")
def can_mount(tmp_path_factory) -> None:
    place = tmp_path_factory.mktemp("mounted")

    def attempt(_: object) -> None:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            try:
                alone()
                mount(place, 64)
            except (OSError, subprocess.CalledProcessError):
                sys.exit(1)

    if os.waitstatus_to_exitcode(Child(attempt).end()) != 0:
        pytest.skip("nothing can be mounted here: that takes the rights of an administrator")


def one_sentence(code: int, errors: str) -> None:
    assert code == 2, errors
    assert errors.startswith("Error: ") and errors.count("\n") == 1, errors


def test_no_room_for_shared_memory(can_mount: None, tmp_path: Path):
    """Neither in memory nor in the temporary folder."""
    (tmp_path / "tmp").mkdir()
    file = written(tmp_path / "a.yaml", engine="workers:2")

    def small() -> None:
        alone()
        mount("/dev/shm", 16)
        mount(tmp_path / "tmp", 16)
        tempfile.tempdir = str(tmp_path / "tmp")

    code, _, errors = fedflat("run", file, "--out", tmp_path / "run", before=small)
    one_sentence(code, errors)
    assert "there is room neither in /dev/shm nor in the temporary folder (No space left on device)" in errors
    assert fedflat("run", file, "--out", tmp_path / "run")[0] == 0


def test_the_temporary_folder_takes_what_shared_memory_cannot(can_mount: None, tmp_path: Path):
    def small() -> None:
        alone()
        mount("/dev/shm", 16)

    file = written(tmp_path / "a.yaml", engine="workers:2", rounds=1)
    code, _, errors = fedflat("run", file, "--out", tmp_path / "run", before=small)
    assert (code, errors) == (0, "")


def test_a_disk_that_is_read_only(can_mount: None, tmp_path: Path):
    """No temporary folder at all."""
    place, file = tmp_path / "disk", written(tmp_path / "a.yaml", engine="workers:2", rounds=1)
    place.mkdir()

    def frozen() -> None:
        alone()
        mount(place, 64)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        shared_memory._SHARED_MEMORY = place
        tempfile.tempdir = str(place)

    code, _, errors = fedflat("run", file, "--set", "engine=inprocess", "--out", place / "run", before=frozen)
    one_sentence(code, errors)
    assert f"Cannot write to {place / 'run'} (Read-only file system)" in errors
    code, _, errors = fedflat("run", file, "--out", tmp_path / "run", before=frozen)
    one_sentence(code, errors)
    assert "(Read-only file system)" in errors and "engine='inprocess'" in errors
    state = ("--set", "engine=inprocess", "--set", "state_memory=0")
    code, _, errors = fedflat("run", *state, "--rounds", 1, "--method", "scaffold", before=frozen)
    one_sentence(code, errors)
    assert "cannot be opened: Read-only file system" in errors


def test_all_room_is_taken_at_once(tmp_path: Path, monkeypatch):
    """A file with holes would end the process that writes to it when the disk is full by then."""
    monkeypatch.setattr(shared_memory, "_SHARED_MEMORY", tmp_path)
    made = SharedMemory.make({"a": 300_000, "b": 7}, torch.float64)
    assert os.fstat(made._handle).st_blocks * 512 >= 300_007 * 8
    made.close()

    def full(handle: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ff.FedflatError, match=r"share 2\.4 MB.*No space left.*set TMPDIR.*fewer workers"):
        SharedMemory.make({"a": 300_000}, torch.float64)
    assert not list(tmp_path.iterdir())


def test_files_that_may_not_be_large(tmp_path: Path):
    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    file = written(tmp_path / "a.yaml", engine="workers:2")
    code, _, errors = fedflat("run", file, "--out", tmp_path / "run", before=limited)
    one_sentence(code, errors)
    assert "(File too large)" in errors


@pytest.mark.parametrize("spare", [0, 1, 2, 3, 6, 9, 14])
def test_too_few_open_files(spare: int, tmp_path: Path):
    """Whatever it is that cannot be opened: a sentence names it, or everything can be opened."""

    def limited() -> None:
        lowest = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (lowest + spare, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )

    arguments = ("run", written(tmp_path / "a.yaml", engine="workers:4", rounds=1), "--out", tmp_path / "run")
    code, _, errors = fedflat(*arguments, before=limited)
    one_sentence(code, errors)
    assert "Too many open files" in errors
    code, _, errors = fedflat("resume" if code == 0 else "run", *arguments[1:])
    assert code == 0, errors


def test_what_is_said_before_the_first_checkpoint(tmp_path: Path):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told: list[str] = []
    for done in (1, 3):

        def fill(round: Any, done: int = done) -> None:
            if round.index + 1 == done:
                monkeypatch.setattr(os, "fsync", full)

        with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(ff.FedflatError) as caught:
            train(out=tmp_path / str(done), rounds=4, checkpoint_every=2, on_round=fill)
        told.append(str(caught.value))
    assert "There is no checkpoint yet: make room" in told[0] and "intact" not in told[0]
    assert "Earlier checkpoints are intact: make room" in told[1]


# -- spawned processes -----------------------------------------------------------------------------

SCRIPT = """
import torch, fedflat as ff
data = ff.Federation([(torch.randn({samples}, 6), torch.randint(3, ({samples},))) for _ in range(2)])
try:
    ff.train(data, torch.nn.Linear(6, 3), "fedavg", rounds=1, engine=ff.Workers(1, start_method="spawn"))
    print("trained")
except ff.FedflatError as problem:
    print("Error:", problem)
"""
NOTEBOOK = """
import torch, fedflat as ff
class Net(torch.nn.Linear): pass
data = ff.Federation([(torch.randn(9, 6), torch.randint(3, (9,)))])
try:
    ff.train(data, Net(6, 3), "fedavg", rounds=1, engine=ff.Workers(1, start_method="spawn"))
except ff.FedflatError as problem:
    print("Error:", problem)
"""


@pytest.mark.parametrize("samples", [10, 30_000], ids=["little data", "more than a pipe holds"])
def test_spawn_without_a_main_guard(samples: int, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(samples=samples))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stdout.startswith("Error: A worker process ended before it began. ")
    assert '`if __name__ == "__main__":`' in done.stdout
    assert "Traceback" not in done.stderr


def test_spawn_with_a_class_of_a_notebook():
    """A prompt is as good as a notebook: nobody can import it."""
    done = subprocess.run([sys.executable, "-"], input=NOTEBOOK, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("Error: Net is defined in a notebook or at a prompt")
    assert "Put it into a file" in done.stdout
    assert "Traceback" not in done.stderr


# -- Ctrl-C ----------------------------------------------------------------------------------------

MOMENTS = 6
"""at which the command is interrupted, evenly spaced over its life"""
BEGUN = (
    "import fedflat, os, runpy; os.write(1, b'begun\\n'); runpy.run_module('fedflat', run_name='__main__')"
)


def start(*arguments: object) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", BEGUN, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


@pytest.mark.slow
def test_ctrl_c_at_any_moment(tmp_path: Path):
    """Imports, arguments, data, workers, rounds, tests, files: a clean end, and what is there goes on."""
    whole, file = tmp_path / "whole", written(tmp_path / "a.yaml", engine="workers:2", rounds=12)
    process, began = start("run", file, "--out", whole), time.monotonic()
    assert process.wait(300) == 0
    length = time.monotonic() - began
    codes = []
    for moment in range(MOMENTS):
        out = tmp_path / f"run-{moment}"
        process = start("run", file, "--out", out)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(length * (moment + 0.5) / MOMENTS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        said, errors = process.communicate(timeout=300)
        codes.append(process.returncode)
        assert process.returncode in (0, 130), errors
        assert "Traceback" not in said + errors and "Exception" not in said + errors, errors
        if process.returncode == 130:
            assert "Interrupted." in errors or "Stopped" in said
        begun = (out / "metrics.jsonl").exists()
        code, _, errors = fedflat(*(("resume", out) if begun else ("run", file, "--out", out)))
        assert code == 0, errors
        same_run(out, whole)
    assert 130 in codes
