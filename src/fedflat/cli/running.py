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
    Task,
    filled_with,
    named,
    usually,
)
from .training import train_all

if TYPE_CHECKING:
    from ..experiments.schema import Experiment

DEMO = ("fedgmt", "fedavg", "fedsam")


@app.command(rich_help_panel=TRAIN)
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
    task: Task = None,
    image_size: ImageSize = None,
    client_folders: ClientFolders = False,
    per_round: Annotated[
        int | None, typer.Option(help=f"Clients that take part in a round. {usually('per_round')}", min=1)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help=f"Communication rounds. {usually('rounds')}", min=1)
    ] = None,
    lr: Annotated[float | None, typer.Option(help=f"Local learning rate. {usually('lr')}")] = None,
    lr_decay: Annotated[
        float | None, typer.Option(help="Factor on the learning rate every round. (default: 1)")
    ] = None,
    momentum: Annotated[
        float | None, typer.Option(help="Local SGD momentum, anew every round. (default: 0)")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Local weight decay. (default: 0)")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="Clip the local direction to this norm.")] = None,
    epochs: Annotated[
        int | None, typer.Option(help=f"Local epochs per round. {usually('epochs')}", min=1)
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Local steps per round, instead of epochs.")] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help=f"Local batch size; 0 is the full batch. {usually('batch_size')}", min=0),
    ] = None,
    weighting: Annotated[
        str | None,
        typer.Option(
            help="Average client updates by their number of samples, or uniform. (default: samples)"
        ),
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(
            help="Test the server's next model (server) or the clients' plain average (average). (default: server)"
        ),
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Test after every so many rounds. (default: 1)", min=1)
    ] = None,
    on_bad_upload: Annotated[
        str | None,
        typer.Option(help="An upload with NaN or a wrong shape: skip it or stop. (default: skip)"),
    ] = None,
    on_divergence: Annotated[
        str | None,
        typer.Option(
            help="When the model is no longer finite: stop, with exit code 3, or restore the last finite one and go "
            "on. (default: stop)"
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random. (default: 0)")] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Where clients run: inprocess, workers, a process per core, or ray, a cluster; all with the same "
            "result. (default: inprocess for small data, else workers)"
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="For --engine ray: a running cluster, or auto. (default: one is started on this machine)"
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of worker processes. (default: one per core)", min=1)
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads of this process; above 1 results depend on the number. (default: 1)", min=1
        ),
    ] = None,
    state_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for what is kept per client, such as 2GiB; the rest is on disk, in --out or TMPDIR. "
            "(default: all)"
        ),
    ] = None,
    measure: Annotated[
        list[str] | None,
        typer.Option(
            help="Flatness to record during the run: distance and drift in every round, others (sharpness, "
            "eigenvalues, ...) in every tenth; may be repeated."
        ),
    ] = None,
    track: Annotated[
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
) -> None:
    """Train. Without options: FedGMT beside FedAvg and FedSAM on handwritten digits, in seconds."""
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
        "task": task,
        "image_size": image_size,
        "client_folders": client_folders or None,
        "participation": per_round,
        "rounds": rounds,
        "local.lr": lr,
        "local.lr_decay": lr_decay,
        "local.momentum": momentum,
        "local.weight_decay": weight_decay,
        "local.clip_norm": clip_norm,
        "local.epochs": epochs,
        "local.steps": steps,
        "local.batch_size": "full" if batch_size == 0 else batch_size,
        "weighting": weighting,
        "evaluate": evaluate,
        "eval_every": eval_every,
        "on_bad_upload": on_bad_upload,
        "on_divergence": on_divergence,
        "seed": seed,
        "engine": _engine(engine, workers),
        "ray.address": ray_address,
        "threads": threads,
        "state_memory": state_memory,
        "measure": measure,
        "trackers": track,
    }
    usual: list[str | None] = list(DEMO) if file is None else [None]
    bases = [_load(file, {"method": one, **options}, set_) for one in method or usual]
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
            '  fedflat run --method "fedgmt + local-ascent(rho=0.05)"   a method nobody has published\n'
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
    """Go on with a run after Ctrl-C, a crash or a power cut: the result has the same bits as without it."""
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
            f"{directory} is a run of a real federation, whose data is on the clients' own nodes. To go on with it, "
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


def _engine(name: str | None, workers: int | None) -> str | None:
    if workers is None:
        return name
    if name not in (None, "workers"):
        raise FedflatError(f"--workers {workers} goes with --engine workers, not with {name}.")
    return f"workers:{workers}"
