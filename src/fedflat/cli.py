"""The command line. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .errors import FedflatError
from .usual import USUAL

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

DEMO = ("fedgmt", "fedavg", "fedsam")
SHARPNESS_SAMPLES = 2000
"""Training samples, evenly spaced over the clients, on which the summary measures sharpness."""


def _usual(what: str) -> str:
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
        help=f"Number of clients. {_usual('clients')}; all there are with by-user and by-domain.", min=1
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


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from . import __version__

        console.print(f"fedflat {__version__}", highlight=False)
        raise typer.Exit


@app.command()
def run(
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            help="A method (fedgmt, fedsam(rho=0.1)) or a composition of mechanisms "
            '("local-ascent(rho=0.05) + control-variates"). Repeat it to compare several on the same split. '
            "(default: fedgmt beside fedavg and fedsam)",
        ),
    ] = None,
    dataset: Dataset = "digits",
    model: Annotated[
        str | None, typer.Option(help=f"The model; `fedflat models` lists them. {_usual('model')}")
    ] = None,
    partition: Annotated[str, typer.Option(help=PARTITION_HELP)] = "dirichlet:0.1",
    clients: Clients = None,
    augment: Annotated[
        str | None,
        typer.Option(
            help="How training images are augmented: none, crop-flip, fedwmsam, fedgmt-paper, "
            "fedgmt-code. (default: what is usual for the dataset)"
        ),
    ] = None,
    data: DataDirectory = None,
    download: Download = False,
    target: Target = None,
    client_column: ClientColumn = None,
    per_round: Annotated[
        int | None, typer.Option(help=f"Clients that take part in a round. {_usual('per_round')}", min=1)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help=f"Communication rounds. {_usual('rounds')}", min=1)
    ] = None,
    lr: Annotated[float | None, typer.Option(help=f"Local learning rate. {_usual('lr')}")] = None,
    lr_decay: Annotated[float, typer.Option(help="Factor on the learning rate every round.")] = 1.0,
    momentum: Annotated[float, typer.Option(help="Local SGD momentum, anew every round.")] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="Local weight decay.")] = 0.0,
    clip_norm: Annotated[float | None, typer.Option(help="Clip the local direction to this norm.")] = None,
    epochs: Annotated[
        int | None, typer.Option(help=f"Local epochs per round. {_usual('epochs')}", min=1)
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Local steps per round, instead of epochs.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help=f"Local batch size; 0 is the full batch. {_usual('batch_size')}", min=0)
    ] = None,
    weighting: Annotated[
        str, typer.Option(help="Average client updates by their number of samples, or uniform.")
    ] = "samples",
    evaluate: Annotated[
        str,
        typer.Option(help="Test the server's next model (server) or the clients' plain average (average)."),
    ] = "server",
    eval_every: Annotated[int, typer.Option(help="Test after every so many rounds.", min=1)] = 1,
    bad_uploads: Annotated[
        str, typer.Option(help="An upload with NaN or a wrong shape: skip it or stop.")
    ] = "skip",
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Where clients run: inprocess, or workers, a process per core with the same result. "
            "(default: inprocess for small data, else workers)"
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of worker processes. (default: one per core)", min=1)
    ] = None,
    threads: Annotated[
        int, typer.Option(help="Threads of this process; above 1 results depend on the number.", min=1)
    ] = 1,
    state_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for what is kept per client, such as 2GiB; the rest is on disk, in TMPDIR. "
            "(default: all)"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for metrics and the trained model. (default: none)")
    ] = None,
) -> None:
    """Train. Without options: FedGMT beside FedAvg and FedSAM on handwritten digits, in seconds."""
    from .data import federate
    from .local import LocalSGD
    from .progress import RunProgress
    from .training import train
    from .usual import usual

    methods = _methods(method or list(DEMO))
    loaded = _dataset(dataset, data, download, target, client_column)
    plan = usual(loaded.name)
    federation = federate(loaded, partition, _clients(clients, partition, plan.clients), seed, augment)
    model = model or plan.model
    rounds = rounds or plan.rounds
    per_round = per_round or min(plan.per_round, len(federation))
    given_length = epochs is not None or steps is not None
    size = plan.batch_size if batch_size is None else batch_size
    sgd = LocalSGD(
        lr=plan.lr if lr is None else lr,
        momentum=momentum,
        weight_decay=weight_decay,
        epochs=epochs if given_length else plan.epochs,
        steps=steps if given_length else plan.steps,
        batch_size=size or None,
        lr_decay=lr_decay,
        clip_norm=clip_norm,
    )
    length = f"{sgd.epochs} epochs" if sgd.steps is None else f"{sgd.steps} steps"
    console.print(
        f"{federation.name}, {sum(federation.sizes):,} samples over {len(federation)} clients by {partition}, "
        f"{per_round} a round, {rounds} rounds of {length}, batch {sgd.batch_size or 'full'}, lr {sgd.lr:g}, "
        f"model {model}, seed {seed}" + (f" ({loaded.note})" if loaded.note else ""),
        style="dim",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    runs = []
    for chosen in methods:
        with RunProgress(console, chosen.name, rounds) as progress:
            runs.append(
                train(
                    federation,
                    model,
                    chosen,
                    local=sgd,
                    participation=per_round,
                    rounds=rounds,
                    weighting=weighting,
                    evaluate=evaluate,
                    eval_every=eval_every,
                    on_bad_upload=bad_uploads,
                    seed=seed,
                    engine=_engine(engine, workers, loaded.name),
                    threads=threads,
                    state_memory=state_memory,
                    out=_directory(out, chosen.name, len(methods)),
                    on_round=progress.update,
                )
            )
    console.print(_summary(runs, federation))
    console.print(
        "Accuracy on the test set, at the end and as the mean of the last 10 tests. Sharpness of the global\n"
        f"training loss (rho 0.05, at most {SHARPNESS_SAMPLES:,} samples). Passes, traffic and training time of all\n"
        "clients together.",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
    if method is None:
        console.print(
            "\nWhere to go next\n"
            "  fedflat methods                    every method, what it sends, keeps and costs\n"
            "  fedflat run --method fedwmsam      one method; fedflat run --help lists the options\n"
            '  fedflat run --method "fedgmt + local-ascent(rho=0.05)"   a method nobody has published\n'
            "  README.md                          ten lines of Python, and how to write a mechanism",
            highlight=False,
            soft_wrap=True,
        )
    if out is not None:
        console.print(f"\nWritten to {out}", highlight=False)


@app.command()
def split(
    dataset: Annotated[
        str, typer.Argument(help="A dataset by name, a csv or Parquet file, a folder of images.")
    ],
    partition: Annotated[str, typer.Argument(help=PARTITION_HELP)],
    clients: Clients = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    plot: Annotated[bool, typer.Option("--plot", help="Draw clients and classes.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The picture's file. (default: DATASET-PARTITION.png)")
    ] = None,
    data: DataDirectory = None,
    download: Download = False,
    target: Target = None,
    client_column: ClientColumn = None,
) -> None:
    """Show how a partition deals a dataset out: samples and classes per client, and how uneven that is."""
    from .data.partitions import parse_partition
    from .data.split_report import describe, draw
    from .usual import usual

    loaded = _dataset(dataset, data, download, target, client_column)
    chosen = parse_partition(partition)
    labels = loaded.labels
    number = _clients(clients, partition, usual(loaded.name).clients)
    indices = chosen.split(labels, number, seed, loaded.groups)
    console.print(describe(labels, indices, loaded.classes))
    if plot or out is not None:
        name = f"{loaded.name}-{partition}".replace("/", "-").replace(":", "-")
        title = f"{loaded.name}, {partition}, {len(indices)} clients"
        path = draw(labels, indices, loaded.classes, out or Path(f"{name}.png"), title)
        console.print(f"Drawn to {path}", markup=False, highlight=False, soft_wrap=True)


@app.command("datasets")
def list_datasets(data: DataDirectory = None) -> None:
    """List the datasets known by name, the files each is read from, and whether it is on this machine."""
    from .data.catalogue import SOURCES
    from .data.loading import locate

    console.print("[bold]digits[/]  [green]ships with fedflat[/]", highlight=False)
    for name, source in SOURCES.items():
        place = locate(source, data)
        found = f"[green]in {place}[/]" if place else "[yellow]not found[/]"
        console.print(f"[bold]{name}[/]  {found}", highlight=False, soft_wrap=True)
        console.print(f"    {source.forms}", style="dim", highlight=False, markup=False, soft_wrap=True)


@app.command("models")
def list_models() -> None:
    """List the models known by name."""
    from .models import describe_model, model_names

    for name in model_names():
        console.print(f"[bold]{name}[/]", highlight=False)
        console.print(
            f"    {describe_model(name)}", style="dim", highlight=False, markup=False, soft_wrap=True
        )


@app.command("methods")
def list_methods(
    name: Annotated[str | None, typer.Argument(help="Show one method in detail.")] = None,
) -> None:
    """List the methods: paper, vectors down and up per round, passes per step, what is kept."""
    from .methods import METHODS

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


@app.command("mechanisms")
def list_mechanisms() -> None:
    """List the mechanisms that methods are composed of, with their parameters."""
    from . import methods as _  # noqa: F401  (importing them registers the mechanisms)
    from .mechanism import registry

    for name, kind in sorted(registry.items()):
        console.print(f"[bold]{name}[/]{_parameters(kind)}", highlight=False)
        console.print(f"    {_first_line(kind)}", style="dim", highlight=False, markup=False, soft_wrap=True)


def _describe(name: str) -> None:
    from .methods import METHODS

    method = _methods([name])[0]
    make = METHODS.get(name.replace("-", "_").lower())
    console.print(f"[bold]{method.name}[/]  {method.paper}", highlight=False)
    if make is not None:
        console.print(f"{_first_line(make)}", highlight=False, markup=False)
        console.print(f"{make.__name__}{_parameters(make)}", highlight=False, markup=False)
    console.print(f"\n= {method}\n", highlight=False, markup=False)
    for mechanism in method.mechanisms:
        console.print(f"[bold]{mechanism.name}[/]", highlight=False)
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


def _methods(names: list[str]) -> list[Any]:
    from .composition import as_method

    return [as_method(name) for name in names]


def _dataset(
    name: str, data: Path | None, download: bool, target: str | None, client_column: str | None
) -> Any:
    """A named dataset, or a person's own file or folder."""
    from .data import dataset_names, load_dataset
    from .data.own import read_images, read_table

    path = Path(name)
    if path.is_file():
        if target is None:
            raise FedflatError(f"Which column of {path} is the class? Say it with --target COLUMN.")
        return read_table(path, target, client_column)
    if path.is_dir() and (path.name != name or name.replace("_", "-").lower() not in dataset_names()):
        return read_images(path)
    if path.suffix in (".csv", ".parquet"):
        raise FedflatError(f"There is no file {path}.")
    return load_dataset(name, data, download)


def _clients(given: int | None, partition: str, otherwise: int) -> int | None:
    """As asked for; all there are, where the data says who is who."""
    natural = partition.split("/")[-1] in ("by-user", "by-domain")
    return given if given is not None or natural else otherwise


def _engine(name: str | None, workers: int | None, dataset: str) -> Any:
    """Worker processes where it pays: the papers' datasets are known to be large enough."""
    if name is None and workers is None:
        name = "inprocess" if dataset == "digits" or dataset not in USUAL else "workers"
    if workers is not None and name in (None, "workers"):
        from .engines.workers import Workers

        return Workers(workers)
    if workers is not None:
        raise FedflatError(f"--workers {workers} goes with --engine workers, not with {name}.")
    return name


def _directory(out: Path | None, name: str, runs: int) -> Path | None:
    if out is None or runs == 1:
        return out
    return out / "".join(c if c.isalnum() or c in "-.=" else "_" for c in name.lower())


def _summary(runs: list[Any], federation: Any) -> Table:
    from .flatness.sharpness import sharpness

    everything = federation.union().thinned(SHARPNESS_SAMPLES)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("method")
    for column in ("accuracy", "last 10", "sharpness", "passes F/B", "MB down/up", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    best = max((r.accuracy or 0.0) for r in runs)
    for one in runs:
        late = [row["accuracy"] for row in one.history if row["accuracy"] is not None][-10:]
        accuracy = "–" if one.accuracy is None else f"{one.accuracy:.1%}"
        mark = "bold green" if len(runs) > 1 and one.accuracy == best else ""
        table.add_row(
            one.method.name,
            f"[{mark}]{accuracy}[/]" if mark else accuracy,
            f"{sum(late) / len(late):.1%}" if late else "–",
            f"{sharpness(one.model, everything):.4f}",
            f"{one.total('forward'):,.0f}/{one.total('backward'):,.0f}",
            f"{one.total('bytes_down') / 1e6:,.0f}/{one.total('bytes_up') / 1e6:,.0f}",
            f"{one.total('seconds'):.1f}",
        )
    return table


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
