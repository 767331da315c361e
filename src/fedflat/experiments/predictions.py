"""Predictions into a csv or Parquet file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..data.preprocessing import Images, Table
from ..data.readers.columns import check_column
from ..errors import FedflatError, MissingExtra
from ..storage.files import replace_file
from .predictor import Predictor

ENDINGS = (".csv", ".parquet")


def check_new_file(path: Path, overwrite: bool) -> None:
    """Refuse a file that is there already or has no directory to be in, before anything is computed."""
    if path.is_dir():
        raise FedflatError(f"{path} is a directory; name a file.")
    if not path.parent.is_dir():
        raise FedflatError(f"{path} cannot be written: there is no directory {path.parent}.")
    if path.exists() and not overwrite:
        raise FedflatError(f"{path} is there already: choose another name, or allow it with --overwrite.")


def predict_file(
    predictor: Predictor,
    data: Path,
    out: Path,
    id_column: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Write a row for every sample of a file or folder, and return the predictions.

    The columns are the image's `file` or the table's `id_column`, the `prediction`, and `p(CLASS)` for every class.
    """
    if out.suffix.lower() not in ENDINGS:
        raise FedflatError(f"{out}: predictions are written to a file that ends in {' or '.join(ENDINGS)}.")
    check_new_file(out, overwrite)
    if id_column is not None and not isinstance(predictor.preprocessing, Table):
        raise FedflatError(f"--id {id_column} goes with a table; images are named by their files.")
    samples = predictor.prepare(data)
    columns: dict[str, Sequence[Any]] = {}
    if id_column is not None:
        check_column(data, samples.columns, id_column)
        columns[id_column] = samples.columns[id_column]
    elif isinstance(predictor.preprocessing, Images):
        columns["file"] = samples.columns["file"]
    outputs = predictor.outputs(samples, progress)
    if outputs.ndim > 2:
        raise FedflatError(
            f"The model of {predictor.run} says several things of a sample, shape {tuple(outputs.shape[1:])}, which "
            "make no table; use ff.load() in Python."
        )
    predicted = predictor.decide(outputs)
    made: dict[str, Sequence[Any]] = {"prediction": predicted.tolist()}
    if predictor.task == "classification":
        probabilities = predictor.probabilities(outputs)
        names = predictor.class_names(probabilities.shape[1])
        made |= {f"p({name})": probabilities[:, n].tolist() for n, name in enumerate(names)}
    if id_column in made:
        raise FedflatError(f"'{id_column}' is the name of a column of the predictions; rename it in {data}.")
    replace_file(out, _written(columns | made, out.suffix.lower()), durable=False)
    return predicted


def _written(columns: Mapping[str, Sequence[Any]], ending: str) -> bytes:
    if ending == ".parquet":
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise MissingExtra("pyarrow", "data", "Writing Parquet files") from None
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(dict(columns)), sink)
        return sink.getvalue()
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    # nine digits tell any two numbers of single precision apart
    rows = zip(*columns.values(), strict=True)
    writer.writerows([f"{v:.9g}" if isinstance(v, float) else v for v in row] for row in rows)
    return text.getvalue().encode()
