"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..data.protocols import PROTOCOLS


def usually(what: str) -> str:
    """The defaults of an option, by dataset."""
    first = getattr(PROTOCOLS["digits"], what)
    same = all(getattr(plan, what) == first for plan in PROTOCOLS.values())
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
Target = Annotated[str | None, typer.Option(help="For a csv or Parquet file: the column to predict.")]
ClientColumn = Annotated[
    str | None,
    typer.Option(help="For a csv or Parquet file: the column that says whose row it is; dealt out by-user."),
]
Features = Annotated[
    str | None,
    typer.Option(
        help="For a csv or Parquet file: the columns to learn from, such as age,pressure. (default: all others with "
        "numbers, or words with few levels)"
    ),
]
Categorical = Annotated[
    str | None,
    typer.Option(
        help="For a csv or Parquet file: columns that hold names, also if these are numbers, such as ward,grade. "
        "(default: those with words)"
    ),
]
Numeric = Annotated[
    str | None,
    typer.Option(
        help="For a csv or Parquet file: how numbers are scaled, standardise, robust (median and quartiles) or none. "
        "(default: standardise)"
    ),
]
Missing = Annotated[
    str | None,
    typer.Option(
        help="For a csv or Parquet file: refuse missing values, or fill them with the median or a number. "
        "(default: refuse)"
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        help="For a csv or Parquet file: classification or regression. (default: as the target looks)"
    ),
]
ImageSize = Annotated[
    int | None, typer.Option(help="For a folder of images: the height and width to resize all to.", min=1)
]
ClientFolders = Annotated[
    bool,
    typer.Option(
        "--client-folders",
        help="For a folder of images: it holds a folder per client, with one per class in it; dealt out by-user.",
    ),
]


def named(columns: str | None) -> list[str] | None:
    """The columns of `--features` or `--categorical`."""
    return None if columns is None else [name.strip() for name in columns.split(",") if name.strip()]


def filled_with(missing: str | None) -> str | float | None:
    """What `--missing` says: a word, or the number that fills a gap."""
    try:
        return missing if missing is None else float(missing)
    except ValueError:
        return missing


KeepStates = Annotated[
    bool,
    typer.Option(
        "--keep-states",
        help="Keep checkpoints and clients' states of finished runs, to train them longer; they can be large.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Another value for any key of the experiment, such as local.lr=0.05."),
]
