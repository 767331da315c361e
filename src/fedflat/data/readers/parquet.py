"""Parquet files in the layout of the Hugging Face hub: an image or text column, a label column."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import FedflatError, MissingExtra, nearest, reason_of
from . import Split
from .images import decode_images, noting_loss

INNER = ("data", "plain_text", "default")
"""Folders in which the hub keeps the files of a dataset without further configurations."""


def find_parquet(folder: Path, split: str) -> list[Path]:
    """`train.parquet`, or `train-00000-of-00002.parquet` and so on, in the folder or the hub's folder in it."""
    for pattern in (f"{split}.parquet", f"{split}-*.parquet"):
        for place in [folder, *(folder / name for name in INNER)]:
            found = sorted(place.glob(pattern))
            if found:
                return found
    return []


def read_tables(files: Sequence[Path]) -> Any:
    """All files of a split as one table."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("pyarrow", "data", "Reading Parquet files") from None
    tables = []
    for path in files:
        try:
            tables.append(pyarrow.parquet.read_table(path))
            tables[-1].validate(full=True)  # or damage shows only where a value is looked at, if at all
            names = tables[-1].column_names
        except Exception as problem:  # a damaged file can make its reader stumble anywhere
            raise FedflatError(
                f"{path} is no sound Parquet file ({reason_of(problem)}); fetch it again."
            ) from None
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise FedflatError(f"{path} has the column '{twice}' twice; rename one.")
        if not tables[-1].schema.equals(tables[0].schema):
            raise FedflatError(f"{path} has other columns than {files[0].name}; they are not of one dataset.")
    return pyarrow.concat_tables(tables)


def find_column(table: Any, wanted: Sequence[str], files: Sequence[Path]) -> str:
    """The first of the wanted columns that the table has."""
    for name in wanted:
        if name in table.column_names:
            return name
    raise FedflatError(f"{files[0]} has no column '{wanted[0]}'.{nearest(wanted[0], table.column_names)}")


def read_values(table: Any, column: str, files: Sequence[Path]) -> list[Any]:
    """A column as Python's own values."""
    try:
        values: list[Any] = table[column].to_pylist()
    except Exception as problem:  # a year beyond 9999, a name that is no text
        raise FedflatError(
            f"{files[0]}: column '{column}' cannot be read ({reason_of(problem)}); fetch it again."
        ) from None
    return values


def read_labels(table: Any, column: str, files: Sequence[Path]) -> np.ndarray:
    """Whole numbers from 0."""
    values = read_values(table, column, files)
    if not values or not all(type(value) is int and 0 <= value < 2**31 for value in values):
        raise FedflatError(
            f"{files[0]}: column '{column}' must hold class numbers from 0, without gaps in the rows."
        )
    return np.array(values, dtype=np.int64)


def read_texts(table: Any, column: str, files: Sequence[Path]) -> list[str]:
    """A column of texts or numbers, none of them missing."""
    texts = read_values(table, column, files)
    gap = next((n for n, text in enumerate(texts) if text is None or text != text), None)
    if gap is not None:
        raise FedflatError(f"{files[0]}: column '{column}' has nothing in row {gap}; fetch it again.")
    return [str(text) for text in texts]


def read_owners(table: Any, column: str, files: Sequence[Path]) -> list[str]:
    """A column that says whose every row is."""
    owners = [owner.strip() for owner in read_texts(table, column, files)]
    if "" in owners:
        raise FedflatError(
            f"{files[0]}: column '{column}' has nothing in row {owners.index('')}; fetch it again."
        )
    return owners


def read_image_split(
    files: Sequence[Path],
    labels: Sequence[str],
    size: tuple[int, int] | None,
    channels: int,
    groups: str | None = None,
) -> Split:
    """A table of encoded images."""
    table = read_tables(files)
    image = find_column(table, ["img", "image"], files)
    label = find_column(table, labels, files)
    if len(table) == 0:
        raise FedflatError(f"{files[0]} has no rows; fetch it again.")
    if groups is not None:
        find_column(table, [groups], files)
    lossy: set[str] = set()
    encoded = noting_loss(_encoded(table[image], image, files[0]), lossy)
    pixels = decode_images(encoded, len(table), size, channels)
    owners = read_owners(table, groups, files) if groups is not None else None
    names = _class_names(table, label)
    return Split(pixels, read_labels(table, label, files), owners, names, ", ".join(sorted(lossy)))


def _encoded(column: Any, name: str, path: Path) -> Iterator[tuple[str, bytes]]:
    for number, cell in enumerate(column):
        try:
            value = cell.as_py()
        except Exception as problem:
            raise FedflatError(
                f"{path}: column '{name}', row {number} cannot be read ({reason_of(problem)}); fetch it again."
            ) from None
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise FedflatError(f"{path}: row {number} holds no image bytes; fetch it again.")
        yield f"{path}, row {number}", content


def _class_names(table: Any, label: str) -> list[str]:
    """As the hub writes them into the schema."""
    stored = (table.schema.metadata or {}).get(b"huggingface")
    if stored is None:
        return []
    try:
        return [str(name) for name in json.loads(stored)["info"]["features"][label]["names"]]
    except (ValueError, KeyError, TypeError):
        return []
