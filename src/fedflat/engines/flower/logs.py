"""What the apps say: to standard output, where Flower collects it for `flwr log`."""

from __future__ import annotations

import logging
import sys

_log = logging.getLogger("fedflat.engines.flower")


def to_console() -> None:
    """Show what is said, once, however often this is called."""
    if not _log.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("fedflat: %(message)s"))
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
        _log.propagate = False


def say(level: int, sentence: str, problem: BaseException | None = None) -> None:
    """One line; of an unexpected exception, where it came from too."""
    _log.log(level, "%s", sentence, exc_info=problem)
