"""A SuperLink and SuperNodes on this machine, with TLS and a key for every node, in a folder of their own."""

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fedflat.engines.flower.keys import make_keys

BIN = Path(sys.executable).parent
NODES = 3
PATIENCE = 600
"""Seconds; on an idle machine a round takes ten."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Loopback:
    """Everything in one folder; every process in a group of its own, ended when the tests are."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("FLWR_", "FEDFLAT_"))},
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_HOME": str(home / "flwr"),
            "FEDFLAT_RUNS": str(home / "runs"),
            "HOME": str(home),
            "OMP_NUM_THREADS": "1",
        }
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.keys = home / "keys"
        make_keys(self.keys, NODES + 1, ["127.0.0.1"], self.port)
        (home / "flwr").mkdir()
        shutil.copy(self.keys / "superlink.toml", home / "flwr" / "config.toml")

    def launch(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.home / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                cwd=self.home,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def log(self, name: str) -> str:
        return (self.home / f"{name}.log").read_text("utf-8", "replace")

    def start_server(self) -> None:
        self.launch(
            *("superlink", "flower-superlink", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--ssl-ca-certfile", f"{self.keys}/ca.crt", "--ssl-certfile", f"{self.keys}/server.pem"),
            *("--ssl-keyfile", f"{self.keys}/server.key", "--enable-supernode-auth"),
            "--disable-runtime-dependency-installation",
        )
        trusted = ssl.create_default_context(cafile=str(self.keys / "ca.crt"))

        def healthy() -> bool:
            try:
                url = f"https://127.0.0.1:{self.port}/health"
                with urllib.request.urlopen(url, context=trusted, timeout=2) as answer:
                    return answer.status == 200
            except OSError:
                return False

        wait_for(healthy, 60, lambda: self.log("superlink"))

    def start(self, configs: Sequence[str] = ("",) * NODES) -> None:
        """The server, and a registered node for every config."""
        self.start_server()
        with ThreadPoolExecutor() as pool:  # Flower's command line takes seconds to start
            keys = (f"{self.keys}/node-{number}.pub" for number in range(len(configs)))
            list(pool.map(lambda key: self.flwr("supernode", "register", key, "federation"), keys))
        for number, config in enumerate(configs):
            self.start_node(number, config=config)

    def start_node(
        self, number: int, name: str | None = None, secure: tuple[str, ...] | None = None, config: str = ""
    ) -> None:
        if secure is None:
            secure = (
                *("--root-certificates", f"{self.keys}/ca.crt"),
                *("--auth-supernode-private-key", f"{self.keys}/node-{number}"),
            )
        self.launch(
            *(name or f"node-{number}", "flower-supernode", "--superlink", f"127.0.0.1:{self.port}", *secure),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            "--node-config",
            f"partition-id={number} num-partitions={NODES} state-dir='{self.home}/state-{number}' {config}".strip(),
        )

    def revive(self, number: int) -> None:
        """Start a node until it stays: Flower lets it in again only when its heartbeat has been missed twice."""
        name = f"node-{number}"
        before = self.log(name).count("SuperNode ID")
        end = time.monotonic() + PATIENCE
        while self.log(name).count("SuperNode ID") == before:
            assert time.monotonic() < end, self.log(name)
            if name not in self.processes:
                self.start_node(number)
            elif self.processes[name].poll() is not None:
                self.kill(name)
            time.sleep(1)

    def flwr(self, *command: str) -> str:
        done = subprocess.run(
            [str(BIN / "flwr"), *command], env=self.env, cwd=self.home, capture_output=True, timeout=120
        )
        told = (done.stdout + done.stderr).decode()
        assert done.returncode == 0, told
        return told

    def submit(self, name: str, **config: object) -> subprocess.Popen[bytes]:
        """Start a run of the app; its log goes to a file."""
        settings = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in config.items())
        return self.launch(name, "flwr", "run", "app", "federation", "--stream", "--run-config", settings)

    def run(self, name: str, **config: object) -> str:
        process = self.submit(name, **config)
        wait_for(lambda: process.poll() is not None, PATIENCE, lambda: self.everything(name))
        return self.log(name)

    def everything(self, *names: str) -> str:
        return "\n".join(f"== {n}\n{self.log(n)[-4000:]}" for n in (*names, *self.processes))

    def kill(self, name: str) -> None:
        """A process and all that it started, at once."""
        process = self.processes.pop(name)
        for pid in (process.pid, *descendants(process.pid)):
            end(pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for process in self.processes.values():
            end(process.pid, signal.SIGTERM)
        until = time.monotonic() + 5
        while living(self.home) and time.monotonic() < until:
            time.sleep(0.1)
        for pid in living(self.home):
            end(pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()


def end(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def descendants(pid: int, what: str = "") -> list[int]:
    """The processes that one has started, and those they have, that run a certain program."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, last = [], [pid]
    while last:
        last = [child for child, parent in parents.items() if parent in last]
        found += last
    return [child for child in found if what in command(child)]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def started(pid: int) -> float:
    """When a process began, in seconds since 1970; 0 where there is none."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    since_boot = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - since_boot + ticks / os.sysconf("SC_CLK_TCK")


def living(home: Path) -> list[int]:
    """All processes whose home directory this is, dead ones left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if f"HOME={home}\0".encode() in (entry / "environ").read_bytes() + b"\0":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_for(condition: Callable[[], bool], seconds: float, explain: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, explain()
        time.sleep(0.2)
