"""`fedflat sweep`: a grid of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .app import TRAIN, app, console, headed
from .options import DataDirectory, Download, KeepStates, Set
from .outcome import show_notes

if TYPE_CHECKING:
    from ..experiments.sweep import Cell


@app.command(rich_help_panel=TRAIN)
def sweep(
    file: Annotated[Path, typer.Argument(help="An experiment file (.yaml or .toml).")],
    method: Annotated[
        str | None,
        typer.Option("--method", "-m", help="Methods, separated by commas: fedavg,fedsam(rho=0.1)."),
    ] = None,
    set_: Set = None,
    seeds: Annotated[
        str, typer.Option(help="How many seeds (3 is 0, 1 and 2), or which: 0,5,7. (default: the file's)")
    ] = "",
    jobs: Annotated[int, typer.Option(help="Runs at a time, each on a core of its own.", min=1)] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the runs. (default: runs/ and the file's name)")
    ] = None,
    data: DataDirectory = None,
    download: Download = False,
    keep_states: KeepStates = False,
) -> None:
    """Run a grid: every method with every value of `--set key=a,b,c` and every seed.

    What is done is skipped and what was interrupted is resumed: repeat the command to continue a sweep.
    """
    from ..experiments.build import fetch_missing
    from ..experiments.caveats import all_caveats
    from ..experiments.changes import parse_changes, split_values
    from ..experiments.parsing import read_file
    from ..experiments.run import stopping_at_round_end
    from ..experiments.sweep import grid, run_cells

    content, lines = read_file(file)
    if data is not None:
        content = {**content, "data": str(data)}
    if download:
        content = {**content, "download": True}
    settings = {key: split_values(text) for key, text in parse_changes(set_ or []).items()}
    methods = split_values(method) if method else []
    place = out or Path("runs") / file.stem
    wanted = _seeds(seeds, settings.pop("seed", content.get("seed", 0)))
    cells = grid(content, place, methods, settings, wanted, str(file), lines)
    fetch_missing(cell.experiment for cell in cells)
    failed: dict[str, str] = {}
    try:
        with (
            GridProgress([cell.experiment.with_defaults().rounds or 1 for cell in cells]) as progress,
            stopping_at_round_end(progress.announce_stop) as stop,
        ):
            failed = run_cells(cells, jobs, progress, stop, keep_states)
            interrupted = stop()
    except KeyboardInterrupt:
        interrupted = True
    show_notes(all_caveats(cell.out for cell in cells))
    for name, problem in failed.items():
        console.print(headed(f"{name}:", "red", problem), highlight=False, soft_wrap=True)
    if interrupted:
        console.print("Interrupted; repeat the command to resume.")
        raise typer.Exit(130)
    console.print(f"{len(cells) - len(failed)} of {len(cells)} runs are in {place}. Compare them with")
    console.print(f"  fedflat compare {place}", highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _seeds(text: str, otherwise: Any) -> list[Any]:
    """What is asked for, or what the file says, right or wrong."""
    from ..errors import FedflatError

    if not text:
        return otherwise if isinstance(otherwise, list) and otherwise else [otherwise]
    if not all(part.strip().isdecimal() for part in text.split(",")) or text.strip("0 ") == "":
        raise FedflatError(f"--seeds {text}: write how many, such as 3, or which, such as 0,5,7.")
    given = [int(part) for part in text.split(",")]
    return given if len(given) > 1 else list(range(given[0]))


class GridProgress:
    """One bar for all rounds of a grid; plain lines where there is no terminal."""

    def __init__(self, rounds: list[int]) -> None:
        self._done: dict[str, int] = {}
        self._cells, self._ended, self._total = len(rounds), 0, sum(rounds)
        self._bar = Progress(
            TextColumn("{task.fields[runs]}", style="bold", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[last]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=self._total, runs=f"0/{self._cells} runs", last="")

    def __enter__(self) -> GridProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def announce_stop(self) -> None:
        """Ctrl-C was pressed."""
        self._bar.console.print("Stopping after the rounds under way; press Ctrl-C again to stop at once.")

    def round(self, cell: Cell, done: int, value: float | None) -> None:
        """Show how many rounds a run has done."""
        from ..experiments.compare import monitor_of

        self._done[cell.name] = done
        shown = cell.name if value is None else f"{cell.name} {monitor_of(cell.out).text(value)}"
        self._bar.update(self._task, completed=sum(self._done.values()), last=shown)

    def finished(self, cell: Cell, problem: str | None) -> None:
        """A run has ended."""
        self._ended += 1
        self._bar.update(self._task, runs=f"{self._ended}/{self._cells} runs")
        if not console.is_terminal:
            told = f"{self._ended}/{self._cells} runs  {cell.name}  {problem or 'done'}"
            console.print(told, markup=False, soft_wrap=True)
