"""What can go wrong when a process is spawned: it imports the script that started it, and finds classes by name."""

from __future__ import annotations

import multiprocessing
import os
import sys

from ...errors import FedflatError
from ..base import Job

UNGUARDED = 77
"""The exit code of a process that would have trained while it imports its parent's script."""
UNFIT = (
    "A process that is spawned imports the script that started it: put what trains below "
    "`if __name__ == \"__main__\":`, or use engine='inprocess'."
)


def leave_if_imported() -> None:
    """End a process that is only importing its parent's script, in which training is not guarded.

    The parent sees that it has ended, and says why; here a traceback would only hide that.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)


def check_importable(job: Job) -> None:
    """Whether a spawned process finds the classes that the job is made of: those of a notebook it does not."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None or os.path.isfile(getattr(main, "__file__", None) or ""):
        return
    kinds = [type(part) for part in (*job.model.module.modules(), *job.method.mechanisms)]
    for kind in (*kinds, job.loss, *job.metrics.functions):
        if getattr(kind, "__module__", None) == "__main__":
            raise FedflatError(
                f"{getattr(kind, '__name__', kind)} is defined in a notebook or at a prompt, where processes that "
                "are spawned cannot find it. Put it into a file and import it from there, or use engine='inprocess'."
            )
