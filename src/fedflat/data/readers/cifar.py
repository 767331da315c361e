"""CIFAR-10 and CIFAR-100 as their author distributes them: pickled batches, in a folder or a tar file."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import FedflatError, reason_of
from . import Split

BATCHES = {
    "cifar10": ([f"data_batch_{i}" for i in range(1, 6)], ["test_batch"], "batches.meta"),
    "cifar100": (["train"], ["test"], "meta"),
}
CLASSES = {"cifar10": 10, "cifar100": 100}
LARGEST = 1 << 30
"""Bytes of a batch, several times those of a true one."""


class _Array:
    """What stands for an array while a pickle is read, and takes its state; numpy's own could be misled by it."""

    def __init__(self, *_: Any) -> None:
        self.array: np.ndarray | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, columns_first, content = state
        array = np.frombuffer(content, dtype=kind.of)
        self.array = array.reshape(shape, order="F" if columns_first else "C")


class _WholeNumbers:
    """What stands for a dtype; its name is all that is taken."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.of = np.dtype(name.decode() if isinstance(name, bytes) else str(name))
        if self.of.kind not in "iu":
            raise pickle.UnpicklingError(f"{self.of} does not belong in a CIFAR file")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in (">", b">"):
            self.of = self.of.newbyteorder(">")


def _encode(text: str, how: str) -> bytes:
    """As Python 3 writes bytes into old pickles."""
    if how not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"text in '{how}' does not belong in a CIFAR file")
    return text.encode("latin1")


_STANDING_FOR: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _WholeNumbers,
    ("_codecs", "encode"): _encode,
}


class _ArraysOnly(pickle._Unpickler):
    """A pickle can run any code when it is read; this one runs none but what stands above.

    It is the one in Python: a few bytes make the other one take all memory, for a memo that they say is so long.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STANDING_FOR:
            return _STANDING_FOR[module, name]
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a CIFAR file")


def read_cifar(name: str, place: Path) -> tuple[Split, Split]:
    """Training and test images (n, 32, 32, 3) from a folder of batches or the tar file."""
    train, test, meta = BATCHES[name]
    label = b"labels" if name == "cifar10" else b"fine_labels"
    names = _load(place, meta).get(b"label_names" if name == "cifar10" else b"fine_label_names")
    try:
        class_names = [n.decode() for n in names or ()]
        if len(set(class_names)) != CLASSES[name]:
            raise ValueError
    except (AttributeError, TypeError, ValueError):
        raise FedflatError(
            f"{place}: '{meta}' cannot be read (it should have the names of {CLASSES[name]} classes); fetch it again."
        ) from None
    return _split(place, train, label, class_names), _split(place, test, label, class_names)


def _split(place: Path, batches: Sequence[str], label: bytes, class_names: list[str]) -> Split:
    loaded = [(batch, _load(place, batch)) for batch in batches]
    pixels, labels = [], []
    for name, batch in loaded:
        try:
            pixels.append(_whole_numbers(batch[b"data"], 255))
            labels.append(_whole_numbers(batch[label], len(class_names) - 1))
            if pixels[-1].shape != (len(labels[-1]), 3 * 32 * 32) or labels[-1].ndim != 1:
                raise ValueError(f"images {pixels[-1].shape}, labels {labels[-1].shape}")
        except Exception as problem:  # there may be anything in it
            reason = f"it has no {problem}" if isinstance(problem, KeyError) else reason_of(problem)
            raise FedflatError(f"{place}: '{name}' cannot be read ({reason}); fetch it again.") from None
    images = np.concatenate(pixels).astype(np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Split(np.ascontiguousarray(images), np.concatenate(labels), class_names=class_names)


def _whole_numbers(found: Any, largest: int) -> np.ndarray:
    """An array or list of a batch, if there is nothing in it but numbers from 0 to the largest."""
    array = np.asarray(found.array if isinstance(found, _Array) else found)
    if array.dtype.kind not in "iu" or array.size == 0:
        raise ValueError(f"{array.size} values of type {array.dtype} where whole numbers should be")
    if array.min() < 0 or array.max() > largest:
        raise ValueError(f"a number beyond 0 to {largest}")
    return array.astype(np.int64) if largest != 255 or array.dtype != np.uint8 else array


def _load(place: Path, batch: str) -> dict[bytes, Any]:
    try:
        loaded = _ArraysOnly(io.BytesIO(_bytes(place, batch)), encoding="bytes").load()
    except FedflatError:
        raise
    except Exception as problem:  # a damaged pickle can make its reader stumble anywhere
        raise FedflatError(
            f"{place}: '{batch}' cannot be read ({reason_of(problem)}); fetch it again."
        ) from None
    if not isinstance(loaded, dict):
        raise FedflatError(f"{place}: '{batch}' cannot be read (it is no CIFAR batch); fetch it again.")
    return loaded


def _bytes(place: Path, batch: str) -> bytes:
    if place.is_dir():
        return (place / batch).read_bytes()
    with tarfile.open(place) as archive:
        member = next((m for m in archive.getmembers() if Path(m.name).name == batch), None)
        file = archive.extractfile(member) if member is not None else None
        if file is None:
            raise FedflatError(f"{place} holds no '{batch}'; fetch it again.")
        if member is not None and member.size > LARGEST:
            raise ValueError(f"it claims to have {member.size:,} bytes")
        content = file.read()
        while archive.fileobj is not None and archive.fileobj.read(1 << 20):
            pass  # to the end, where gzip has its checksum
        return content
