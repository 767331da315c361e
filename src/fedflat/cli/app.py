"""The application that all commands join."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

PIPE_WIDTH = 120
"""Columns of a table that goes into a file or a pipe."""

TRAIN, LOOK, PAPERS = "Train", "Compare and look", "The papers' experiments"
THERE_IS, FEDERATIONS = "What there is", "Real federations"
"""How `fedflat --help` groups commands."""

console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
app = typer.Typer(
    name="fedflat",
    help="Sharpness-aware federated learning: train one model across many clients so that it lands in a "
    "flat minimum of the global loss.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
