"""What came out of runs, as a table."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .app import console, headed

if TYPE_CHECKING:
    from ..data.federation import Federation
    from ..training.train import Run

SHARPNESS_SAMPLES = 2000
"""Training samples, evenly spaced over the clients, on which sharpness is measured."""


def show_notes(notes: Iterable[str]) -> None:
    """What to know before comparing runs with others, a line each."""
    for sentence in notes:
        console.print(headed("Note:", "yellow", sentence), highlight=False, soft_wrap=True)


def show_outcome(runs: list[Run], federation: Federation) -> None:
    """The table, and below it what its columns mean."""
    with console.status("measuring sharpness") if console.is_terminal else nullcontext():
        table = _table(runs, federation)
    console.print(table)
    console.print(
        "Accuracy on the test set, at the end and as the mean of the last 10 tests. Sharpness of the global\n"
        f"training loss (rho 0.05, at most {SHARPNESS_SAMPLES:,} samples). Passes that the method makes and, in\n"
        "brackets, those that fedflat did not have to compute; traffic and training time of all clients together.",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def _table(runs: list[Run], federation: Federation) -> Table:
    from ..flatness.sharpness import sharpness

    everything = federation.union().thinned(SHARPNESS_SAMPLES)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("method")
    for column in ("accuracy", "last 10", "sharpness", "passes F/B", "MB down/up", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    best = max((r.accuracy or 0.0) for r in runs)
    for one in runs:
        late = [row["accuracy"] for row in one.history if row["accuracy"] is not None][-10:]
        accuracy = "–" if one.accuracy is None else f"{one.accuracy:.1%}"
        mark = "bold green" if len(runs) > 1 and one.accuracy == best else ""
        table.add_row(
            one.method.name,
            Text(accuracy, style=mark),
            f"{sum(late) / len(late):.1%}" if late else "–",
            f"{sharpness(one.model, everything):.4f}",
            _passes(one),
            f"{one.total('bytes_down') / 1e6:,.0f}/{one.total('bytes_up') / 1e6:,.0f}",
            f"{one.total('seconds'):.1f}",
        )
    return table


def _passes(run: Run) -> str:
    """What the method makes, and in brackets what of it was spared."""
    made = f"{run.total('forward'):,.0f}/{run.total('backward'):,.0f}"
    spared = run.total("spared_forward"), run.total("spared_backward")
    return f"{made} (−{spared[0]:,.0f}/{spared[1]:,.0f})" if any(spared) else made
