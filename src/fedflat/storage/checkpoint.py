"""Checkpoints of the server: vectors and numbers by name in one file, with a checksum over both."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..core.vector_memory import memory
from ..errors import FedflatError
from .files import replace_file
from .formats import CHECKPOINT, check_file


def write_checkpoint(path: Path, vectors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Write a checkpoint in one step; when this returns it has reached the disk."""
    text = json.dumps(numbers)
    header = {"format": CHECKPOINT, "numbers": text, "checksum": str(_checksum(vectors, text))}
    replace_file(path, save(_apart(vectors), header))


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint; a damaged one is an error."""
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            # copies, in memory as any vector's: products' last bits may depend on where in memory vectors lie
            vectors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        check_file(path, header["format"], CHECKPOINT)
        sound = header["checksum"] == str(_checksum(vectors, header["numbers"]))
        numbers = json.loads(header["numbers"])
    except (SafetensorError, KeyError, OSError, ValueError, RuntimeError) as problem:
        if isinstance(problem, FedflatError):
            raise
        raise FedflatError(f"{path} is damaged: {str(problem).splitlines()[0]}.") from None
    if not sound:
        raise FedflatError(f"{path} is damaged: its checksum differs.")
    return vectors, numbers


def check_version(path: Path) -> None:
    """Raise if a sound checkpoint is of another version; damage is found when it is read."""
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
    except (SafetensorError, OSError):
        return
    if "format" in header:
        check_file(path, header["format"], CHECKPOINT)


def _apart(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy vectors that share memory, which the format refuses, and move all to the CPU."""
    seen: set[int] = set()
    result = {}
    for name, vector in vectors.items():
        here = vector.detach().cpu()
        result[name] = here.clone() if here.data_ptr() in seen else here
        seen.add(here.data_ptr())
    return result


def _checksum(vectors: dict[str, Tensor], text: str) -> int:
    total = zlib.crc32(text.encode())
    for name in sorted(vectors):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(memory(vectors[name]), total)
    return total
