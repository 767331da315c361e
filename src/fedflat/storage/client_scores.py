"""clients.jsonl: a row for every client in rounds in which each was tested on its own samples."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import FedflatError, explained
from .files import replace_file
from .metrics_file import read_json

FILE = "clients.jsonl"


def score_line(row: Mapping[str, Any]) -> bytes:
    """A row as it is written; NaN and infinity become null."""
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return (json.dumps(plain) + "\n").encode()


def read_client_scores(run: str | Path) -> list[dict[str, Any]]:
    """The rows of a run, none where it has no such file; a last line that a crash cut off is left out."""
    file = Path(run) / FILE
    if not file.exists():
        return []
    with explained(f"{file} cannot be read"):
        lines = file.read_bytes().splitlines()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = read_json(line)
            if not isinstance(row["index"], int) or not isinstance(row["client"], str):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                break
            raise FedflatError(f"{file}, line {number}, is no client's row; was it edited?") from None
        rows.append(row)
    return rows


def cut_client_scores(file: Path, rounds: int) -> None:
    """Keep the rows of the first rounds only, which a resumed run has done."""
    kept = [row for row in read_client_scores(file.parent) if row["index"] < rounds]
    if kept or file.exists():
        replace_file(file, b"".join(map(score_line, kept)))
