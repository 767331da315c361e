"""`fedflat privacy`: what leaves a client."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .app import FEDERATIONS, app, console
from .options import Set

if TYPE_CHECKING:
    from ..experiments.schema import Experiment


@app.command("privacy", rich_help_panel=FEDERATIONS)
def privacy(
    what: Annotated[str, typer.Argument(help="An experiment file (.yaml or .toml), or a method.")],
    delta: Annotated[float, typer.Option(help="The δ of (ε, δ); well below 1 / clients.")] = 1e-5,
    set_: Set = None,
) -> None:
    """Say what leaves a client, field by field, and its ε where everything that leaves carries noise."""
    from ..engines.flower.privacy import hello, leaving, spent
    from ..experiments.build import make_local, make_participation
    from ..methods.text import as_method

    experiment = _experiment(what, set_ or []).with_defaults()
    method, local = as_method(experiment.method), make_local(experiment.local)
    seed = experiment.seed if isinstance(experiment.seed, int) else experiment.seed[0]
    has_buffers = _has_buffers(experiment, seed)
    found = leaving(method, local, experiment.buffers, has_buffers)

    def say(sentence: str) -> None:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    beside = f" ({', '.join(found.numbers)} beside)" if found.numbers else ""
    say(f"{method.name}: every round a client uploads {', '.join(found.vectors)}{beside}.")
    say(
        f"It keeps {', '.join(found.kept) or 'nothing'}; the server keeps {', '.join(found.held) or 'nothing'} of it."
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for column in ("part", "field", "tells of samples"):
        table.add_column(column, no_wrap=True)
    table.add_column("what it is")
    for field in (*hello(method), *found.fields):
        table.add_row(field.part, field.name, field.kind, field.meaning)
    console.print(table, markup=False, highlight=False)
    say(
        "hello is said once, before the first round; ε does not cover it. A client that refuses or fails says why."
    )
    cost = spent(
        method,
        local,
        make_participation(experiment.participation),
        experiment.clients or 1,
        experiment.rounds or 1,
        delta,
        seed,
        experiment.buffers,
        has_buffers,
    )
    say(
        f"ε = {cost.epsilon:.4g} at δ = {cost.delta:g}, client level, against the server too: the busiest client "
        f"uploads {cost.vectors} noisy vectors in each of {cost.rounds} rounds."
    )


def _experiment(what: str, changes: list[str]) -> Experiment:
    """From a file, or that of a method where nothing else is said."""
    from ..experiments.changes import changed, parse_changes
    from ..experiments.files import load_experiment, make_experiment
    from ..experiments.parsing import parse_value

    others = {key: parse_value(text) for key, text in parse_changes(changes).items()}
    if Path(what).suffix in (".yaml", ".yml", ".toml", ".json") or Path(what).exists():
        return load_experiment(Path(what), others)
    return make_experiment(changed({"method": what}, others), what)


def _has_buffers(experiment: Experiment, seed: int) -> bool:
    """Whether the model has BatchNorm statistics; if it cannot be built here, that is taken for granted."""
    from ..experiments.build import make_federation
    from ..models import build_model

    try:
        model = build_model(experiment.model or "mlp", make_federation(experiment, seed), seed)
    except (RuntimeError, ValueError):
        return True
    return any(buffer.is_floating_point() for buffer in model.buffers())
