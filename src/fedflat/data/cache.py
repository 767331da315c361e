"""Decoded datasets in memory-mapped files, so that 50,000 images are decoded once in a machine's life.

A cache file is a safetensors file: its header says what it was made from and carries checksums of its arrays.
It is written beside its final place and moved there in one step, under a lock, so that two processes neither decode
the same files twice nor see half a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import FedflatError

FORMAT = 2
"""Raise it when what is stored changes, so that old files are made anew."""

Stored = tuple[dict[str, Tensor], dict[str, str]]
"""Arrays and texts by name."""


def cache_directory() -> Path:
    """`FEDFLAT_CACHE`, or `fedflat` in the user's cache directory."""
    given = os.environ.get("FEDFLAT_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedflat"


def cached(name: str, sources: Sequence[Path], decode: Callable[[], Stored]) -> Stored:
    """What `decode` gives, from the cache if it was made of these very source files before."""
    path = cache_directory() / f"{name}-{fingerprint(sources)}.safetensors"
    found = _read(path)
    if found is not None:
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".lock").touch()
    except OSError:
        return decode()  # nowhere to keep it: slower, but it works
    with _locked(path.with_suffix(".lock")):
        found = _read(path)  # another process may have made it while we waited
        if found is None:
            with Console(stderr=True).status(f"Reading {name} (only the first time)"):
                arrays, texts = decode()
            found = (arrays, texts) if _write(path, arrays, texts) is None else _read(path)
    return found if found is not None else decode()


def fingerprint(sources: Sequence[Path]) -> str:
    """Changes when a source is replaced: names, sizes and times of change; of a folder, its subfolders'."""
    places = [place for source in sources for place in (source, *_subfolders(source))]
    facts = [FORMAT, *((str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in places)]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def _subfolders(place: Path) -> list[Path]:
    """Two levels down: adding or removing an image changes the time of the folder it is in."""
    if not place.is_dir():
        return []
    return sorted(p for pattern in ("*/", "*/*/") for p in place.glob(pattern) if p.is_dir())


def _write(path: Path, arrays: dict[str, Tensor], texts: dict[str, str]) -> Path | None:
    """Write and move into place; None where there is no room."""
    header = {
        **texts,
        "checksums": json.dumps({**{k: _checksum(v) for k, v in arrays.items()}, "": _text_checksum(texts)}),
    }
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    except OSError:
        return None
    os.close(handle)
    try:
        save_file({k: v.contiguous() for k, v in arrays.items()}, temporary, header)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except (OSError, SafetensorError):
        Path(temporary).unlink(missing_ok=True)
        return None
    return path


def _read(path: Path) -> Stored | None:
    """The arrays, mapped into memory; None where there is no sound file."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        checksums = json.loads(header.pop("checksums"))
        if checksums[""] != _text_checksum(header):
            raise FedflatError("wrong checksum")
        if any(checksums[name] != _checksum(array) for name, array in arrays.items()):
            raise FedflatError("wrong checksum")
    except (SafetensorError, FedflatError, KeyError, OSError, ValueError):
        print(f"{path} is damaged; it is made anew.", file=sys.stderr)
        path.unlink(missing_ok=True)
        return None
    return arrays, header


def _checksum(array: Tensor) -> int:
    flat = array.contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)


def _text_checksum(texts: dict[str, str]) -> int:
    return zlib.crc32(json.dumps(texts, sort_keys=True).encode())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file; where the system has no file locks, do without (moves are atomic anyway)."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
