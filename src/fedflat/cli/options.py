"""Options that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.markup import escape

from ..client.optimisers import OPTIMISERS, OptimiserChoice
from ..data.protocols import PROTOCOLS
from ..training.settings import TrainingSettings

Command = TypeVar("Command", bound=Callable[..., None])


def usually(what: str) -> str:
    """The defaults of an option, by dataset."""
    first = getattr(PROTOCOLS["digits"], what)
    if first is None:
        return ""
    same = all(getattr(plan, what) == first for plan in PROTOCOLS.values())
    return f"(default: {first})" if same else f"(default: by dataset, {first} on digits)"


PARTITION_HELP = (
    "How data is partitioned: iid, dirichlet:ALPHA[:FORM], pathological:CLASSES[:FORM], hsu:ALPHA, "
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
    typer.Option(
        help="For a csv or Parquet file: the column that says whose row it is; partitioned by-user."
    ),
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
        help="For a folder of images: it holds a folder per client, with one per class in it; partitioned by-user.",
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


# -- options that are the fields of a class ----------------------------------------------------------

LOCAL, TRAINING = "Local training", "Training"
"""Groups of them in the help."""


def _settings() -> Iterator[tuple[str, str, Field[Any]]]:
    """The group, the key in an experiment and the field of every setting: the optimisers', then those of training."""
    kinds: list[Any] = [OptimiserChoice, *OPTIMISERS.values()]
    known = {field.name: field for kind in reversed(kinds) for field in fields(kind)}
    yield from ((LOCAL, f"local.{name}", field) for name, field in known.items())
    yield from ((TRAINING, field.name, field) for field in fields(TrainingSettings))


def with_settings(command: Command) -> Command:
    """Give a command an option for every setting; it takes them as `**settings`, see `changes_of`."""
    signature = inspect.signature(command, eval_str=True)
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    kind = inspect.Parameter.KEYWORD_ONLY
    made = [
        inspect.Parameter(field.name, kind, default=None, annotation=_option(field, group))
        for group, _, field in _settings()
    ]
    command.__signature__ = signature.replace(parameters=[*own, *made])  # type: ignore[attr-defined]
    return command


def _option(field: Field[Any], group: str) -> Any:
    """The option of a field: its kind, what it means, and its default."""
    facts = field.metadata
    about, default = escape(facts["help"]), _default(field)
    sentence = f"{about[0].upper()}{about[1:]}. {default}".strip()
    settings: dict[str, Any] = {"help": sentence, "rich_help_panel": group}
    kind: Any = str
    if "words" in facts:
        settings["metavar"] = "|".join(facts["words"])
    elif "entries" in facts:
        kind = list[str]
        settings["help"] += " Repeat it for several."
    elif field.type == "bool":
        kind = bool
    elif "bounds" in facts and not _is_text(facts):
        kind = int if facts["whole"] else float
        settings["min"] = facts["bounds"]["at least"]
    names = [f"--{facts['option']}"] if facts.get("option") else []
    return Annotated[kind | None, typer.Option(*names, **settings)]


def _default(field: Field[Any]) -> str:
    if hasattr(PROTOCOLS["digits"], field.name):
        return usually(field.name)
    if field.default in (None, ()):
        return ""
    shown = f"{field.default:g}" if isinstance(field.default, float) else str(field.default).lower()
    return f"(default: {shown})"


def _is_text(facts: Mapping[str, Any]) -> bool:
    """Whether a number may be written in other ways, as in a file."""
    return "pattern" in facts or isinstance(facts["optional"], str)


def changes_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What options change in an experiment, by dotted keys; None is no change."""
    from ..experiments.parsing import parse_value

    changes: dict[str, Any] = {}
    for _, key, field in _settings():
        value, facts = settings[field.name], field.metadata
        if isinstance(value, str) and "bounds" in facts:
            value = parse_value(value)
        changes[key] = [parse_value(one) for one in value] if isinstance(value, list) else value
    return changes
