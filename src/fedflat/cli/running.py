"""Commands that train: `fedflat run`, `fedflat resume`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import FedflatError
from .app import TRAIN, app, console
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
    Set,
    Target,
    changes_of,
    filled_with,
    named,
    usually,
    with_settings,
)
from .training import train_all

if TYPE_CHECKING:
    from ..experiments.schema import Experiment

DEMO = ("fedgmt", "fedavg", "fedsam")


@app.command(rich_help_panel=TRAIN)
@with_settings
def run(
    file: Annotated[
        Path | None, typer.Argument(help="An experiment file (.yaml or .toml); options change it.")
    ] = None,
    set_: Set = None,
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
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            help="Beside the methods, with as many local steps: local, every client alone, or pooled, all data "
            "in one place; may be repeated."
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="A dataset by name (`fedflat datasets` lists them), a csv or Parquet file, or a folder of "
            "images. (default: digits)"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help=f"The model; `fedflat models` lists them. {usually('model')}")
    ] = None,
    partition: Annotated[str | None, typer.Option(help=f"{PARTITION_HELP} (default: dirichlet:0.1)")] = None,
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
    features: Features = None,
    categorical: Categorical = None,
    numeric: Numeric = None,
    missing: Missing = None,
    image_size: ImageSize = None,
    client_folders: ClientFolders = False,
    test_per_client: Annotated[
        str | None,
        typer.Option(
            help="For your own data: the fraction of every client's samples to test on, or the column of a table "
            "that is 1, true or test there. (default: 0.2)"
        ),
    ] = None,
    participation: Annotated[
        str | None,
        typer.Option(
            help=f"Who takes part: clients per round, everyone, or bernoulli:0.1. {usually('per_round')}"
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Where clients run: inprocess, workers (a process per core), workers:3, or ray, a cluster; all with "
            "equal results. (default: inprocess for small data, else workers)"
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="For --engine ray: a running cluster, or auto. (default: one is started on this machine)"
        ),
    ] = None,
    trackers: Annotated[
        list[str] | None,
        typer.Option(help="Send metrics to tensorboard, wandb, mlflow or trackio as well; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for metrics, checkpoints and the trained model. (default: none; for a file, "
            "runs/ and its name)"
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Train. Without options: FedGMT beside FedAvg and FedSAM on handwritten digits, in seconds."""
    from ..experiments.parsing import parse_value

    options: dict[str, Any] = {
        "dataset": dataset,
        "model": model,
        "partition": partition,
        "clients": clients,
        "augment": augment,
        "data": None if data is None else str(data),
        "download": download or None,
        "target": target,
        "client_column": client_column,
        "features": named(features),
        "categorical": named(categorical),
        "numeric": numeric,
        "missing": filled_with(missing),
        "image_size": image_size,
        "client_folders": client_folders or None,
        "test_per_client": None if test_per_client is None else parse_value(test_per_client),
        "participation": None if participation is None else parse_value(participation),
        "engine": engine,
        "ray.address": ray_address,
        "trackers": trackers,
        **changes_of(settings),
    }
    usual: list[str | None] = list(DEMO) if file is None else [None]
    bases = [_load(file, {"method": one, **options}, set_) for one in method or usual]
    bases += [_load(file, {**options, "method": "fedavg", "baseline": one}, set_) for one in baseline or []]
    if file is not None and out is None:
        out = Path("runs") / file.stem
    seeds = bases[0].seed if isinstance(bases[0].seed, list) else [bases[0].seed]
    experiments = [base.model_copy(update={"seed": seed}) for seed in seeds for base in bases]
    runs = train_all(experiments, out)
    if method is None and file is None:
        console.print(
            "\nWhere to go next\n"
            "  fedflat methods                    every method, what it sends, keeps and costs\n"
            "  fedflat run --method fedwmsam      one method; fedflat run --help lists the options\n"
            '  fedflat run --method "fedgmt + local-ascent(rho=0.05)"   an unpublished method\n'
            "  README.md                          ten lines of Python, and how to write a mechanism",
            highlight=False,
            soft_wrap=True,
        )
    if out is not None and runs:
        console.print(f"\nWritten to {out}", highlight=False, soft_wrap=True)


@app.command(rich_help_panel=TRAIN)
def resume(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of an interrupted run.")],
    rounds: Annotated[
        int | None, typer.Option(help="Another number of rounds: a finished run is trained on.", min=1)
    ] = None,
) -> None:
    """Resume a run after Ctrl-C, a crash or a power cut: the result has the same bits as without it."""
    from ..data.on_nodes import GO_ON, ON_NODES
    from ..experiments.run import experiment_of, is_done

    experiment = experiment_of(directory, to_run=True)
    if rounds is not None:
        experiment = experiment.model_copy(update={"rounds": rounds})
    if is_done(directory, experiment.rounds):
        console.print(f"{directory} is done: nothing is left of its {experiment.rounds} rounds.")
        return
    if experiment.dataset == ON_NODES:
        longer = "" if rounds is None else f"write rounds: {rounds} into the experiment.yaml of its app, "
        raise FedflatError(
            f"{directory} is a run of a real federation, whose data is on the clients' own nodes. To resume it, "
            f"{longer}start the server and the nodes where they have stopped, then {GO_ON}."
        )
    notes = [] if rounds is None else [f"Its rounds were changed to {rounds} by `fedflat resume`."]
    train_all([experiment], directory, resuming=True, notes=notes)
    console.print(f"\nWritten to {directory}", highlight=False, soft_wrap=True)


def _load(file: Path | None, options: dict[str, Any], given: list[str] | None) -> Experiment:
    from ..experiments.changes import changed, parse_changes
    from ..experiments.files import load_experiment, make_experiment
    from ..experiments.parsing import parse_value

    changes = {name: value for name, value in options.items() if value is not None}
    changes |= {key: parse_value(text) for key, text in parse_changes(given or []).items()}
    if file is not None:
        return load_experiment(file, changes)
    return make_experiment(changed({}, changes))
