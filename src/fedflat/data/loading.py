"""Finding datasets on disk, in whichever form they lie there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ..errors import FedflatError, MissingExtra
from .cache import Stored, cache_directory, cached
from .dataset import Dataset
from .readers import Split


@dataclass(frozen=True)
class Found:
    """Source files, and how to decode them."""

    files: list[Path]
    decode: Callable[[], Stored]


@dataclass(frozen=True)
class Source:
    """One dataset: the folders it may lie in, the forms it is read from, and how to build it."""

    name: str
    folders: tuple[str, ...]
    forms: str
    """the accepted files, for a person to read"""
    hub: str
    """its name on the Hugging Face hub; empty if it is not there in a form that is read"""
    find: Callable[[Path], Found | None]
    """what there is of it in a folder"""
    build: Callable[[Stored], Dataset]
    how: str = ""
    """where it comes from"""


def load(source: Source, directory: str | Path | None = None, download: bool = False) -> Dataset:
    """A dataset from the first place that has it; looks in `directory` only, if it is given."""
    folder = locate(source, directory)
    if folder is None and download:
        folder = fetch(source)
    found = None if folder is None else source.find(folder)
    if found is not None:
        return source.build(cached(source.name, found.files, partial(_decode, found)))
    online = ", or, when online, add --download" if source.hub else ""
    folders = [folder for folder in source.folders if folder != "."]
    raise FedflatError(
        f"There is no {source.name} here. Looked in {', '.join(str(root) for root in roots(directory))}, and "
        f"there in {', '.join(folders)}. It may be {source.forms}. {source.how} "
        f"Name its folder with --data DIR or FEDFLAT_DATA{online}."
    )


class _Labels(FedflatError):
    """Wrong labels, before it is known in which files."""


def _decode(found: Found) -> Stored:
    try:
        return found.decode()
    except _Labels as mistake:
        raise FedflatError(f"{found.files[-1]}: {mistake} Fetch it again.") from None


def locate(source: Source, directory: str | Path | None = None) -> Path | None:
    """The first folder that has the dataset in a form that is read."""
    folders = (f for f in candidates(source, directory) if f.is_dir())
    return next((folder for folder in folders if source.find(folder) is not None), None)


def roots(directory: str | Path | None) -> list[Path]:
    """The directories that may hold datasets."""
    if directory is not None:
        return [Path(directory)]
    given = os.environ.get("FEDFLAT_DATA", "")
    named = [Path(part).expanduser() for part in given.split(os.pathsep) if part]
    return [*named, Path("data"), Path.home() / "data", cache_directory() / "datasets", _hub_cache()]


def candidates(source: Source, directory: str | Path | None) -> Iterator[Path]:
    """Folders to look into: the dataset's own names first, then the directory itself."""
    for root in roots(directory):
        yield from (root / folder for folder in source.folders)
        hub = root / f"datasets--{source.hub.replace('/', '--')}" / "snapshots"
        if source.hub and hub.is_dir():
            for snapshot in sorted(hub.iterdir()):
                yield from (snapshot, *(snapshot / name for name in source.folders if name != "."))
        if directory is not None:
            yield root


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def fetch(source: Source) -> Path:
    """Download a dataset into the cache directory, as Parquet."""
    if not source.hub:
        raise FedflatError(f"{source.name} cannot be downloaded. {source.how} It may be {source.forms}.")
    folder = cache_directory() / "datasets" / source.folders[0]
    if folder.is_dir() and source.find(folder) is not None:
        return folder  # --data names another directory, and it was downloaded before
    try:
        import datasets
    except ImportError:
        raise MissingExtra("datasets", "download", f"Downloading {source.name}") from None
    folder.mkdir(parents=True, exist_ok=True)
    try:
        loaded = datasets.load_dataset(source.hub)
        for split, table in loaded.items():
            name = "test" if split in ("valid", "validation") and "test" not in loaded else split
            table.to_parquet(str(folder / f"{name}.parquet"))
    except Exception as problem:  # the library raises whatever its transports raise
        shutil.rmtree(folder, ignore_errors=True)
        raise FedflatError(
            f"{source.name} could not be downloaded as '{source.hub}' ({type(problem).__name__}: {problem}). "
            "Fetch it by hand and name its folder with --data DIR."
        ) from None
    return folder


# -- between splits and the cache ------------------------------------------------------------------


def store(train: Split, test: Split) -> Stored:
    """Two splits as arrays and texts."""
    _check_labels(train, test)
    arrays = {}
    names: list[str] = sorted({g for split in (train, test) for g in split.groups or []})
    numbers = {name: number for number, name in enumerate(names)}
    for name, split in (("train", train), ("test", test)):
        assert isinstance(split.inputs, np.ndarray)
        arrays[f"{name}_inputs"] = torch.from_numpy(np.ascontiguousarray(split.inputs))
        arrays[f"{name}_labels"] = torch.from_numpy(split.labels.copy())
        if split.groups is not None:
            arrays[f"{name}_groups"] = torch.tensor([numbers[g] for g in split.groups])
    texts = {
        "class_names": json.dumps(train.class_names),
        "group_names": json.dumps(names),
        "lossy": train.lossy or test.lossy,
    }
    return arrays, texts


def _check_labels(train: Split, test: Split) -> None:
    if len(train.labels) == 0 or len(test.labels) == 0:
        raise _Labels("The training or the test split is empty.")
    known = int(train.labels.max())
    if int(test.labels.max()) > known:
        raise _Labels(
            f"The test split has the label {int(test.labels.max())}, the training split only 0 to {known}."
        )
