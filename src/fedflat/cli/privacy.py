"""`fedflat privacy`: what leaves a client."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .app import FEDERATIONS, app, console
from .options import Set

if TYPE_CHECKING:
    from ..experiments.experiment import Experiment


@app.command("privacy", rich_help_panel=FEDERATIONS)
def privacy(
    file: Annotated[Path, typer.Argument(help="An experiment file (.yaml or .toml).")],
    delta: Annotated[float, typer.Option(help="The δ of (ε, δ); well below 1 / clients.")] = 1e-5,
    set_: Set = None,
) -> None:
    """Say what leaves a client in an experiment, and its ε where everything that leaves carries noise."""
    from ..composition import as_method
    from ..experiments.building import make_participation, make_sgd
    from ..experiments.changes import parse_changes
    from ..experiments.parsing import parse_value
    from ..experiments.reading import load_experiment
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
