"""`fedflat federate` and `fedflat privacy`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import app, console

if TYPE_CHECKING:
    from ..experiments.experiment import Experiment

federate = typer.Typer(
    help="Set up a real federation over Flower, whose data stays on its nodes.", no_args_is_help=True
)
app.add_typer(federate, name="federate")


@federate.command("init")
def init(
    project: Annotated[Path, typer.Argument(help="The directory to make.")],
) -> None:
    """Write a small Flower app that trains with fedflat, on demonstration data until you put yours in."""
    from ..federation.project import write_project

    for path in write_project(project):
        console.print(f"  {path}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"Your data goes into {project / 'federated' / 'data.py'}; {project / 'README.md'} says how to start.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@federate.command("keys")
def keys(
    directory: Annotated[Path, typer.Argument(help="Where to write them; nothing is overwritten.")],
    nodes: Annotated[int, typer.Option(help="How many node keys.", min=1)] = 3,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="The server's name or address; repeat it for several. (default: 127.0.0.1, localhost)"
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="The server's port.", min=1, max=65535)] = 8443,
    days: Annotated[int, typer.Option(help="How long the certificates are valid.", min=1)] = 365,
) -> None:
    """Make an authority, a server certificate and a key for every node, to try a federation out."""
    from ..federation.keys import make_keys

    for path in make_keys(directory, nodes, host or ["127.0.0.1", "localhost"], port, days):
        console.print(f"  {path}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        "Give a node ca.crt and its own key, nothing else. ca.key can make more certificates: keep it offline.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@app.command("privacy")
def privacy(
    file: Annotated[Path, typer.Argument(help="An experiment file (.yaml or .toml).")],
    delta: Annotated[float, typer.Option(help="The δ of (ε, δ); well below 1 / clients.")] = 1e-5,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another value for any key of the experiment, such as method.noise=2."),
    ] = None,
) -> None:
    """Say what leaves a client in an experiment, and its ε where everything that leaves carries noise."""
    from ..composition import as_method
    from ..experiments.building import make_participation, make_sgd
    from ..experiments.reading import load_experiment, parse_changes, parse_value
    from ..privacy import leaving, spent

    changes = {key: parse_value(text) for key, text in parse_changes(set_ or []).items()}
    experiment = load_experiment(file, changes).filled()
    method = as_method(experiment.method)
    found = leaving(method)

    def say(sentence: str) -> None:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    say(
        f"{method.name}: every round a client uploads {', '.join(found.vectors)} ({', '.join(found.numbers)} beside)."
    )
    say(
        f"It keeps {', '.join(found.kept) or 'nothing'}; the server keeps {', '.join(found.held) or 'nothing'} of it."
    )
    seed = experiment.seed if isinstance(experiment.seed, int) else experiment.seed[0]
    clients, rounds = experiment.clients or 1, experiment.rounds or 1
    cost = spent(
        method,
        make_sgd(experiment.local),
        make_participation(experiment.participation),
        clients,
        rounds,
        delta,
        seed,
        experiment.buffers,
        _has_buffers(experiment, seed),
    )
    say(
        f"ε = {cost.epsilon:.4g} at δ = {cost.delta:g}, client level, against the server too: the busiest client "
        f"uploads {cost.vectors} noisy vectors in each of {cost.rounds} rounds."
    )


def _has_buffers(experiment: Experiment, seed: int) -> bool:
    """Whether the model has BatchNorm statistics; if it cannot be built here, that is taken for granted."""
    from ..experiments.building import make_federation
    from ..models import build_model

    try:
        model = build_model(experiment.model or "mlp", make_federation(experiment, seed), seed)
    except (RuntimeError, ValueError):
        return True
    return any(buffer.is_floating_point() for buffer in model.buffers())
