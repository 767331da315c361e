"""A process that ends with the one that started it, however that ended."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import wait

PR_SET_PDEATHSIG = 1
"""Of Linux: the signal that a process is sent when its parent is gone."""


def end_with_parent() -> None:
    """End this process at once when its parent is gone, whatever it is busy with at that moment.

    On Linux the system does it. Elsewhere, and where the parent was gone before the system was asked, a thread does
    that watches the pipe between the two.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if sys.platform == "linux":
        _ask_the_system()
    threading.Thread(target=_watch, args=(parent.sentinel,), name="fedflat-parent", daemon=True).start()


def _ask_the_system() -> None:
    with contextlib.suppress(OSError, AttributeError):  # without the library, or the call in it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
