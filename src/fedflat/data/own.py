"""A person's own data as a dataset: a table, a folder of images, or any torch `Dataset`.

What comes out is a `Dataset` like any other: deal it out with any partition, or, where it says who each sample
belongs to, with `ByUser()`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from ..core.randomness import generator
from ..errors import FedflatError, nearest
from .augmentation import Images
from .dataset import Dataset
from .features import Missing, apply_columns, choose_columns, fit_columns
from .readers.columns import NUMBER, as_floats, as_text, check_column, is_gap, kind_of, read_columns
from .readers.images import class_folders, decode_images, list_images

TASKS = ("classification", "regression")
MANY = 20
"""Classes that are plausible in a table of any length."""
SHOWN = 12
"""Columns that a note names."""


def read_table(
    path: str | Path,
    target: str,
    client: str | None = None,
    features: Sequence[str] | None = None,
    test: float | str = 0.2,
    numeric: str = "standardise",
    missing: Missing = "refuse",
    categorical: Sequence[str] | None = None,
    task: str | None = None,
    seed: int = 0,
) -> Dataset:
    """Rows of a csv or Parquet file as samples.

    Args:
        path: a `.csv` file with a header, columns separated by commas, semicolons or tabs, or a `.parquet` file.
        target: the column with the class, numbers or words, or with the number to predict.
        client: the column that says whose row it is; partition it with `ByUser()`.
        features: the columns to learn from; by default all others that hold numbers, or words with few levels. The
            dataset's `note` says which were taken and which were not.
        test: the fraction of every client's rows kept for testing, or the column that is 1, true or "test" there.
        numeric: how numbers are scaled, by what the training rows say: `"standardise"` to zero mean and unit
            deviation, `"robust"` by median and interquartile range, which outliers hardly move, or `"none"`.
        missing: `"refuse"` missing values, or fill them with the `"median"` of the training rows or with a number; an
            input of its own says where a value was missing, for columns in which training rows have gaps.
        categorical: the columns whose values are names, each with an input per level; by default those with words.
        task: `"classification"` or `"regression"`; by default what the target looks like, which the `note` says.
        seed: of the choice of test rows.
    """
    path = Path(path)
    columns = read_columns(path)
    for name in [target, *([client] if client else []), *([test] if isinstance(test, str) else [])]:
        check_column(path, columns, name)
    for name in [target, *([client] if client else [])]:
        _check_named(f"{path}: column '{name}'", columns[name])
    if isinstance(test, str):
        held = np.array([str(v).strip().lower() in ("1", "1.0", "true", "test") for v in columns[test]])
    else:
        _check_fraction(test, ", or the name of a column")
        held = _hold_out(columns[client] if client else [""] * len(columns[target]), test, seed)
    if held.all() or not held.any():
        raise FedflatError(
            f"{path}: {int(held.sum())} of {len(held)} rows are for testing; both parts need some."
        )
    chosen_task, reason = choose_task(path, target, columns[target], task)
    labels, class_names = _targets(path, target, columns[target], chosen_task)
    others = {name: values for name, values in columns.items() if name not in (target, client, test)}
    chosen = choose_columns(path, others if features is None else columns, features, categorical)
    if not chosen:
        raise FedflatError(
            f"{path} has no column to learn from beside '{target}', neither of numbers nor of words with few levels."
        )
    fitted = fit_columns(path, columns, chosen, np.flatnonzero(~held), numeric, missing)
    inputs = apply_columns(path, fitted, columns, missing, new=False)
    groups, group_names = _numbered(columns[client]) if client else (None, ())
    x, y = torch.from_numpy(inputs), torch.from_numpy(labels)
    kept = torch.from_numpy(~held)
    return Dataset(
        path.stem,
        (x[kept], y[kept]),
        (x[~kept], y[~kept]),
        classes=max(1, len(class_names)),
        class_names=class_names,
        groups=None if groups is None else groups[~held],
        group_names=group_names,
        test_groups=None if groups is None else groups[held],
        task=chosen_task,
        preparation={
            "kind": "table",
            "target": target,
            **({"client_column": client} if client else {}),
            "missing": missing,
            "features": [column.model_dump(mode="json") for column in fitted],
        },
        note=_columns_note(len(class_names), reason, chosen, [name for name in others if name not in chosen]),
    )


def read_images(
    folder: str | Path,
    size: tuple[int, int] | int | None = None,
    channels: int = 3,
    clients: bool = False,
    test: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """A folder of images, a subfolder per class.

    Args:
        folder: holds `train/CLASS` and `test/CLASS`, or `CLASS` folders, or, with `clients=True`, a folder per client
            that holds its `CLASS` folders: deal those out with `ByUser()`.
        size: height and width to resize to; None if all images are of one size.
        channels: 3 for colour, 1 for grey.
        clients: whether the first level of folders is the clients.
        test: the fraction of every client's (or every class's) images kept for testing, without a `test` folder.
        seed: of the choice of test images.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FedflatError(f"{folder} is no folder. Give one that holds a folder of images per class.")
    if channels not in (1, 3):
        raise FedflatError(f"channels={channels}: give 3 for colour or 1 for grey.")
    if size is not None and min(size if isinstance(size, tuple) else (size,)) < 1:
        raise FedflatError(f"size={size}: give a positive height and width.")
    _check_fraction(test)
    divided = bool(class_folders(folder / "train")) and bool(class_folders(folder / "test"))
    if clients:
        places = {p.name: p for p in sorted(folder.iterdir()) if class_folders(p)}
    elif divided:
        places = {"train": folder / "train", "test": folder / "test"}
    else:
        places = {folder.name: folder} if class_folders(folder) else {}
    if not places:
        raise FedflatError(f"{folder} has no folders of images{' below client folders' if clients else ''}.")
    classes = sorted({name for place in places.values() for name in class_folders(place)})
    found = [
        (path, label, owner)
        for owner, place in places.items()
        for label, name in enumerate(classes)
        for path in (list_images(place / name) if (place / name).is_dir() else [])
    ]
    pixels = decode_images(
        ((str(p), p) for p, _, _ in found),
        len(found),
        (size, size) if isinstance(size, int) else size,
        channels,
    )
    labels = np.array([label for _, label, _ in found], dtype=np.int64)
    owners = [owner for _, _, owner in found]
    held = (
        np.array(owners) == "test"
        if divided and not clients
        else _hold_out(owners if clients else labels.tolist(), test, seed)
    )
    if held.all() or not held.any():
        raise FedflatError(
            f"{folder}: {int(held.sum())} of {len(held)} images are for testing; both parts need some."
        )
    groups, group_names = _numbered(owners) if clients else (None, ())
    mean, std = _statistics(pixels[~held])
    return Dataset(
        folder.name,
        (torch.from_numpy(pixels[~held]), torch.from_numpy(labels[~held])),
        (torch.from_numpy(pixels[held]), torch.from_numpy(labels[held])),
        classes=len(classes),
        pipeline=Images(mean, std),
        class_names=tuple(classes),
        groups=None if groups is None else groups[~held],
        group_names=group_names,
        test_groups=None if groups is None else groups[held],
    )


def from_torch(
    train: TorchDataset[Any], test: TorchDataset[Any], groups: Sequence[Any] | None = None, name: str = "own"
) -> Dataset:
    """Any two torch datasets of `(input, class)`; `groups` says whose each training sample is."""
    x, y = _stack(train, "training")
    held_x, held_y = _stack(test, "test")
    if groups is not None:
        _check_named("groups", groups)
    numbers, names = _numbered(groups) if groups is not None else (None, ())
    if numbers is not None and len(numbers) != len(y):
        raise FedflatError(f"{len(numbers)} groups for {len(y)} training samples; give one per sample.")
    classes = 1 + max(int(y.max()), int(held_y.max()))
    return Dataset(name, (x, y), (held_x, held_y), classes, groups=numbers, group_names=names)


# -- helpers ---------------------------------------------------------------------------------------


def _stack(samples: TorchDataset[Any], which: str) -> tuple[Tensor, Tensor]:
    """All samples of a torch dataset as two tensors."""
    inputs, targets = [], []
    if not hasattr(samples, "__len__"):
        raise FedflatError(
            f"The {which} dataset has no length; give one of which every sample can be asked for."
        )
    for number in range(len(samples)):
        try:
            x, y = samples[number]
            inputs.append(torch.as_tensor(np.array(x) if not isinstance(x, Tensor) else x))
            targets.append(int(y))
            if targets[-1] != y:
                raise ValueError(f"{y} is no class")
            if inputs[-1].dtype == torch.uint8:
                raise ValueError("it has bytes; make them floats, with a transform")
        except (TypeError, ValueError) as problem:
            raise FedflatError(
                f"Sample {number} of the {which} dataset is not a pair of an array and a class ({problem})."
            ) from None
        if inputs[-1].shape != inputs[0].shape:
            raise FedflatError(
                f"Sample {number} of the {which} dataset has shape {tuple(inputs[-1].shape)}, the first "
                f"{tuple(inputs[0].shape)}; resize or pad them first."
            )
    if not inputs:
        raise FedflatError(f"The {which} dataset is empty.")
    return torch.stack(inputs), torch.tensor(targets)


def _numbered(values: Sequence[Any]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Values as numbers from 0 in sorted order (numerically if they are numbers), and their names.

    "1" and "1.0" are the same, by whichever name is the shortest.
    """
    texts = [as_text(value) for value in values]
    meanings = {text: Decimal(text) if NUMBER.fullmatch(text) else text for text in texts}
    called: dict[Decimal | str, str] = {}
    for text in sorted(meanings, key=lambda text: (len(text), text)):
        called.setdefault(meanings[text], text)
    try:
        names = sorted(called.values(), key=lambda text: (float(text), text))
    except ValueError:
        names = sorted(called.values())
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[called[meanings[text]]] for text in texts], dtype=np.int64), tuple(names)


def _check_named(where: str, values: Sequence[Any]) -> None:
    """Whether every value is the name of a class or client, and none is missing."""
    gaps = [number for number, value in enumerate(values, start=1) if _is_unnamed(value)]
    if gaps:
        shown = as_text(values[gaps[0] - 1]) or "nothing"
        raise FedflatError(
            f"{where} has missing values in {len(gaps):,} of {len(values):,} rows, first in row {gaps[0]} ({shown}); "
            "fill or drop those rows, or give the value another name if it is one."
        )
    odd = next(
        (number for number, value in enumerate(values, start=1) if isinstance(value, list | dict)), None
    )
    if odd is not None:
        raise FedflatError(f"{where} has several values in row {odd}; it needs one number or word in each.")


def _is_unnamed(value: Any) -> bool:
    """Whether there is no class or client; a dash can be one, beside a plus."""
    if is_gap(value) and value not in ("-", b"-"):
        return True
    try:
        return math.isnan(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _check_classes(path: Path, target: str, classes: int, rows: int) -> None:
    """Whether a column can be a class, and is not different nearly everywhere."""
    if classes > max(MANY, rows / 2):
        raise FedflatError(
            f"{path}: column '{target}' has {classes:,} different values in {rows:,} rows, which is no class. "
            "Choose another column, or put its values into a few classes first."
        )


def choose_task(where: object, target: str, values: Sequence[Any], task: str | None) -> tuple[str, str]:
    """The task that a target is for, and why, where that is not plain: numbers that hardly repeat are no classes."""
    if task is not None:
        if task not in TASKS:
            raise FedflatError(f"task='{task}' is not possible.{nearest(task, TASKS)}")
        return task, ""
    if kind_of(values) != "numbers":
        return "classification", ""
    numbers = as_floats(where, target, values)
    different = len(np.unique(numbers))
    whole = bool((numbers == np.rint(numbers)).all())
    if different <= MANY:
        return "classification", ""
    found = f"'{target}' has {different:,} different numbers in {len(values):,} rows"
    if whole and different <= len(values) / 2:
        return "classification", f"classification, since {found}, all whole (--task regression for numbers)"
    return "regression", f"regression, since {found} (--task classification for classes)"


def _targets(path: Path, target: str, values: Sequence[Any], task: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Classes as numbers from 0, and their names; or a column of the numbers to predict, in single precision."""
    if task == "regression":
        with np.errstate(over="ignore"):
            numbers = as_floats(path, target, values).astype(np.float32)
        if not np.isfinite(numbers).all():
            raise FedflatError(
                f"{path}: column '{target}' has numbers too large for single precision; divide them first."
            )
        return numbers[:, None], ()
    labels, names = _numbered(values)
    _check_classes(path, target, len(names), len(labels))
    return labels, names


def _columns_note(classes: int, reason: str, used: Mapping[str, str], left: Sequence[str]) -> str:
    """What became of the columns of a table."""
    what = f"{classes} class{'es' if classes != 1 else ''}" if classes else "a number"
    names = [f"{name} (categorical)" if kind == "categorical" else name for name, kind in used.items()]
    note = f"{what} from {_listed(names)}"
    return "; ".join([note, *([f"not used: {_listed(left)}"] if left else []), *([reason] if reason else [])])


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown


def _check_fraction(test: float, otherwise: str = "") -> None:
    if not 0 < test < 1:
        raise FedflatError(f"test={test}: give a fraction between 0 and 1{otherwise}.")


def _hold_out(owners: Sequence[Any], fraction: float, seed: int) -> np.ndarray:
    """Which samples are for testing: the fraction of every owner's, rounded, at least one kept for training."""
    held = np.zeros(len(owners), dtype=bool)
    rng = generator(seed, "own test")
    numbers, names = _numbered(owners)
    for owner in range(len(names)):
        rows = rng.permutation(np.flatnonzero(numbers == owner))
        held[rows[: min(round(fraction * len(rows)), len(rows) - 1)]] = True
    return held


def _statistics(pixels: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel, of values from 0 to 1."""
    flat = pixels.reshape(-1, pixels.shape[-1]) / 255.0
    std = np.where(flat.std(0) > 1e-6, flat.std(0), 1.0)
    return tuple(flat.mean(0).tolist()), tuple(std.tolist())
