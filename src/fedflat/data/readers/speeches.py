"""Shakespeare's plays, a client per role: Parquet with a speech per row, or LEAF's json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import FedflatError
from .parquet import find_column, read_owners, read_tables, read_texts

Speeches = dict[str, str]
"""Everything a role says, by role."""


def read_speeches(files: Sequence[Path]) -> Speeches:
    """Columns `client_id` and `text`, in the order of the play."""
    table = read_tables(files)
    role = find_column(table, ["client_id", "character_id"], files)
    text = find_column(table, ["text"], files)
    spoken: dict[str, list[str]] = {}
    for who, what in zip(read_owners(table, role, files), read_texts(table, text, files), strict=True):
        spoken.setdefault(who, []).append(what)
    return {who: "\n".join(lines) for who, lines in spoken.items()}


def read_leaf(files: Sequence[Path]) -> Speeches:
    """LEAF's json: for every user windows `x` of 80 characters and the character `y` that follows each.

    Consecutive windows overlap in all but one character, so the text is the first window and all that follow.
    """
    spoken: Speeches = {}
    for path in files:
        try:
            content: dict[str, Any] = json.loads(path.read_text("utf-8"))
            for user, data in content["user_data"].items():
                text = data["x"][0] + "".join(data["y"]) if data["x"] else ""
                if any(text[n : n + len(x)] != x for n, x in enumerate(data["x"])):
                    raise ValueError(f"the windows of {user} do not follow each other")
                spoken[user] = text
        except (AttributeError, ValueError, KeyError, TypeError, UnicodeDecodeError) as problem:
            raise FedflatError(f"{path} is no LEAF file ({problem!r}); fetch it again.") from None
    return spoken
