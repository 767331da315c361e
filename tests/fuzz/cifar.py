"""CIFAR as its author packs it: a pickled batch in a folder, or the whole tar file."""

from __future__ import annotations

import io
import pickle
import random
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "cifar-10-batches-py"
OTHERS = [f"data_batch_{number}" for number in range(2, 6)] + ["test_batch"]
VALUES: list[Any] = [
    None, 0, -1, 10, 2**70, 0.5, "a", b"a", [], [0], [[0]], {}, np.zeros(3), np.zeros((2, 3072), np.int16),
    np.zeros((1, 3072), np.uint8), np.zeros((3, 2, 3072), np.uint8), np.array([None]),
]  # fmt: skip
CODE = [
    b"cos\nsystem\n(S'true'\ntR",
    b"cnumpy\ndtype\n(S'O'\ntR",
    b"cnumpy\nndarray\n(tR",
    b"}b",
    b"0",
    b"r\xff\xff\xff\x7f",
]


def batch(count: int = 2, **changes: Any) -> bytes:
    content = {b"data": np.zeros((count, 3072), np.uint8), b"labels": [n % 10 for n in range(count)]}
    return pickle.dumps(content | {key.encode(): value for key, value in changes.items()}, protocol=2)


def seeds() -> Iterator[bytes]:
    """A batch, and tar files, plain and gzipped."""
    yield batch()
    for mode in ("w", "w:gz"):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode=mode) as archive:
            for name, content in _sound(batch()).items():
                member = tarfile.TarInfo(f"{FOLDER}/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        yield file.getvalue()


def mutate(data: bytes, dice: random.Random) -> bytes:
    """A sound pickle of other things; or other instructions in this one."""
    if dice.random() < 0.4:
        return batch(**{dice.choice(("data", "labels")): dice.choice(VALUES)})
    at = dice.randrange(len(data) + 1)
    return data[:at] + dice.choice(CODE) + data[at:]


def check(data: bytes) -> None:
    """Read as one of the batches in a folder, as the names of classes, and as a tar file."""
    from fedflat import FedflatError
    from fedflat.data.readers.cifar import read_cifar

    refusals = []
    with tempfile.TemporaryDirectory() as folder:
        place, packed = Path(folder) / FOLDER, Path(folder) / "cifar-10-python.tar.gz"
        place.mkdir()
        packed.write_bytes(data)
        for name, content in _sound(data).items():
            (place / name).write_bytes(content)
        named = place.with_name("named")
        _copy(place, named)
        (named / "data_batch_1").write_bytes(batch())
        (named / "batches.meta").write_bytes(data)
        for form in (place, named, packed):
            try:
                for split in read_cifar("cifar10", form):
                    assert split.inputs.dtype == np.uint8 and split.inputs.shape[1:] == (32, 32, 3)
                    assert split.labels.dtype == np.int64 and split.labels.shape == (len(split.inputs),)
                    assert 0 <= split.labels.min() <= split.labels.max() < len(split.class_names) == 10
            except FedflatError as refusal:
                told = str(refusal)
                assert "\n" not in told and "fetch it again" in told, "a refusal is one sentence"
                assert "cannot be read" in told or "holds no" in told
                refusals.append(refusal)
    if len(refusals) == 3:
        raise refusals[0]


def _sound(first: bytes) -> dict[str, bytes]:
    names = pickle.dumps({b"label_names": [b"class %d" % number for number in range(10)]}, protocol=2)
    return {"batches.meta": names, "data_batch_1": first, **dict.fromkeys(OTHERS, batch())}


def _copy(place: Path, to: Path) -> None:
    to.mkdir()
    for path in place.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
