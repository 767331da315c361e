"""What measurements depend on: the machine and the versions. No names and no paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def machine() -> dict[str, str]:
    cpu = _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    memory = int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20
    return {
        "CPU": f"{cpu}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "fedflat")}
    packages["fedflat"] += f" ({_commit()})"
    return {"Python": platform.python_version(), **packages}


def available_memory() -> int:
    """Bytes."""
    return 1024 * int(_field("/proc/meminfo", "MemAvailable").split()[0])


def _field(file: str, name: str) -> str:
    with open(file) as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = "with changes" if git("status", "--porcelain", "--", "src") else ""
    return " ".join(filter(None, [git("rev-parse", "--short", "HEAD") or "no commit", changed]))
