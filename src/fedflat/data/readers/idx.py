"""IDX files, the form of Fashion-MNIST, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from ...errors import FedflatError
from . import Split

FILES = (
    ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)
_BYTES = 0x08


def find_idx(folder: Path) -> list[Path] | None:
    """The four files, if they are all there."""
    found = [
        next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
        for pair in FILES
        for name in pair
    ]
    return None if None in found else [p for p in found if p is not None]


def read_idx(files: list[Path]) -> tuple[Split, Split]:
    """Training and test images (n, height, width, 1)."""
    splits = []
    for images, labels in (files[:2], files[2:]):
        pixels, numbers = read_array(images), read_array(labels)
        if len(pixels) != len(numbers):
            raise FedflatError(
                f"{images} has {len(pixels)} images, {labels} {len(numbers)} labels; fetch them again."
            )
        splits.append(Split(pixels[..., None], numbers.astype(np.int64)))
    return splits[0], splits[1]


def read_array(path: Path) -> np.ndarray:
    """One IDX file of bytes."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zero, kind, dimensions = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
    except (struct.error, EOFError, gzip.BadGzipFile, zlib.error) as problem:
        raise FedflatError(f"{path} is no IDX file or is cut short ({problem}); fetch it again.") from None
    if zero != 0 or kind != _BYTES:
        raise FedflatError(f"{path} is no IDX file of bytes; fetch it again.")
    header = 4 + 4 * dimensions
    if len(content) != header + math.prod(shape):
        raise FedflatError(
            f"{path} should have {header + math.prod(shape):,} bytes, it has {len(content):,}: "
            "it is cut short or damaged; fetch it again."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape).copy()
