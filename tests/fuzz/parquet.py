"""Parquet files: a person's own table, and the image and text datasets of the hub."""

from __future__ import annotations

import io
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from fuzz._tables import verify

ODD: list[Any] = [
    None, float("nan"), float("inf"), "", "NA", "word", -1, 0, 1, 1.0, 2**62, True, b"\xff", b"1", [], [1], {"a": 1},
    {"bytes": None}, {"bytes": b"\x89PNG"}, "9" * 400, 1e308, -1e308,
]  # fmt: skip
KINDS = ("int8", "uint64", "float32", "string", "binary", "bool_", "date32", "large_string")
HUB = json.dumps({"info": {"features": {"label": {"names": ["cat", "dog"]}}}})


def seeds() -> Iterator[bytes]:
    """A table of numbers, one of images and one of texts; columns by the names that the readers look for."""
    rows = 10
    numbers = {
        "a": list(range(rows)),
        "b": [n / 7 for n in range(rows)],
        "who": ["uv"[n % 2] for n in range(rows)],
        "y": [n % 2 for n in range(rows)],
    }
    labels = {"label": [n % 2 for n in range(rows)], "text": [f"text {n}" for n in range(rows)]}
    images = {"img": [{"bytes": _png(n), "path": None} for n in range(rows)]}
    yield _written({**numbers, **labels, **images})
    yield _written({**numbers, **labels, **images, "who": [1.5, *range(rows - 1)], "y": ["b", "a"] * 5})


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Another cell, column or type, in a file that is sound as Parquet."""
    import pyarrow
    import pyarrow.parquet

    try:
        try:
            table = pyarrow.parquet.read_table(io.BytesIO(data))
        except Exception:  # it is no Parquet any more
            table = pyarrow.parquet.read_table(io.BytesIO(dice.choice(list(seeds()))))
        columns = {name: table[name].to_pylist() for name in table.column_names}
        name = dice.choice(list(columns))
        values = columns[name]
        change = dice.randrange(5)
        if change <= 1 and values:
            values[dice.randrange(len(values))] = dice.choice(ODD)
        elif change == 2:
            columns[name] = [dice.choice(ODD)] * len(values)
        elif change == 3:
            kept = dice.randrange(len(values) + 1)
            columns = {one: column[:kept] for one, column in columns.items()}
        else:
            return _written(
                {**columns, name: pyarrow.array(values).cast(getattr(pyarrow, dice.choice(KINDS))())}
            )
        return _written(columns)
    except Exception:  # a column cannot be of these values
        return data


def check(data: bytes) -> None:
    """Read as every kind of dataset there is in Parquet; refused by all is refused."""
    from fedflat import FedflatError
    from fedflat.data.loading import store
    from fedflat.data.own import read_table
    from fedflat.data.readers.parquet import read_image_split
    from fedflat.data.readers.speeches import read_speeches
    from fedflat.data.readers.tables import read_text_split

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.parquet"
        path.write_bytes(data)
        refusals = []

        def table(client: str | None) -> None:
            verify(read_table(path, "y", client=client), client is not None)

        def images(groups: str | None) -> None:
            split = read_image_split([path], ["label"], (4, 4), 3, groups)
            assert split.inputs.shape == (len(split.labels), 4, 4, 3)
            assert groups is None or not {"None", "nan", ""} & set(split.groups), "a gap is a client"
            store(split, split)

        def texts() -> None:
            split = read_text_split([path], ["label"])
            assert len(split.inputs) == len(split.labels) > 0
            assert split.labels.dtype == np.int64 and split.labels.min() >= 0

        def speeches() -> None:
            assert not {"None", "nan", ""} & set(read_speeches([path])), "a gap is a client"

        for read in (
            lambda: table(None),
            lambda: table("who"),
            lambda: images(None),
            lambda: images("who"),
            texts,
            speeches,
        ):
            try:
                read()
            except FedflatError as refusal:
                told = str(refusal)
                assert told.strip() and "\n" not in told, "a refusal is one sentence"
                refusals.append(refusal)
        if len(refusals) == 6:
            raise refusals[0]


def _written(columns: dict[str, Any]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    table = pyarrow.table(columns).replace_schema_metadata({"huggingface": HUB})
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


def _png(level: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (4, 4), (level, 0, 200)).save(file, format="PNG")
    return file.getvalue()
