"""`fedflat compare` and `fedflat tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .options import app, console
from .running import Set


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or directories that hold runs.")],
    last: Annotated[int, typer.Option(help="Accuracy is the mean of so many last tests.", min=1)] = 10,
    target: Annotated[
        float | None,
        typer.Option(help="Rounds, seconds and traffic to this accuracy, such as 0.8.", min=0, max=1),
    ] = None,
    out: Annotated[
        list[Path] | None, typer.Option(help="Write the table to .csv, .md or .tex as well; may be repeated.")
    ] = None,
) -> None:
    """Compare runs: accuracy over the last rounds and over seeds, worst clients, and what a target costs."""
    from ..experiments.compare import compare as compare_runs, find_runs, table, write_table

    groups = compare_runs(find_runs(runs), last, target)
    head, rows = table(groups, last, target)
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for number, title in enumerate(head):
        shown.add_column(title, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    console.print(
        "Accuracies in per cent, ± over seeds. Within: deviation over the last tests. Worst decile: the tenth of\n"
        "the clients that fare worst, each tested in its own mix of classes.",
        style="dim",
        highlight=False,
    )
    for path in out or []:
        write_table(path, head, rows)
        console.print(f"Written to {path}", highlight=False, soft_wrap=True)


@app.command()
def tune(
    file: Annotated[Path, typer.Argument(help="An experiment file (.yaml or .toml).")],
    vary: Annotated[
        list[str],
        typer.Option(
            help="What to search: local.lr=0.01:1:log, method.rho=0.01:0.5:log, local.epochs=1,5,10."
        ),
    ],
    trials: Annotated[int, typer.Option(help="Trials in all; a study that has fewer goes on.", min=1)] = 20,
    set_: Set = None,
    last: Annotated[int, typer.Option(help="What counts is the mean of so many last tests.", min=1)] = 10,
    seed: Annotated[int, typer.Option(help="Of the search and of every run.", min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for the study. (default: runs/ and the file's name and -tune)"),
    ] = None,
) -> None:
    """Search for good settings with Optuna (extra `tune`); the same command goes on with an interrupted study."""
    from ..experiments.reading import changed, parse_changes, parse_value, read_file
    from ..experiments.running import stopping_at_round_end
    from ..experiments.tune import parse_range, tune as search

    content, _ = read_file(file)
    content = changed(content, {key: parse_value(text) for key, text in parse_changes(set_ or []).items()})
    ranges = {key: parse_range(text) for key, text in parse_changes(vary).items()}
    place = out or Path("runs") / f"{file.stem}-tune"

    def tell(number: int, value: float | None, chosen: Any) -> None:
        outcome = "ended early" if value is None else f"{value:.2%}"
        settings = ", ".join(f"{key}={_short(one)}" for key, one in chosen.items())
        console.print(f"trial {number}: {outcome}  {settings}", highlight=False, soft_wrap=True)

    def announce() -> None:
        console.print("Stopping after this round; press Ctrl-C again to stop at once.")

    with stopping_at_round_end(announce) as stop:
        best, accuracy = search(content, ranges, trials, place, last, seed, str(file), tell, stop)
    console.print(f"\nBest: {accuracy:.2%} with", highlight=False)
    console.print("  " + " ".join(f"--set {key}={_short(one)}" for key, one in best.items()), soft_wrap=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
