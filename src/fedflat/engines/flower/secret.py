"""A node's secret: what its noise is drawn from, so that the run's seed does not help to take the noise away."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from ...errors import FedflatError, explained

SIZE = 32
"""Bytes."""


def node_secret(home: Path) -> bytes:
    """The secret of the node whose state is kept there; made on first use, readable by its owner alone."""
    path = home / "secret"
    with explained(f"{path} cannot be made"):
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        # several clients may share a node: whoever comes first makes it, in one step
        unfinished = home / f".secret.{os.getpid()}.unfinished"
        if not path.exists():
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(SIZE))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(unfinished, path)
            unfinished.unlink()
    with explained(f"{path} cannot be read"):
        found = path.read_bytes()
    if len(found) != SIZE:
        raise FedflatError(f"{path} is damaged: remove it, and the node makes another.")
    return found
