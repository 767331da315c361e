"""Commands that show what there is: datasets, models, methods, mechanisms, and how a partition deals data out."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..errors import FedflatError
from .app import THERE_IS, app, console
from .options import (
    PARTITION_HELP,
    Categorical,
    ClientColumn,
    ClientFolders,
    Clients,
    DataDirectory,
    Download,
    Features,
    ImageSize,
    Missing,
    Numeric,
    Target,
    Task,
    filled_with,
    named,
)


@app.command(rich_help_panel=THERE_IS)
def split(
    dataset: Annotated[
        str, typer.Argument(help="A dataset by name, a csv or Parquet file, a folder of images.")
    ],
    partition: Annotated[str, typer.Argument(help=PARTITION_HELP)],
    clients: Clients = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    plot: Annotated[bool, typer.Option("--plot", help="Draw clients and classes.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="The picture's file, or a directory for it. (default: DATASET-PARTITION.png)"),
    ] = None,
    data: DataDirectory = None,
    download: Download = False,
    target: Target = None,
    client_column: ClientColumn = None,
    features: Features = None,
    categorical: Categorical = None,
    numeric: Numeric = None,
    missing: Missing = None,
    task: Task = None,
    image_size: ImageSize = None,
    client_folders: ClientFolders = False,
) -> None:
    """Show how a partition deals a dataset out: samples and classes per client, and how uneven that is."""
    from ..data.partitions import parse_partition
    from ..data.preprocessing import client_names
    from ..data.protocols import protocol_for
    from ..data.split_picture import draw
    from ..data.split_report import describe
    from ..experiments.build import read_dataset
    from ..experiments.schema import NATURAL

    loaded = read_dataset(
        dataset,
        data,
        download,
        target,
        client_column,
        named(features),
        image_size,
        client_folders,
        categorical=named(categorical),
        numeric=numeric,
        missing=filled_with(missing),
        task=task,
    )
    chosen = parse_partition(partition)
    if loaded.task == "regression":
        raise FedflatError(
            f"{loaded.note}: there are no classes to show. Name classes with --task classification, or train at once "
            "with `fedflat run`."
        )
    labels = loaded.labels
    natural = partition.split("/")[-1] in NATURAL
    number = clients if clients is not None or natural else protocol_for(loaded.name).clients
    indices = chosen.split(labels, number, seed, loaded.groups)
    names = client_names(loaded, indices) or ()
    console.print(describe(labels, indices, loaded.classes, names))
    if plot or out is not None:
        name = f"{loaded.name}-{partition}".replace("/", "-").replace(":", "-")
        title = f"{loaded.name}, {partition}, {len(indices)} clients"
        place = out or Path()
        if place.is_dir() or not place.suffix:  # matplotlib would silently add an ending
            place = place / f"{name}.png"
        path = draw(labels, indices, loaded.classes, place, title, names)
        console.print(f"Drawn to {path}", markup=False, highlight=False, soft_wrap=True)


@app.command("datasets", rich_help_panel=THERE_IS)
def list_datasets(data: DataDirectory = None) -> None:
    """List the datasets known by name, the files each is read from, and whether it is on this machine."""
    from ..data.catalogue import SOURCES
    from ..data.loading import locate

    console.print("[bold]digits[/]  [green]ships with fedflat[/]", markup=True, highlight=False)
    for name, source in SOURCES.items():
        place = locate(source, data)
        found = (f"in {place}", "green") if place else ("not found", "yellow")
        console.print(Text.assemble((name, "bold"), "  ", found), highlight=False, soft_wrap=True)
        console.print(f"    {source.forms}", style="dim", highlight=False, markup=False, soft_wrap=True)


@app.command("models", rich_help_panel=THERE_IS)
def list_models() -> None:
    """List the models known by name."""
    from ..models import describe_model, model_names

    for name in model_names():
        console.print(Text(name, style="bold"), highlight=False)
        console.print(
            f"    {describe_model(name)}", style="dim", highlight=False, markup=False, soft_wrap=True
        )


@app.command("methods", rich_help_panel=THERE_IS)
def list_methods(
    name: Annotated[str | None, typer.Argument(help="Show one method in detail.")] = None,
) -> None:
    """List the methods: paper, vectors down and up per round, passes per step, what is kept."""
    from ..methods.named import METHODS

    if name is not None:
        _describe(name)
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for column in ("method", "down", "up", "F/B"):
        table.add_column(column, no_wrap=True)
    for column in ("client keeps", "server keeps", "paper"):
        table.add_column(column)
    for function, make in METHODS.items():
        method, cost = make(), make().cost
        held = [f"{kept} of every client" for kept in cost.server_per_client]
        table.add_row(
            function.replace("_", "-"),
            " + ".join([str(cost.down), *cost.down_scalars]),
            str(cost.up),
            f"{cost.forward}/{cost.backward}",
            ", ".join(cost.client) or "–",
            ", ".join(["w", *cost.server, *held]),
            method.paper,
        )
    console.print(table)
    console.print(
        "down, up: vectors as large as the model, per active client and round (+ named numbers)\n"
        "F/B: forward and backward passes per local step\n"
        "`fedflat methods NAME` shows a method's mechanisms, `fedflat mechanisms` all there are.",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


@app.command("mechanisms", rich_help_panel=THERE_IS)
def list_mechanisms() -> None:
    """List the mechanisms that methods are composed of, with their parameters."""
    from ..methods import named as _  # noqa: F401  (importing them registers the mechanisms)
    from ..methods.mechanism import registry

    for name, kind in sorted(registry.items()):
        console.print(Text.assemble((name, "bold"), _parameters(kind)), highlight=False)
        console.print(f"    {_first_line(kind)}", style="dim", highlight=False, markup=False, soft_wrap=True)


def _describe(name: str) -> None:
    from ..methods.named import METHODS
    from ..methods.text import as_method

    method = as_method(name)
    make = METHODS.get(name.replace("-", "_").lower())
    console.print(Text.assemble((method.name, "bold"), f"  {method.paper}"), highlight=False)
    if make is not None:
        console.print(f"{_first_line(make)}", highlight=False, markup=False)
        console.print(f"{make.__name__}{_parameters(make)}", highlight=False, markup=False)
    console.print(f"\n= {method}\n", highlight=False, markup=False)
    for mechanism in method.mechanisms:
        console.print(Text(mechanism.name, style="bold"), highlight=False)
        text = inspect.cleandoc(type(mechanism).__doc__ or "")
        console.print(f"{text}\n", highlight=False, markup=False, soft_wrap=True)
    cost = method.cost
    console.print(
        f"{cost.down} vectors down, {cost.up} up; {cost.forward} forward and {cost.backward} backward "
        f"passes a step; clients keep {', '.join(cost.client) or 'nothing'}",
        highlight=False,
    )


def _parameters(maker: Any) -> str:
    shown = [f"{p.name}={p.default!r}" for p in inspect.signature(maker).parameters.values()]
    return f"({', '.join(shown)})" if shown else ""


def _first_line(thing: Any) -> str:
    return (thing.__doc__ or "").strip().split("\n")[0]


@app.command(rich_help_panel=THERE_IS)
def schema() -> None:
    """Print the JSON schema of experiment files; editors complete keys with it."""
    from ..experiments.schema import Experiment

    print(json.dumps(Experiment.model_json_schema(), indent=2))
