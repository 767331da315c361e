"""The command line. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import FedflatError

# Importing them adds their commands, in the order of the help.
# isort: off
from . import running, sweeping, tuning  # noqa: F401
from . import comparing, measuring, drawing, reporting  # noqa: F401
from . import papers, listing, federating, privacy  # noqa: F401

# isort: on
from .app import app, console


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from .. import __version__

        console.print(f"fedflat {__version__}", highlight=False)
        raise typer.Exit


def main() -> None:
    """The entry point: a mistake is one clear sentence and exit code 2, never a traceback."""
    try:
        app()
    except FedflatError as mistake:
        Console(stderr=True).print(f"[red]Error:[/] {escape(str(mistake))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted.")
        sys.exit(130)
