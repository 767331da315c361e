"""The command line. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import errno
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from ..errors import Diverged, FedflatError, shortened

# Importing them adds their commands, in the order of the help.
# isort: off
from . import running, sweeping, tuning  # noqa: F401
from . import using  # noqa: F401
from . import comparing, measuring, drawing, reporting  # noqa: F401
from . import papers, listing, federating, privacy  # noqa: F401

# isort: on
from .app import app, console, headed, make_console

LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOMEM)
"""What a machine may run out of at any line: files, room, memory."""


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from .. import __version__

        console.print(f"fedflat {__version__}", highlight=False)
        raise typer.Exit


@contextmanager
def _notes() -> Iterator[None]:
    """What the library warns of, as sentences."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        before, said = warnings.showwarning, set[str]()

        def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if category is UserWarning:
                if str(message) not in said:
                    said.add(str(message))
                    console.print(headed("Note:", "yellow", str(message)), highlight=False, soft_wrap=True)
            else:
                before(message, category, *where)

        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _say(mistake: str) -> None:
    said = headed("Error:", "red", mistake)
    make_console(stderr=True).print(said, highlight=False, soft_wrap=True)


def main() -> None:
    """The entry point: a mistake is one clear sentence and exit code 2, or 3 for a model that is no longer finite."""
    try:
        with _notes():
            app()
    except FedflatError as mistake:
        _say(str(mistake))
        sys.exit(3 if isinstance(mistake, Diverged) else 2)
    except OSError as lack:
        if lack.filename is None and lack.errno not in LACKS:
            raise
        _say(f"{shortened(str(lack.filename or 'A file'))} cannot be used: {lack.strerror or lack}.")
        sys.exit(2)
    except KeyboardInterrupt:
        make_console(stderr=True).print("Interrupted.")
        sys.exit(130)
