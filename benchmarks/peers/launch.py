"""Runs other federated learning libraries, each in a virtual environment of its own.

`launch("pfl", "W1", rounds=5, threads=2)` makes the environment when it is missing, runs `run_pfl.py` with it and
returns what that printed, or the reason why there is nothing: it never raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VENVS = Path(os.environ.get("FEDFLAT_BENCH_VENVS") or HERE.parent / ".venvs")
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "offline",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}


def launch(
    peer: str,
    workload: str,
    rounds: int = 3,
    threads: int = 1,
    processes: int = 1,
    epochs: int = 5,
    *,
    loader: bool = False,
    venvs: Path = VENVS,
    timeout: float = 3600,
) -> dict[str, Any]:
    """What `run_<peer>.py` reports of `rounds` rounds after a first that warms up, or `{"error": why not}`."""
    layout = {"peer": peer, "workload": workload, "processes": processes, "threads": threads}
    try:
        python = _python(peer, venvs.resolve())
        start = [str(python)]
        if peer == "pfl" and processes > 1:  # as its guide to distributed simulations says
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        script = [str(HERE / f"run_{peer}.py"), "--workload", workload, "--rounds", str(rounds)]
        script += ["--threads", str(threads), "--processes", str(processes), "--epochs", str(epochs)]
        script += ["--loader"] * loader
        out = _run([*start, *script], threads, timeout)
        return next(json.loads(line) for line in reversed(out.splitlines()) if line.startswith("{"))
    except subprocess.TimeoutExpired:
        return layout | {"error": f"not done after {timeout:.0f} s"}
    except Exception as error:
        return layout | {"error": str(error) or type(error).__name__}


def installed(peer: str, venvs: Path = VENVS) -> bool:
    """Whether the peer's environment is there, with what its requirements say."""
    done = venvs / peer / "installed.txt"
    return done.exists() and done.read_text() == _requirements(peer).read_text()


def _requirements(peer: str) -> Path:
    return HERE.parent / "requirements" / f"{peer}.txt"


def _python(peer: str, venvs: Path) -> Path:
    """The interpreter of the peer's environment, made and filled when missing or when its requirements changed."""
    requirements, venv = _requirements(peer), venvs / peer
    python = venv / "bin" / "python"
    if not installed(peer, venvs):
        venvs.mkdir(parents=True, exist_ok=True)
        (venvs / ".gitignore").write_text("*\n")
        _run([sys.executable, "-m", "venv", "--clear", str(venv)])
        _run([str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)])
        (venv / "installed.txt").write_text(requirements.read_text())
    return python


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A short-lived working directory: Ray, Flower and fluke leave files where they run."""
    path = Path(tempfile.mkdtemp(prefix="peer-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _run(command: list[str], threads: int = 1, timeout: float = 3600) -> str:
    """The command's standard output; its whole process group is ended when it takes too long."""
    with _scratch() as scratch:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | QUIET
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        environment |= {"FLWR_HOME": str(scratch / "flwr"), "RAY_TMPDIR": str(scratch / "ray")}
        with subprocess.Popen(
            command,
            cwd=scratch,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, errors = process.communicate(timeout=timeout)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode:
            raise RuntimeError(_reason(errors or out) or f"exit code {process.returncode}")
        return out


def _reason(text: str) -> str:
    """The last line that names an error, else the last line at all; torchrun's own says nothing."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" =-*")]
    errors = r"^(\[rank\d+\]: )?[\w.]*(?<!ChildFailed)(Error|Exception|ERROR)\b"
    return ([line for line in lines if re.search(errors, line)] or lines or [""])[-1][:300]
