"""Options that several commands share, and the console."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..usual import USUAL

PIPE_WIDTH = 120
"""Columns of a table that goes into a file or a pipe."""

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


def usually(what: str) -> str:
    """The defaults of an option, by dataset."""
    first = getattr(USUAL["digits"], what)
    same = all(getattr(plan, what) == first for plan in USUAL.values())
    return f"(default: {first})" if same else f"(default: by dataset, {first} on digits)"


PARTITION_HELP = (
    "How data is dealt out: iid, dirichlet:ALPHA[:FORM], pathological:CLASSES[:FORM], hsu:ALPHA, "
    "quantity:ALPHA, by-user, by-domain, longtail:FACTOR/PARTITION."
)
Dataset = Annotated[
    str,
    typer.Option(
        help="A dataset by name (`fedflat datasets` lists them), a csv or Parquet file, or a folder of images."
    ),
]
Clients = Annotated[
    int | None,
    typer.Option(
        help=f"Number of clients. {usually('clients')}; all there are with by-user and by-domain.", min=1
    ),
]
DataDirectory = Annotated[
    Path | None,
    typer.Option(
        help="Directory that holds the dataset. (default: FEDFLAT_DATA, ./data and the usual caches)"
    ),
]
Download = Annotated[bool, typer.Option("--download", help="Download the dataset if it is not found.")]
Target = Annotated[str | None, typer.Option(help="For a csv or Parquet file: the column with the class.")]
ClientColumn = Annotated[
    str | None,
    typer.Option(help="For a csv or Parquet file: the column that says whose row it is (use by-user)."),
]
