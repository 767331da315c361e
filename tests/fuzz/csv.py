"""Tables in csv: a person's own, and the news as distributed."""

from __future__ import annotations

import contextlib
import csv as standard
import io
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fuzz._tables import verify

CELLS = [
    "", "nan", "NA", "None", "1", "1.0", "01", "1e3", "1e400", "-inf", "word", "é", " 1 ", "0x1", "²", "1_000", "x;y",
    "2020-01-01", "True", "9" * 400, '"',
]  # fmt: skip


def seeds() -> Iterator[bytes]:
    """A table for every way in which columns may be separated."""
    for mark in ",;\t":
        rows = ["a,b,who,y", *(f"{n},{n * n / 7},{'uvw'[n % 3]},{n % 2}" for n in range(12))]
        yield "\n".join(rows).replace(",", mark).encode()
    yield b"a,b,who,y\n" + b"".join(
        b"%d,2,3,%d\n" % (n % 4 + 1, n % 2) for n in range(12)
    )  # news but for its header
    yield b'a,"b, too",who,y\r\n' + b"".join(
        b'%d,"1.5","u, v",yes\r\n%d,2,w,no\r\n' % (n, n) for n in range(6)
    )


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Other cells, rows and columns."""
    rows = [row.split(b",") for row in data.split(b"\n")]
    row = dice.choice(rows)
    change = dice.randrange(6)
    if change <= 2:
        row[dice.randrange(len(row))] = dice.choice(CELLS).encode()
    elif change == 3:
        rows.insert(dice.randrange(len(rows) + 1), list(dice.choice(rows)))
    elif change == 4:
        rows.remove(row)
    else:
        column = dice.randrange(len(rows[0]))
        word = dice.choice(CELLS).encode()
        for other in rows[1:]:
            other[column : column + 1] = [word]
    return b"\n".join(b",".join(row) for row in rows)


def check(data: bytes) -> None:
    """Read with and without a column of clients; what is accepted is whole, finite and numbered without gaps."""
    from fedflat import FedflatError
    from fedflat.data.own import read_table
    from fedflat.data.readers.tables import read_news_csv

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        path.write_bytes(data)
        with contextlib.suppress(FedflatError):
            news = read_news_csv(path)
            assert len(news.inputs) == len(news.labels) > 0 and news.labels.min() >= 0
        for client in (None, "who"):
            dataset = read_table(path, "y", client=client)
            verify(dataset, client is not None)
        text = data.decode("utf-8-sig")  # what is accepted is UTF-8
        mark = next((m for m in ",;\t" if m in text.splitlines()[0]), ",")
        rows = [row for row in standard.reader(io.StringIO(text, newline=""), delimiter=mark) if row]
        assert {len(row) for row in rows} == {len(rows[0])}, "rows of different lengths"
        assert len(rows) - 1 == len(dataset.train[1]) + len(dataset.test[1]), "rows are lost"
