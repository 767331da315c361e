"""The command `fedflat`, or `python -m fedflat`: where a process starts, before anything large is imported."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
"""The exit code after Ctrl-C."""
SHOW_CURSOR = b"\x1b[?25h"


def main() -> None:
    """The entry point."""
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, leave_at_once)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    from .cli import main as commands

    try:
        commands()
    finally:  # all is done, and an interruption of Python's own end would look as if it were not
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def leave_at_once(number: int, frame: FrameType | None) -> None:
    """Ctrl-C while nothing runs that could be ended better, as rounds of training can.

    An exception would come up in the middle of an import or a destructor, which swallow it or make it a traceback.
    What is on disk is sound at every moment, and the processes that this one started end with it.
    """
    with contextlib.suppress(Exception):  # it may be this very call that was interrupted
        sys.stdout.flush()
    for stream in (1, 2):
        if os.isatty(stream):
            os.write(stream, SHOW_CURSOR)  # which progress bars hide
            break
    with contextlib.suppress(OSError):
        os.write(2, b"Interrupted.\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
