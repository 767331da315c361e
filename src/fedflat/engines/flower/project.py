"""Writing a small, complete Flower app."""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from ...errors import FedflatError, explained


def write_project(path: Path) -> list[Path]:
    """Write an app into a directory that is empty or not there yet; its files."""
    name = re.sub(r"[^a-z0-9]+", "-", path.resolve().name.lower()).strip("-")
    if not name or not name[0].isalpha():
        raise FedflatError(f"'{path.name}' cannot name a project: begin with a letter, such as hospitals.")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FedflatError(f"{path} is there already and not empty. Choose another name.")
    template = resources.files(__package__).joinpath("template")
    with explained(f"{path} cannot be written"):
        return _copy(template, path, name)


def _copy(source: Traversable, to: Path, name: str) -> list[Path]:
    to.mkdir(parents=True, exist_ok=True)
    written = []
    for entry in sorted(source.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            if entry.name != "__pycache__":
                written += _copy(entry, to / entry.name, name)
        else:
            target = to / entry.name
            target.write_text(entry.read_text("utf-8").replace("PROJECT", name), "utf-8")
            written.append(target)
    return written
