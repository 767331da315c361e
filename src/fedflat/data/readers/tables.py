"""Text in rows: csv files with a class and texts, and Parquet files with texts."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...errors import FedflatError
from . import Split
from .parquet import find_column, read_labels, read_tables, read_texts

CLASS = re.compile(r"0*[1-9]\d{0,5}", re.ASCII)


def read_news_csv(path: Path) -> Split:
    """AG News as distributed: class from 1, title, description."""
    labels, texts = [], []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.reader(file), start=1):
                if len(row) < 2 or not CLASS.fullmatch(row[0].strip()):
                    raise FedflatError(
                        f"{path}, line {number}: expected a class from 1, a title and a text, not {row[:1]}."
                    )
                labels.append(int(row[0]) - 1)
                texts.append(" ".join(row[1:]))
    except (UnicodeDecodeError, csv.Error) as problem:
        raise FedflatError(f"{path} is no csv file in UTF-8 ({problem}).") from None
    if not labels:
        raise FedflatError(f"{path} is empty; fetch it again.")
    return Split(texts, np.array(labels, dtype=np.int64))


def read_text_split(files: Sequence[Path], labels: Sequence[str]) -> Split:
    """A Parquet table of texts."""
    table = read_tables(files)
    text, label = find_column(table, ["text"], files), find_column(table, labels, files)
    return Split(read_texts(table, text, files), read_labels(table, label, files))
