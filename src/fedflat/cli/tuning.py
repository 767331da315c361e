"""`fedflat tune`: a search for good settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

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
    trials: Annotated[int, typer.Option(help="Trials in all; a study that has fewer goes on.", min=1)] = 20,
    set_: Set = None,
    last: Annotated[
        int,
        typer.Option(help="What counts is the monitored metric, the mean of this many last tests.", min=1),
    ] = 10,
    seed: Annotated[int, typer.Option(help="Of the search and of every run.", min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for the study. (default: runs/ and the file's name and -tune)"),
    ] = None,
) -> None:
    """Search for good settings with Optuna (extra `tune`); repeat the command to resume an interrupted study.

    Settings are chosen by accuracy on the test set: the best accuracy is optimistic, no estimate for new data.
    """
    from ..experiments.changes import changed, parse_changes
    from ..experiments.parsing import parse_value, read_file
    from ..experiments.run import stopping_at_round_end
    from ..experiments.tune import CHOSEN_ON_TEST, monitor_of_study, parse_range, tune as search

    content, _ = read_file(file)
    content = changed(content, {key: parse_value(text) for key, text in parse_changes(set_ or []).items()})
    ranges = {key: parse_range(text) for key, text in parse_changes(vary).items()}
    place = out or Path("runs") / f"{file.stem}-tune"

    def write(value: float) -> str:
        shown = monitor_of_study(place)
        return shown.text(value, 2) if shown.share else f"{shown.title} {shown.text(value)}"

    def tell(number: int, value: float | str | None, chosen: Any) -> None:
        outcome = value if isinstance(value, str) else "ended early" if value is None else write(value)
        settings = ", ".join(f"{key}={_short(one)}" for key, one in chosen.items())
        console.print(f"trial {number}: {outcome}  {settings}", highlight=False, soft_wrap=True)

    def announce() -> None:
        console.print("Stopping after this round; press Ctrl-C again to stop at once.")

    with stopping_at_round_end(announce) as stop:
        best, value = search(content, ranges, trials, place, last, seed, str(file), tell, stop)
    console.print(f"\nBest: {write(value)} on the test set, with", highlight=False)
    console.print("  " + " ".join(f"--set {key}={_short(one)}" for key, one in best.items()), soft_wrap=True)
    console.print(CHOSEN_ON_TEST, style="dim", highlight=False, soft_wrap=True)
    console.print(f"Kept in {place / 'best.json'}", style="dim", highlight=False, soft_wrap=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
