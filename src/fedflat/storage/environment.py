"""The environment of a run: versions, machine, and the state of the code."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..errors import FedflatError

PACKAGES = ("torch", "numpy", "safetensors", "ray", "flwr")


def environment() -> dict[str, Any]:
    """Return versions, the machine without its name, and the commits of the working directory and of fedflat."""
    from .. import __version__

    return {
        "fedflat": __version__,
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name)) is not None},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "git": _git(Path.cwd()),
        "source": _source(),
    }


def check_device(device: torch.device | str) -> None:
    """Raise if this machine does not have the device."""
    try:
        torch.zeros(1, device=device).item()  # 'meta' has shapes and no numbers
    except Exception:  # each kind of device has its own way to say that it is not there
        raise FedflatError(
            f"'{device}' cannot be used here: write cpu, or cuda on a machine with a GPU."
        ) from None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _git(place: Path) -> dict[str, Any] | None:
    """The commit, and whether tracked files differ from it; None outside of a repository."""
    commit = _run_git(place, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _run_git(place, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": bool(changes)}


def _source() -> dict[str, Any] | None:
    """The commit of fedflat's own code; None where it is installed, with a version that says enough."""
    here = Path(__file__).resolve()
    # an installed copy may lie inside a repository that does not track it
    tracked = _run_git(here.parent, "ls-files", "--error-unmatch", here.name)
    return None if tracked is None else _git(here.parent)


def _run_git(place: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=place, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
