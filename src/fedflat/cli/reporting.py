"""Commands for the page that compares runs: `fedflat report`, `fedflat watch`."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Annotated

import typer

from .app import LOOK, app, console

Runs = Annotated[list[Path], typer.Argument(help="Run directories, or directories that hold runs.")]
Last = Annotated[int, typer.Option(help="Accuracy is the mean of this many last tests.", min=1)]
Target = Annotated[
    float | None,
    typer.Option(
        help="Rounds, seconds and traffic to this accuracy, or value of the monitored metric, such as 0.8."
    ),
]
Splits = Annotated[
    bool, typer.Option("--splits/--no-splits", help="Deal data out again to show who has what.")
]


@app.command(rich_help_panel=LOOK)
def report(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    last: Last = 10,
    target: Target = None,
    splits: Splits = True,
) -> None:
    """Write one page that compares runs: tables, curves, flatness, landscapes (extra `report`)."""
    from ..report.page import write_report

    content = write_report(runs, out, last, target, splits)
    noted = sum(bool(run["notes"]) for run in content["runs"])
    shown = f"{len(content['runs'])} run{'s' * (len(content['runs']) != 1)}"
    if noted:
        shown += f", {noted} of them with a note on what is missing"
    console.print(f"{shown}: {out} ({out.stat().st_size / 1e6:.1f} MB)", highlight=False, soft_wrap=True)
    for one in content["left"]:
        console.print(
            f"Left out: {one['why']}", style="yellow", markup=False, highlight=False, soft_wrap=True
        )


@app.command(rich_help_panel=LOOK)
def watch(
    runs: Runs,
    port: Annotated[int, typer.Option(help="0 is any free one.", min=0, max=65535)] = 0,
    host: Annotated[
        str, typer.Option(help="Where to serve; by default only this machine can ask.")
    ] = "127.0.0.1",
    every: Annotated[float, typer.Option(help="Seconds between two looks at the runs.", min=0.2)] = 5.0,
    last: Last = 10,
    target: Target = None,
    splits: Splits = True,
) -> None:
    """Serve the report while runs train; it follows them, and new runs appear. Ctrl-C ends it."""
    from ..report.content import Content
    from ..report.server import ReportServer, is_loopback

    content = Content(runs, last, target, splits)
    found = len(content.page()["runs"])
    with ReportServer(content, host, port, every) as server:
        if not is_loopback(host):
            console.print(
                f"Warning: {host} can be reached from other machines, and whoever reaches it sees these runs.",
                style="yellow",
                highlight=False,
                soft_wrap=True,
            )
        console.print(
            f"{found or 'No'} run{'s' * (found != 1)} so far, at {server.address} (Ctrl-C ends it)",
            highlight=False,
            soft_wrap=True,
        )
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            console.print("\nEnded.")
