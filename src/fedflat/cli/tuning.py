"""`fedflat tune`: a search for good settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..core.monitor import Monitor
from .app import TRAIN, app, console
from .options import Set


@app.command(rich_help_panel=TRAIN)
def tune(
    file: Annotated[Path, typer.Argument(help="An experiment file (.yaml or .toml).")],
    vary: Annotated[
        list[str],
        typer.Option(
            help="What to search: local.lr=0.01:1:log, method.rho=0.01:0.5:log, local.epochs=1,5,10."
        ),
    ],
    trials: Annotated[
        int | None,
        typer.Option(
            help="Trials in all; a study that has fewer is resumed. (default: 20; of lists of values, all)",
            min=1,
        ),
    ] = None,
    set_: Set = None,
    last: Annotated[
        int,
        typer.Option(
            help="What counts is the monitored metric on the validation part, the mean of this many last tests.",
            min=1,
        ),
    ] = 10,
    seed: Annotated[int, typer.Option(help="Of the search and of every run.", min=0)] = 0,
    jobs: Annotated[int, typer.Option(help="Trials at the same time, each in its own process.", min=1)] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for the study. (default: runs/ and the file's name and -tune)"),
    ] = None,
) -> None:
    """Search for good settings with Optuna (extra `tune`); repeat the command to resume an interrupted study.

    Settings are chosen by the monitored metric on a validation part of the clients' training samples: `validation` in
    the file, or a tenth.
    The test set is used once, at the end, for the chosen settings trained on all training samples.
    """
    from ..experiments.changes import changed, parse_changes
    from ..experiments.parsing import parse_value, read_file
    from ..experiments.run import stopping_at_round_end
    from ..experiments.tune import CHOSEN_ON_VALIDATION, monitor_of_study, parse_range, tune as search

    content, _ = read_file(file)
    content = changed(content, {key: parse_value(text) for key, text in parse_changes(set_ or []).items()})
    ranges = {key: parse_range(text) for key, text in parse_changes(vary).items()}
    place = out or Path("runs") / f"{file.stem}-tune"
    try:
        with TuningProgress(place) as progress, stopping_at_round_end(progress.announce_stop) as stop:
            found = search(content, ranges, trials, place, last, seed, str(file), progress, stop, jobs)
    except KeyboardInterrupt:
        console.print("Interrupted; repeat the command to resume the study.")
        raise typer.Exit(130) from None
    monitor = monitor_of_study(place)
    console.print(
        f"\nBest: {_write(monitor, found.validation)} on the validation part, with", highlight=False
    )
    chosen = " ".join(f"--set {key}={_short(one)}" for key, one in found.settings.items())
    console.print(f"  {chosen}", soft_wrap=True, highlight=False)
    if found.test is not None:
        tested = _write(monitor, found.test)
        console.print(f"Trained on all training samples: {tested} on the test set", highlight=False)
    console.print(CHOSEN_ON_VALIDATION, style="dim", highlight=False, soft_wrap=True)
    console.print(f"Kept in {place / 'best.json'}", style="dim", highlight=False, soft_wrap=True)


class TuningProgress:
    """A bar for every trial under way, and a line for every one that has ended."""

    def __init__(self, study: Path) -> None:
        self._study = study
        self._bar = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            TextColumn("round {task.completed}/{task.total}"),
            TextColumn("{task.fields[value]}", style="green", markup=False),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> TuningProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def announce_stop(self) -> None:
        """Ctrl-C was pressed."""
        self._bar.console.print("Stopping after this round; press Ctrl-C again to stop at once.")

    def round(self, run: str, done: int, of: int, value: float | None) -> None:
        """A trial, or the chosen run, has done some of its rounds."""
        if run not in self._tasks:
            self._tasks[run] = self._bar.add_task(run, total=of, value="")
        self._bar.update(self._tasks[run], completed=done)
        if value is not None:
            self._bar.update(self._tasks[run], value=self._told(value))

    def finished(self, trial: int, value: float | str | None, settings: Mapping[str, Any]) -> None:
        """A trial has ended."""
        task = self._tasks.pop(f"trial-{trial}", None)
        if task is not None:
            self._bar.remove_task(task)
        outcome = value if isinstance(value, str) else "ended early" if value is None else self._told(value)
        chosen = ", ".join(f"{key}={_short(one)}" for key, one in settings.items())
        self._bar.console.print(f"trial {trial}: {outcome}  {chosen}", highlight=False, soft_wrap=True)

    def _told(self, value: float) -> str:
        from ..experiments.tune import monitor_of_study

        return _write(monitor_of_study(self._study), value)


def _write(monitor: Monitor, value: float) -> str:
    return monitor.text(value, 2) if monitor.share else f"{monitor.title} {monitor.text(value)}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
