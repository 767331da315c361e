"""Commands that measure the models of runs: `fedflat flatness`, `fedflat landscape`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..errors import FedflatError, MissingExtra
from .app import LOOK, app, console
from .options import DataDirectory

if TYPE_CHECKING:
    from ..experiments.load_run import TrainedModel

BASIC = ("sharpness", "client-sharpness", "worst-case", "eigenvalues")
"""What is measured if nothing else is asked for."""

Runs = Annotated[list[Path], typer.Argument(help="Run directories, or directories that hold runs.")]


@app.command(rich_help_panel=LOOK)
def flatness(
    runs: Runs,
    measure: Annotated[
        list[str] | None,
        typer.Option(
            "--measure", "-m", help=f"Only these measures; may be repeated. (default: {', '.join(BASIC)})"
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="How many of the Hessian's largest eigenvalues.", min=1)] = 1,
    trace: Annotated[bool, typer.Option("--trace", help="The trace of the Hessian as well.")] = False,
    density: Annotated[bool, typer.Option("--density", help="The density of its eigenvalues.")] = False,
    lpf: Annotated[
        bool, typer.Option("--lpf", help="The loss under Gaussian noise (low-pass filter).")
    ] = False,
    radius: Annotated[bool, typer.Option("--radius", help="The loss at growing distance.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every measure there is.")] = False,
    part: Annotated[str, typer.Option(help="Of the train or the test data.")] = "train",
    samples: Annotated[
        int | None, typer.Option(help="At most this many samples, evenly spaced. (default: all)", min=1)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of a measure, such as sharpness.rho=0.1 or low-pass.draws=30."),
    ] = None,
    data: DataDirectory = None,
    again: Annotated[bool, typer.Option("--again", help="Also what has been measured before.")] = False,
) -> None:
    """Measure how flat the models of runs are; the numbers are kept in each run's flatness.json."""
    from ..experiments.compare import find_runs
    from ..experiments.measure_run import keep_measures, read_flatness, take_measure
    from ..experiments.run_state import NoState

    more = {"trace": trace, "density": density, "low-pass": lpf, "radius": radius}
    names = _measures(measure, [name for name, wanted in more.items() if wanted], everything)
    _require(names, optional=measure is None and not everything and top == 1)
    settings = _settings(set_ or [], names)
    if "eigenvalues" in names:
        settings["eigenvalues"].setdefault("top", top)
    rows: dict[str, dict[str, float | None]] = {}
    for run, trained in _trained(find_runs(runs), data):
        before = read_flatness(run)
        known = {} if again or before is None or before["round"] != trained.round else before["measures"]
        rows[str(run)] = {}
        for name in names:
            label = name if part == "train" or _federated(name) else f"{name} ({part})"
            taken = known.get(label)
            if (
                taken is None
                or not taken["numbers"]
                or not _as_asked(taken["settings"], settings[name], samples, name)
            ):
                try:
                    with _working(f"{run}: {label}"):
                        taken = take_measure(trained, name, part, samples, settings[name])
                except NoState as problem:
                    if not everything:
                        raise
                    _leave_out(label, problem)
                    continue
                keep_measures(run, trained.round, {label: taken})
            rows[str(run)] |= taken["numbers"]
    _show(rows)
    console.print(f"Kept in flatness.json of {'the run' if len(rows) == 1 else 'each run'}.", style="dim")


@app.command(rich_help_panel=LOOK)
def landscape(
    runs: Runs,
    part: Annotated[
        list[str] | None,
        typer.Option(help="Of the train or the test data; may be repeated. (default: train)"),
    ] = None,
    reach: Annotated[float, typer.Option(help="How far to look, in units of the filters' lengths.")] = 1.0,
    points: Annotated[int, typer.Option(help="Per direction; odd has the model in the middle.", min=2)] = 25,
    line: Annotated[bool, typer.Option("--line", help="Along one direction, not over a plane.")] = False,
    samples: Annotated[
        int, typer.Option(help="On at most this many samples, evenly spaced; 0 is all.", min=0)
    ] = 2000,
    seed: Annotated[int, typer.Option(help="Of the random directions, the same for all runs.")] = 0,
    jobs: Annotated[int, typer.Option(help="Processes that compute side by side.", min=1)] = 1,
    data: DataDirectory = None,
) -> None:
    """Compute the loss around the models of runs on the same random directions, for figures and the report.

    Kept in each run's landscape.json. Repeat the command to resume an interrupted one.
    """
    from ..experiments.compare import find_runs
    from ..experiments.measure_run import take_landscapes

    parts = list(dict.fromkeys(part or ["train"]))
    if wrong := [one for one in parts if one not in ("train", "test")]:
        raise FedflatError(f"--part {wrong[0]} is not possible: write train or test.")
    for run, trained in _trained(find_runs(runs), data):
        with _working(f"{run}: {points if line else points**2} points, {' and '.join(parts)}"):
            found = take_landscapes(
                {str(run): trained}, parts, reach, points, 1 if line else 2, samples or None, seed, jobs
            )
        for kind, losses in found[str(run)]["losses"].items():
            flat = losses if line else [value for row in losses for value in row]
            finite = [value for value in flat if value is not None]
            console.print(
                f"{run}  {kind} loss from {min(finite):.4g} to {max(finite):.4g}",
                highlight=False,
                soft_wrap=True,
            )
    console.print(
        "Draw it: fedflat figure surface RUNS... -o surface.png, or fedflat report RUNS...", style="dim"
    )


def _measures(only: list[str] | None, more: list[str], everything: bool) -> list[str]:
    from ..errors import nearest
    from ..flatness import MEASURES

    for name in only or []:
        if name not in MEASURES:
            raise FedflatError(f"There is no measure '{name}'.{nearest(name, MEASURES)}")
    if everything:
        return list(MEASURES)
    return list(dict.fromkeys([*(only or BASIC), *more]))


def _require(names: list[str], optional: bool) -> None:
    """Whether everything is installed that the measures need; what was not asked for by name is left out."""
    from ..flatness import MEASURES

    for name in list(names):
        try:
            MEASURES[name].require()
        except MissingExtra as missing:
            if not optional:
                raise
            names.remove(name)
            _leave_out(name, missing)


def _leave_out(name: str, problem: FedflatError) -> None:
    console.print(f"Without {name}: {problem}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _settings(given: list[str], names: list[str]) -> dict[str, dict[str, Any]]:
    """By measure, from `measure.setting=value`."""
    from ..experiments.changes import parse_changes
    from ..experiments.parsing import parse_value

    settings: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, text in parse_changes(given).items():
        name, dot, setting = key.partition(".")
        if not dot or name not in settings:
            raise FedflatError(
                f"--set {key}: write a measure that is taken and its setting: sharpness.rho=0.1."
            )
        settings[name][setting] = parse_value(text)
    return settings


def _federated(name: str) -> bool:
    from ..flatness import MEASURES

    return MEASURES[name].federated


def _as_asked(was: dict[str, Any], settings: dict[str, Any], samples: int | None, name: str) -> bool:
    """Whether a measure was taken in this way before."""
    wanted = {**settings, **({} if _federated(name) else {"samples": samples})}
    extra = set(was) - set(wanted) - {"part", "samples"}
    return not extra and all(was.get(key) == value for key, value in wanted.items())


def _trained(runs: list[Path], data: Path | None) -> Iterator[tuple[Path, TrainedModel]]:
    """Every run's model; data is loaded once for neighbours that share it."""
    import torch

    from ..experiments.load_run import load_run, same_data
    from ..experiments.run import experiment_of

    torch.set_num_threads(1)  # beside other work two threads are slower than one
    place = None if data is None else str(data)
    last: TrainedModel | None = None
    for run in runs:
        shared = last is not None and same_data(
            last.experiment.model_copy(update={"data": None}),
            experiment_of(run).model_copy(update={"data": None}),
        )
        last = load_run(run, last.federation if shared and last is not None else None, place)
        yield run, last


@contextmanager
def _working(what: str) -> Iterator[None]:
    """Say what is being done: a spinner in a terminal, a line elsewhere."""
    if not console.is_terminal:
        console.print(what, highlight=False, soft_wrap=True)
        yield
        return
    with console.status(Text(what)):
        yield


def _show(rows: dict[str, dict[str, float | None]]) -> None:
    """Measures down, runs across: there are more of those."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("measure")
    for run in rows:
        table.add_column(run, justify="right", overflow="fold")
    for name in dict.fromkeys(name for numbers in rows.values() for name in numbers):
        values = [numbers.get(name) for numbers in rows.values()]
        table.add_row(name, *("–" if value is None else f"{value:.4g}" for value in values))
    console.print(table)
