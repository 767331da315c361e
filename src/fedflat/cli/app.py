"""The application that all commands join."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.text import Text

PIPE_WIDTH = 120
"""Columns of a table that goes into a file or a pipe."""

TRAIN, LOOK, PAPERS = "Train", "Compare and look", "The papers' experiments"
USE, THERE_IS, FEDERATIONS = "Use a trained model", "What there is", "Real federations"
"""How `fedflat --help` groups commands."""


def make_console(stderr: bool = False) -> Console:
    """Where sentences go. Brackets and colons in them are a person's own: no markup, no pictures."""
    wide = not (stderr or sys.stdout.isatty())
    return Console(stderr=stderr, markup=False, emoji=False, width=PIPE_WIDTH if wide else None)


def headed(head: str, style: str, sentence: str) -> Text:
    """A sentence after a coloured word."""
    return Text.assemble((head, style), " ", sentence)


console = make_console()
app = typer.Typer(
    name="fedflat",
    help="Sharpness-aware federated learning: train one model across many clients so that it lands in a "
    "flat minimum of the global loss.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
