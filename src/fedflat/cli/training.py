"""Training one experiment after the other on the same data, in view of a person."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from ..errors import Diverged, FedflatError
from .app import console, headed, make_console
from .outcome import show_notes, show_outcome

if TYPE_CHECKING:
    from ..data.federation import Federation
    from ..experiments.schema import Experiment
    from ..training.train import Run


def train_all(
    experiments: list[Experiment], out: Path | None, resuming: bool = False, notes: Sequence[str] = ()
) -> list[Run]:
    """Train one after the other on the same data, and show the outcome."""
    from ..experiments.baselines import run_name
    from ..experiments.build import make_federation
    from ..experiments.run import run_experiment, stopping_at_round_end
    from ..training.progress import RunProgress

    runs: list[Run] = []
    federation: Federation | None = None
    last_seed: Any = None
    diverged = 0
    directories = [out] if resuming else _directories(out, experiments)
    for experiment, directory in zip(experiments, directories, strict=True):
        filled = experiment.with_defaults()
        if federation is None or filled.seed != last_seed:
            federation = make_federation(filled, filled.seed if isinstance(filled.seed, int) else 0)
            last_seed = filled.seed
            _announce(experiment.with_defaults(len(federation)), federation)
        filled = experiment.with_defaults(len(federation))
        label = run_name(filled)
        rounds = filled.rounds or 1
        try:
            progress = RunProgress(console)
            with stopping_at_round_end(progress.announce_stop) as stop, _notices():
                run = run_experiment(
                    filled,
                    directory,
                    federation,
                    [progress],
                    resume=resuming,
                    stop=stop,
                    on_measure=progress.measuring,
                    overlap=True,
                    notes=notes,
                )
        except KeyboardInterrupt:
            _interrupted(directory, "at once", _names(experiments[len(runs) + diverged + 1 :]))
        except Diverged as problem:
            if len(experiments) == 1:
                raise
            diverged += 1  # the others are none the worse for it
            said = headed(f"{label} diverged:", "red", str(problem))
            make_console(stderr=True).print(said, highlight=False, soft_wrap=True)
            continue
        if len(run.history) < rounds:
            when = f"after round {len(run.history)} of {rounds}"
            _interrupted(directory, when, _names(experiments[len(runs) + diverged + 1 :]))
        runs.append(run)
    assert federation is not None
    if runs:
        show_outcome(runs, federation)
    if diverged:
        raise typer.Exit(3)
    return runs


def _announce(filled: Experiment, federation: Federation) -> None:
    from ..experiments.build import make_partition

    local = filled.local
    length = f"{local.epochs} epochs" if local.steps is None else f"{local.steps} steps"
    partition = str(make_partition(filled.partition))
    dealt = partition if partition.startswith("by-") else f"by {partition}"
    active = f"{filled.participation} a round"
    console.print(
        f"{federation.name}, {federation.samples:,} samples over {len(federation)} clients {dealt}, "
        f"{active}, {filled.rounds} rounds of {length}, "
        f"batch {local.batch_size}, lr {local.lr:g}, model {filled.model}, seed {filled.seed}"
        + (f" ({federation.note})" if federation.note else ""),
        style="dim",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    show_notes(federation.caveats)


@contextmanager
def _notices() -> Iterator[None]:
    """Show what a run warns about as sentences."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for sentence in dict.fromkeys(str(w.message) for w in caught if w.category is UserWarning):
                console.print(headed("Note:", "yellow", sentence), highlight=False, soft_wrap=True)


def _names(experiments: list[Experiment]) -> list[str]:
    from ..experiments.baselines import run_name

    several = len({str(e.seed) for e in experiments}) > 1
    return [run_name(e) + (f" (seed {e.seed})" if several else "") for e in experiments]


def _interrupted(directory: Path | None, when: str, left: list[str]) -> NoReturn:
    if directory is None:
        console.print(f"Stopped {when}; without --out nothing is kept.", highlight=False)
    else:
        command = f"fedflat resume {shlex.quote(str(directory))}"
        console.print(
            f"Stopped {when}. Resume it with\n  {command}", markup=False, highlight=False, soft_wrap=True
        )
    if left:
        console.print(
            f"Not begun: {', '.join(left)}. (`fedflat sweep` resumes all of its runs when it is repeated.)",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    raise typer.Exit(130)


def _directories(out: Path | None, experiments: list[Experiment]) -> list[Path | None]:
    """One directory for one run; one in it for each of several, named after what makes it differ."""
    from ..experiments.baselines import run_name
    from ..experiments.sweep import slug

    if out is None or len(experiments) == 1:
        return [out] * len(experiments)
    methods = [e.baseline or str(e.method) for e in experiments]
    names = [run_name(e) for e in experiments]
    if len(set(names)) < len(set(methods)):  # one method with several parameters
        names = methods
    several = len({str(e.seed) for e in experiments}) > 1
    parts = [
        slug(name) + (f"-seed{e.seed}" if several else "") for name, e in zip(names, experiments, strict=True)
    ]
    if len(set(parts)) < len(parts):
        raise FedflatError("Two of the runs would be the same: give every method and every seed once.")
    return [out / part for part in parts]
