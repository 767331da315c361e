"""`fedflat compare`: runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .app import LOOK, app, console
from .outcome import show_notes

if TYPE_CHECKING:
    from ..experiments.compare import Group


@app.command(rich_help_panel=LOOK)
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or directories that hold runs.")],
    last: Annotated[
        int, typer.Option(help="The monitored metric is the mean of this many last tests.", min=1)
    ] = 10,
    target: Annotated[
        float | None,
        typer.Option(
            help="Rounds, seconds and traffic to this accuracy, or value of the monitored metric, such as 0.8."
        ),
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            help="The metric on the test set (test), or on what clients hold out of training (validation)."
        ),
    ] = "test",
    clients: Annotated[
        bool,
        typer.Option(
            "--clients", help="Client by client: the spread over clients, and those that fare worst by name."
        ),
    ] = False,
    out: Annotated[
        list[Path] | None, typer.Option(help="Write the table to .csv, .md or .tex as well; may be repeated.")
    ] = None,
) -> None:
    """Compare runs: their metric over the last rounds and over seeds, worst clients, and what a target costs."""
    from ..experiments.by_client import client_table
    from ..experiments.caveats import all_caveats
    from ..experiments.compare import compare as compare_runs, find_runs, table

    found = find_runs(runs)
    groups = compare_runs(found, last, target, on)
    head, rows = client_table(groups) if clients else table(groups, last, target, on)
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for number, title in enumerate(head):
        shown.add_column(title, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    if clients:
        console.print(
            "Accuracies in per cent, of every client on its own samples at the end; the worst of the first column.",
            style="dim",
            highlight=False,
        )
        _finish(out, head, rows)
        return
    console.print(
        f"{_units(groups)}± over seeds. Within: deviation over the last tests. Worst decile: accuracy, in per cent,\n"
        "of the tenth of the clients that fare worst, each tested in its own mix of classes, or on its own data.",
        style="dim",
        highlight=False,
    )
    if any(group.by_clients for group in groups):
        console.print(
            "Reported by clients: the server has no test set, and each client tests the model that it receives on\n"
            "its own test set, or else on what it trains on. The model of the last round has not been tested.",
            style="dim",
            highlight=False,
        )
    show_notes([note for group in groups for note in group.notes] + all_caveats(found))
    _finish(out, head, rows)


def _finish(out: list[Path] | None, head: list[str], rows: list[list[str]]) -> None:
    from ..experiments.compare import write_table

    for path in out or []:
        write_table(path, head, rows)
        console.print(f"Written to {path}", highlight=False, soft_wrap=True)


def _units(groups: list[Group]) -> str:
    """What the numbers of the monitored metric are."""
    shares = {group.monitor.title: group.monitor.share for group in groups}
    told = [
        f"{title[0].upper()}{title[1:]}{' in per cent' if share else ''}" for title, share in shares.items()
    ]
    return f"{', '.join(told)}, "
