"""The columns of a csv or Parquet file: how they are read, what stands in their cells."""

from __future__ import annotations

import csv
import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import FedflatError, MissingExtra, nearest
from .parquet import read_tables, read_values

Columns = Mapping[str, Sequence[Any]]
GAPS = {"", "na", "n/a", "#n/a", "<na>", "nan", "nat", "null", "none", "-", "?"}
"""What stands in a table where a value is missing."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)", re.ASCII)
"""A class or client that is a number however it is written; with an exponent it may as well be a word, as 12e4 is."""
DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})([T ]\d{1,2}:\d{2}.*)?|\d{1,2}:\d{2}(:\d{2}.*)?",
    re.ASCII,
)


def read_columns(path: Path) -> dict[str, list[Any]]:
    """All columns of a file, by name; there is at least one row."""
    if not path.is_file():
        raise FedflatError(f"There is no file {path}.")
    if path.suffix == ".parquet":
        table = read_tables([path])
        columns = {name: read_values(table, name, [path]) for name in table.column_names}
    else:
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                separator = _separator(file.readline())
                file.seek(0)
                # strict: or a quote that is never closed would take in all rows that follow
                header, *body = _rows(path, csv.reader(file, delimiter=separator, strict=True)) or [[]]
        except (UnicodeDecodeError, csv.Error) as problem:
            raise FedflatError(f"{path} is no csv file in UTF-8 ({problem}); save it as one.") from None
        columns = {name: [row[i] for row in body] for i, name in enumerate(header)}
    if not columns or not next(iter(columns.values())):
        raise FedflatError(f"{path} has no rows.")
    return columns


def columns_of(rows: Any) -> dict[str, list[Any]]:
    """Columns by name, of a mapping of columns, a list of rows that are mappings, or a data frame.

    Frames of pandas, Polars, PyArrow and others are read through Arrow's interface of them all.
    """
    if hasattr(rows, "__arrow_c_stream__"):
        try:
            import pyarrow
        except ImportError:
            raise MissingExtra("pyarrow", "data", "Reading a data frame") from None
        return dict(pyarrow.table(rows).to_pydict())
    if isinstance(rows, Mapping):
        columns = {str(name): list(values) for name, values in rows.items()}
    elif (
        isinstance(rows, Sequence)
        and not isinstance(rows, str)
        and all(isinstance(row, Mapping) for row in rows)
    ):
        names = dict.fromkeys(str(name) for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
    else:
        raise FedflatError(
            f"A {type(rows).__name__} has no columns by name; give a data frame, a dict of columns, or a list of "
            "dicts."
        )
    if len({len(values) for values in columns.values()}) > 1:
        raise FedflatError("The columns have different lengths; give a value for every row.")
    if not columns or not next(iter(columns.values())):
        raise FedflatError("There are no rows.")
    return columns


def _rows(path: Path, lines: Any) -> list[list[str]]:
    """The header and all rows of a csv file but empty ones, of equal length."""
    rows: list[list[str]] = []
    for row in lines:
        if rows and row and len(row) != len(rows[0]):
            raise FedflatError(
                f"{path}, line {lines.line_num}: {len(row)} values for {len(rows[0])} columns."
            )
        if row or not rows:
            rows.append(row)
        if len(rows) == 1 and len(set(row)) < len(row):
            twice = next(name for name in row if row.count(name) > 1)
            raise FedflatError(f"{path} has the column '{twice}' twice; rename one.")
    return rows


def _separator(header: str) -> str:
    """What stands between columns: a comma, or, where there is none, what spreadsheets write elsewhere."""
    return next((mark for mark in ",;\t" if mark in header), ",")


def check_column(where: object, columns: Columns, name: str) -> None:
    """Refuse a name that no column has."""
    if name not in columns:
        raise FedflatError(f"{where} has no column '{name}'.{nearest(name, columns)}")


# -- cells -----------------------------------------------------------------------------------------


def as_text(value: Any) -> str:
    """A class, client or level as it is called: a whole number without the `.0` of a column of floats."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    text = str(value).strip()
    return re.sub(r"\.0*$", "", text) if NUMBER.fullmatch(text) and re.match(r"[+-]?\d", text) else text


def is_gap(value: Any) -> bool:
    """Whether a value is missing."""
    if isinstance(value, str | bytes):
        return as_text(value).lower() in GAPS
    return value is None or (isinstance(value, float) and value != value)


def is_number(value: Any) -> bool:
    """Whether a cell can be read as a number."""
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def kind_of(values: Sequence[Any]) -> str:
    """What a column holds beside gaps: `"numbers"`, `"dates"`, `"words"`, or `""` for anything else."""
    known = [value for value in values if not is_gap(value)]
    if not known:
        return ""
    if all(map(is_number, known)):
        return "numbers"
    if all(map(_is_date, known)):
        return "dates"
    return "words" if all(isinstance(value, str | bytes | bool | int | float) for value in known) else ""


def _is_date(value: Any) -> bool:
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta):
        return True
    return isinstance(value, str) and DATE.fullmatch(value.strip()) is not None


def as_floats(where: object, name: str, values: Sequence[Any]) -> np.ndarray:
    """A column as numbers, NaN where one is missing; refuses words and infinity."""
    result = np.empty(len(values))
    for number, value in enumerate(values):
        try:
            result[number] = float("nan" if is_gap(value) else value)
        except (TypeError, ValueError, OverflowError):
            raise FedflatError(
                f"{where}: column '{name}', row {number + 1} is {str(value)[:60]!r}, not a number."
            ) from None
    bad = np.flatnonzero(np.isinf(result))
    if len(bad):
        raise FedflatError(
            f"{where}: column '{name}' has infinite values in {len(bad):,} of {len(values):,} rows, first in row "
            f"{bad[0] + 1}; correct or drop those rows, or leave the column out with features (--features)."
        )
    return result
