"""CIFAR-10 and CIFAR-100 as their author distributes them: pickled batches, in a folder or a tar file."""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import FedflatError
from . import Split

BATCHES = {
    "cifar10": ([f"data_batch_{i}" for i in range(1, 6)], ["test_batch"], "batches.meta"),
    "cifar100": (["train"], ["test"], "meta"),
}
_HARMLESS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _ArraysOnly(pickle.Unpickler):
    """A pickle can run any code when it is read; this one may only build arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _HARMLESS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a CIFAR file")


def read_cifar(name: str, place: Path) -> tuple[Split, Split]:
    """Training and test images (n, 32, 32, 3) from a folder of batches or the tar file."""
    train, test, meta = BATCHES[name]
    label = b"labels" if name == "cifar10" else b"fine_labels"
    try:
        names = _load(place, meta)[b"label_names" if name == "cifar10" else b"fine_label_names"]
        class_names = [n.decode() for n in names]
    except (KeyError, AttributeError, TypeError):
        raise FedflatError(f"{place}: '{meta}' holds no names of classes; fetch it again.") from None
    return _split(place, train, label, class_names), _split(place, test, label, class_names)


def _split(place: Path, batches: Sequence[str], label: bytes, class_names: list[str]) -> Split:
    loaded = [_load(place, batch) for batch in batches]
    try:
        pixels = np.concatenate([np.asarray(batch[b"data"], dtype=np.uint8) for batch in loaded])
        labels = np.concatenate([np.asarray(batch[label], dtype=np.int64) for batch in loaded])
        images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images, {len(labels)} labels")
    except (KeyError, ValueError) as problem:
        raise FedflatError(
            f"{place}: {', '.join(batches)} are not CIFAR batches ({problem}); fetch them again."
        ) from None
    return Split(np.ascontiguousarray(images), labels, class_names=class_names)


def _load(place: Path, batch: str) -> dict[bytes, Any]:
    try:
        loaded = _ArraysOnly(io.BytesIO(_bytes(place, batch)), encoding="bytes").load()
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        IndexError,
        KeyError,
        tarfile.TarError,
        OSError,
        zlib.error,
    ) as problem:
        reason = str(problem).splitlines()[0]
        raise FedflatError(f"{place}: '{batch}' cannot be read ({reason}); fetch it again.") from None
    if not isinstance(loaded, dict):
        raise FedflatError(f"{place}: '{batch}' holds no CIFAR batch; fetch it again.")
    return loaded


def _bytes(place: Path, batch: str) -> bytes:
    if place.is_dir():
        return (place / batch).read_bytes()
    with tarfile.open(place) as archive:
        member = next((m for m in archive.getmembers() if Path(m.name).name == batch), None)
        file = archive.extractfile(member) if member is not None else None
        if file is None:
            raise FedflatError(f"{place} holds no '{batch}'; fetch it again.")
        content = file.read()
        while archive.fileobj is not None and archive.fileobj.read(1 << 20):
            pass  # to the end, where gzip has its checksum
        return content
