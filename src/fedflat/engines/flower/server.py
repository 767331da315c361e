"""The app on the server: wait for clients, then fedflat's own round loop over Flower's grid."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ...core.evaluation import LossFunction
from ...data.federation import Federation
from ...data.on_nodes import as_on_nodes
from ...errors import FedflatError, explained, nearest
from ...experiments.build import make_local, make_participation
from ...experiments.files import load_experiment
from ...experiments.schema import Experiment
from ...methods.text import as_method
from ...storage.files import replace_file
from ...training.record import RoundRecord
from ...training.train import Run, train
from .client import ModelHook
from .engine import Flower
from .limits import Limits
from .logs import say, to_console
from .nodes import Given, Nodes
from .privacy import withholds_samples
from .remote_federation import RemoteFederation

MAX_SHARE = 0.5
"""Of a round's weight, for one client, where the experiment says nothing; it says 1 for no limit."""
OTHER_SETTINGS = ("out", "report")
"""What an app's config may say beside `Limits`."""


def server_app(
    experiment: str | Path,
    test: Callable[[], Federation] | None = None,
    model: ModelHook | None = None,
    loss: LossFunction | None = None,
    shape: Sequence[int] | None = None,
    classes: int | None = None,
    vocabulary: int | None = None,
) -> ServerApp:
    """A Flower `ServerApp` that runs an experiment file on the clients that connect.

    Args:
        experiment: the file; what it says about a dataset is not used, the data is the clients'.
        test: the server's test set, as the test set of any federation; without one only the clients test.
        model: makes the model, if it is none that is known by name; the clients' app needs the same.
        loss: from outputs and targets to the mean loss of a batch; by default what the experiment says.
        shape: of one sample, as the model sees it. By default that of the server's test set; without any, what more
            than half of the nodes say.
        classes: how many there are; by default as with the shape.
        vocabulary: of text, how many words; goes with the shape.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        to_console()
        try:
            out, patience, report = read_settings(context.run_config, Path(experiment).stem)
            given = Given(None if shape is None else tuple(shape), classes, vocabulary)
            asked = load_experiment(Path(experiment))
            serve(grid, asked, out, patience, test, model, loss, report, given=given)
        except FedflatError as problem:
            say(logging.ERROR, f"Error: {problem}")
            raise

    return app


def serve(
    grid: Grid,
    experiment: Experiment,
    out: Path,
    patience: Limits | None = None,
    test: Callable[[], Federation] | None = None,
    model: ModelHook | None = None,
    loss: LossFunction | None = None,
    report: bool = True,
    nodes: Nodes | None = None,
    given: Given | None = None,
) -> Run:
    """Run an experiment; a run that is in `out` already is gone on with. `nodes` spares asking again who there is."""
    patience = patience or Limits()
    filled = experiment.with_defaults()
    if not isinstance(filled.seed, int):
        raise FedflatError(f"This is one run: choose one of the seeds {filled.seed}.")
    if filled.checkpoint_every not in (None, 1):
        raise FedflatError(
            "checkpoint_every: a federation is checkpointed after every round, since clients keep only their last "
            "states. Leave it out."
        )
    if filled.measure:
        raise FedflatError(
            "measure: a real federation records no measures, since they look at clients' data and local models. "
            "Leave it out, or measure in a simulation."
        )
    if loss is None and (
        filled.loss not in ("auto", "cross-entropy") or filled.task not in ("auto", "classification")
    ):
        raise FedflatError(
            "loss, task: in a real federation clients train with the loss of their own app. Leave these out and give "
            "both apps the function: server_app(..., loss=...), client_app(..., loss=...)."
        )
    clients = filled.clients or 1
    method = as_method(filled.method)
    held = test() if test is not None else None
    if nodes is None:
        known = _known(given or Given(), held)
        nodes = Nodes(grid, clients, patience, known, samples=not withholds_samples(method))
    facts = nodes.wait()
    federation = RemoteFederation(clients, facts.shape, facts.classes, facts.vocabulary, held)
    name = filled.model or "mlp"
    engine = Flower(grid, nodes, "" if model is not None else name, run_name(out), patience, report)
    careful: dict[str, Any] = {"checkpoint_every": 1, **({} if loss is None else {"loss": loss})}
    if "on_divergence" not in filled.model_fields_set:
        careful["on_divergence"] = "restore"  # one hostile client must not end the run
    say(logging.INFO, f"{method.name}: {filled.rounds} rounds with {clients} clients, in {out}")
    run = train(
        federation,
        name if model is None else model(facts.shape, facts.classes),
        method,
        make_local(filled.local),
        make_participation(filled.participation),
        engine=engine,
        out=out,
        on_round=_tell,
        resume=True,
        experiment=as_on_nodes(filled.to_dict(), filled.model if model is None else None),
        **{"max_share": MAX_SHARE, **filled.settings(), **careful},
    )
    say(logging.INFO, f"done; the model is {out / 'model.safetensors'}")
    return run


def _known(given: Given, test: Federation | None) -> Given:
    """What the server knows of samples: what it was told, else what its test set has."""
    if test is None:
        return given
    told = given.shape is not None
    return Given(
        given.shape if told else test.sample_shape,
        given.classes or test.classes,
        given.vocabulary if told else test.vocabulary,
    )


def read_settings(config: Mapping[str, Any], name: str) -> tuple[Path, Limits, bool]:
    """What an app's config says: where the run goes, how long the server waits, whether clients report."""
    given = {key.replace("-", "_"): value for key, value in config.items()}
    limits = {field.name for field in fields(Limits)}
    unknown = [key for key in given if key not in limits and key not in OTHER_SETTINGS]
    if unknown:
        known = sorted(key.replace("_", "-") for key in (*limits, *OTHER_SETTINGS))
        raise FedflatError(
            f"There is no setting '{unknown[0]}'.{nearest(unknown[0].replace('_', '-'), known)}"
        )
    patience = Limits(**{key: value for key, value in given.items() if key in limits})
    home = Path(os.environ.get("FEDFLAT_RUNS", Path.home() / ".fedflat" / "runs"))
    return home / str(given.get("out", name)), patience, bool(given.get("report", True))


def run_name(out: Path) -> str:
    """What clients know the run in a directory by: drawn once, kept there."""
    path = out / "federation.json"
    with explained(f"{path} cannot be read"):
        out.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return str(json.loads(path.read_text())["run"])
    name = secrets.token_hex(8)
    replace_file(path, json.dumps({"run": name}).encode())
    return name


def _tell(round: RoundRecord) -> None:
    """One line a round, and one for whoever did not answer."""
    parts = [f"round {round.index}", f"{len(round.clients)} clients"]
    if round.accuracy is not None:
        parts.append(f"accuracy {round.accuracy:.1%}")
    if round.reported and "accuracy" in round.reported:
        parts.append(f"clients' accuracy {round.reported['accuracy']:.1%}")
    if round.train_loss is not None and math.isfinite(round.train_loss):
        parts.append(f"training loss {round.train_loss:.3f}")
    say(logging.INFO, ", ".join([*parts, f"{round.seconds:.1f} s"]))
    for sentence in round.rejected:
        say(logging.WARNING, f"refused: {sentence}")
    for sentence in round.clipped:
        say(logging.WARNING, f"clipped: {sentence}")
    for sentence in round.dropped:
        say(logging.WARNING, f"upload kept: {sentence}")
