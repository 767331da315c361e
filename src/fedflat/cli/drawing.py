"""`fedflat figure`: the papers' figure types, a command for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import FedflatError, require
from .app import LOOK, app, console
from .options import DataDirectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

figure = typer.Typer(
    help="Draw runs: learning curves, flatness, landscapes and the papers' other figures, as png, svg or pdf.",
    no_args_is_help=True,
)
app.add_typer(figure, name="figure", rich_help_panel=LOOK)


def _drawable(out: Path) -> Path:
    """Before anything is computed: whether a figure can be drawn here, and written to the file."""
    from ..figures.style import check_ending

    require("matplotlib", "matplotlib", "plot", "Drawing a figure")
    check_ending(out)
    return out


Runs = Annotated[list[Path], typer.Argument(help="Run directories, or directories that hold runs.")]
Out = Annotated[
    Path, typer.Option("--out", "-o", help="The file to write: .png, .svg or .pdf.", callback=_drawable)
]
Width = Annotated[str, typer.Option(help="One or two columns of a paper: one, two.")]
Smooth = Annotated[int, typer.Option(help="Every point is the mean of this many last values.", min=1)]
Against = Annotated[str, typer.Option(help="What is across: rounds, bytes, passes, seconds.")]
Part = Annotated[str, typer.Option(help="Of the train or the test data.")]
Log = Annotated[bool, typer.Option("--log", help="A logarithmic vertical axis.")]
Parts = Annotated[
    list[str] | None,
    typer.Option("--part", help="Only this part of the data, train or test; may be repeated. (default: all)"),
]
Ceiling = Annotated[float | None, typer.Option(help="The highest loss to tell apart.")]


@figure.command()
def curves(
    runs: Runs,
    out: Out,
    value: Annotated[
        str | None,
        typer.Option(
            help="What is up: accuracy, validation, loss, train_loss, worst_decile, or a recorded metric such as "
            "auroc. (default: the monitored metric)"
        ),
    ] = None,
    against: Against = "rounds",
    smooth: Smooth = 1,
    within: Annotated[
        tuple[float, float] | None, typer.Option(help="Both ends of the vertical axis: --within 60 90.")
    ] = None,
    width: Width = "one",
) -> None:
    """Learning curves: a metric or a loss against rounds, bytes, passes or seconds; bands over seeds."""
    from ..figures import learning_curves

    _write(learning_curves(runs, value, against, smooth, within, width), out)


@figure.command()
def sharpness(
    runs: Runs,
    out: Out,
    measure: Annotated[
        list[str] | None,
        typer.Option(help="A recorded measure, a panel for each; may be repeated. (default: sharpness)"),
    ] = None,
    against: Against = "rounds",
    smooth: Smooth = 1,
    log: Log = False,
    width: Width = "one",
) -> None:
    """Sharpness, or any measure recorded while training, against rounds, bytes, passes or seconds."""
    from ..figures import measure_curves

    _write(measure_curves(runs, measure or ["sharpness"], against, smooth, log, width), out)


@figure.command()
def traces(
    runs: Runs,
    out: Out,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="c, alpha, cosine, one-minus-cosine, 'drift cosine', ...; may be repeated. "
            "(default: all that methods keep)"
        ),
    ] = None,
    smooth: Smooth = 1,
    width: Width = "one",
) -> None:
    """A method's own numbers by round: FedGF's c, FedWMSAM's alpha, cosines between updates."""
    from ..figures import traces as draw

    _write(draw(runs, name, smooth, width), out)


@figure.command()
def target(
    runs: Runs,
    out: Out,
    target: Annotated[
        float | None,
        typer.Option(
            help="The accuracy, or value of the monitored metric, to reach, such as 0.8. (default: the whole per "
            "cent that all runs reach)",
        ),
    ] = None,
    computation: Annotated[str, typer.Option(help="What is across: seconds, passes, rounds.")] = "seconds",
    communication: Annotated[str, typer.Option(help="What is up: bytes, rounds.")] = "bytes",
    width: Width = "one",
) -> None:
    """Communication against computation until a target accuracy, a line for each method."""
    from ..figures import cost_to_target

    _write(cost_to_target(runs, target, computation, communication, width), out)


@figure.command()
def sensitivity(
    runs: Runs,
    out: Out,
    by: Annotated[str, typer.Option(help="The setting: method.rho, partition.alpha, local.epochs, ...")],
    last: Annotated[int, typer.Option(help="Accuracy is the mean of this many last tests.", min=1)] = 10,
    measure: Annotated[
        list[str] | None, typer.Option(help="A panel with this recorded measure as well; may be repeated.")
    ] = None,
    along_with: Annotated[
        list[str] | None,
        typer.Option(help="A setting that changes along with it and starts no line; may be repeated."),
    ] = None,
    width: Width = "one",
) -> None:
    """Final accuracy against a setting that a sweep varies."""
    from ..figures import sensitivity as draw

    _write(draw(runs, by, last, measure or [], width, along_with or []), out)


@figure.command()
def partition(
    runs: Annotated[
        list[Path], typer.Argument(help="Runs, directories that hold some, or experiment files.")
    ],
    out: Out,
    data: DataDirectory = None,
    width: Width = "two",
) -> None:
    """Which client has how many samples of which class."""
    from ..experiments.build import make_federation
    from ..experiments.compare import find_runs, leave_out
    from ..experiments.files import load_experiment
    from ..experiments.load_run import same_data
    from ..experiments.run import experiment_of
    from ..figures import partitions

    found = [load_experiment(path) for path in runs if path.is_file()]
    folders = [path for path in runs if not path.is_file()]
    for run in find_runs(folders) if folders else []:
        try:
            found.append(experiment_of(run))
        except FedflatError as problem:
            leave_out(problem)
    if not found:
        raise FedflatError("There is no experiment whose data could be partitioned.")
    different = [
        one for number, one in enumerate(found) if not any(same_data(one, o) for o in found[:number])
    ]
    federations = {}
    for one in different:
        place = {} if data is None else {"data": str(data)}
        seed = one.seed if isinstance(one.seed, int) else one.seed[0]
        federation = make_federation(one.model_copy(update=place), seed)
        title = f"{federation.name}, {_split(one.with_defaults().partition)}, {len(federation)} clients, seed {seed}"
        federations[title] = federation
    _write(
        partitions(federations, width), out, [note for one in federations.values() for note in one.caveats]
    )


@figure.command()
def landscape(
    runs: Runs, out: Out, part: Parts = None, ceiling: Ceiling = None, width: Width = "two"
) -> None:
    """The loss around models as contours (or curves) on shared axes; `fedflat landscape` computes it."""
    from ..figures import landscapes

    _write(landscapes(runs, part, ceiling, width), out)


@figure.command()
def surface(runs: Runs, out: Out, part: Parts = None, ceiling: Ceiling = None, width: Width = "two") -> None:
    """The loss around models as surfaces in space; `fedflat landscape` computes it."""
    from ..figures import surfaces

    _write(surfaces(runs, part, ceiling, width), out)


@figure.command()
def radius(
    runs: Runs,
    out: Out,
    along: Annotated[
        list[str] | None,
        typer.Option(help="random directions or the gradient, uphill; may be repeated. (default: random)"),
    ] = None,
    part: Part = "train",
    log: Log = False,
    width: Width = "one",
) -> None:
    """The loss against the radius of a perturbation; `fedflat flatness --radius` measures it."""
    from ..figures import loss_by_radius

    _write(loss_by_radius(runs, along or ["random"], part, log, width), out)


@figure.command()
def density(
    runs: Runs,
    out: Out,
    part: Part = "train",
    blur: Annotated[float, typer.Option(help="Width of an eigenvalue, as a part of the range.")] = 0.01,
    width: Width = "one",
) -> None:
    """The density of the Hessian's eigenvalues; `fedflat flatness --density` measures it."""
    from ..figures import spectral_densities

    _write(spectral_densities(runs, part, blur, width), out)


@figure.command()
def embedding(
    runs: Runs,
    out: Out,
    part: Part = "train",
    samples: Annotated[int, typer.Option(help="At most this many samples, evenly spaced.", min=3)] = 1000,
    perplexity: Annotated[float, typer.Option(help="Of t-SNE.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Of t-SNE.", min=0)] = 0,
    together: Annotated[bool, typer.Option("--together", help="All models in one embedding.")] = False,
    data: DataDirectory = None,
    width: Width = "two",
) -> None:
    """t-SNE of the models' penultimate features, coloured by class, side by side (extra `embedding`)."""
    from ..experiments.caveats import all_caveats
    from ..experiments.compare import find_runs
    from ..figures import embeddings
    from ..figures.trials import by_place
    from ..flatness.embedding import embedding as embed_models
    from .measuring import _trained

    require("sklearn", "scikit-learn", "embedding", "An embedding by t-SNE")
    names = {place: name for name, place in by_place(runs).items()}
    models, federations = {}, []
    for run, trained in _trained(find_runs(runs), data):
        models[names[run]] = trained.model
        federations.append(trained.federation)
    if different := {one.name for one in federations} - {federations[0].name}:
        raise FedflatError(
            f"The runs are on {federations[0].name} and {different.pop()}: draw those on one dataset at a time."
        )
    shown = {"train": federations[0].union(), "test": federations[0].test}.get(part)
    if shown is None:
        raise FedflatError(f"--part {part} is not possible: write train, or test where there is a test set.")
    drawn = embeddings(embed_models(models, shown, samples, perplexity, seed, together), width=width)
    _write(drawn, out, all_caveats(names))


@figure.command()
def trajectory(
    run: Annotated[Path, typer.Argument(help="A run directory, with its states: `--keep-states` in sweeps.")],
    out: Out,
    method: Annotated[
        list[str], typer.Option("--method", "-m", help="Two methods or more; repeat the option.")
    ],
    client: Annotated[int, typer.Option(help="Whose path, counted from 0.", min=0)] = 0,
    points: Annotated[int, typer.Option(help="Of the loss, per direction.", min=2)] = 25,
    samples: Annotated[
        int, typer.Option(help="The loss on at most this many samples, evenly spaced; 0 is all.", min=0)
    ] = 2000,
    data: DataDirectory = None,
    width: Width = "two",
) -> None:
    """Where a client goes in the round after a run's last, by method, on a plane of local and global loss."""
    from ..experiments.run_trajectory import paths_of
    from ..figures import trajectories
    from ..figures.trials import written
    from ..flatness.landscape import plane

    if len(method) < 2:
        raise FedflatError(
            "A plane goes through the start and two ends: give two methods, -m fedavg -m fedsam."
        )
    trained, found = paths_of(run, client, method, None if data is None else str(data))
    paths = {written(name): path for name, path in found.items()}
    first, *_, last = paths.values()
    shown = {"local": trained.federation.client(client), "global": trained.federation.union()}
    if samples:
        shown = {name: shard.thinned(samples) for name, shard in shown.items()}
    seen = plane(trained.model, [first[0], first[-1], last[-1]], shown, paths, points)
    _write(trajectories(seen, start=f"after round {trained.round}", width=width), out)


@figure.command()
def clients(runs: Runs, out: Out, width: Width = "one") -> None:
    """Every client's own accuracy at the end, run beside run; of many, those that fare worst, by name."""
    from ..figures import client_spread

    _write(client_spread(runs, width), out)


@figure.command()
def tuning(
    study: Annotated[Path, typer.Argument(help="The directory of a search, as `fedflat tune` writes it.")],
    out: Out,
    width: Width = "two",
) -> None:
    """A search for settings: what every trial came to, in their order and against every setting."""
    from ..figures import tuning as draw

    _write(draw(study, width), out)


def _split(partition: object) -> str:
    from ..experiments.build import make_partition

    return str(make_partition(partition))  # type: ignore[arg-type]


def _write(drawn: Figure, out: Path, notes: Sequence[str] = ()) -> None:
    from ..figures import save
    from ..figures.footnote import footnote

    footnote(drawn, dict.fromkeys(notes))
    console.print(f"Drawn to {save(drawn, out)}", markup=False, highlight=False, soft_wrap=True)
