"""What came out of runs, as a table."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..core.monitor import TITLES, Monitor
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
    title = runs[0].monitor.title
    with console.status("measuring sharpness") if console.is_terminal else nullcontext():
        table = _table(runs, federation)
    console.print(table)
    console.print(
        f"{title[0].upper()}{title[1:]} on the test set, at the end and as the mean of the last 10 tests. "
        f"Sharpness of the global\ntraining loss (rho 0.05, at most {SHARPNESS_SAMPLES:,} samples). Passes that the "
        "method makes and, in\nbrackets, those that fedflat did not have to compute; traffic and training time of "
        "all clients together.",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def _table(runs: list[Run], federation: Federation) -> Table:
    from ..flatness.sharpness import sharpness

    everything = federation.union().thinned(SHARPNESS_SAMPLES)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("method")
    monitor, further = runs[0].monitor, _further(runs)
    titles = [TITLES.get(name, name) for name in further]
    for column in (monitor.title, "last 10", *titles, "sharpness", "passes F/B", "MB down/up", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    ends = [run.monitored[-1] for run in runs if run.monitored]
    best = monitor.best(ends) if len(runs) > 1 and ends else None
    for one in runs:
        late = one.monitored[-10:]
        mark = "bold green" if late and late[-1] == best else ""
        table.add_row(
            one.method.name,
            Text(monitor.text(late[-1]) if late else "–", style=mark),
            monitor.text(sum(late) / len(late)) if late else "–",
            *(_last(one, name) for name in further),
            f"{sharpness(one.model, everything, loss=one.loss):.4f}",
            _passes(one),
            f"{one.total('bytes_down') / 1e6:,.0f}/{one.total('bytes_up') / 1e6:,.0f}",
            f"{one.total('seconds'):.1f}",
        )
    return table


def _further(runs: list[Run]) -> list[str]:
    """Metrics beside the monitored one that are numbers, and accuracy where another one is monitored."""
    rows = [row for run in runs for row in run.history if row["loss"] is not None][-1:]
    found = [
        name for row in rows for name, value in row.get("metrics", {}).items() if isinstance(value, float)
    ]
    accuracy = ["accuracy"] if rows and rows[0]["accuracy"] is not None else []
    return [name for name in (*accuracy, *found) if name != runs[0].monitor.name]


def _last(run: Run, name: str) -> str:
    """A metric in the last test, as a person reads it."""
    shown = Monitor(
        name, share=name in ("accuracy", "base-rate", "balanced-accuracy") or name.startswith("top-")
    )
    values = [value for row in run.history if (value := shown.of(row)) is not None]
    return shown.text(values[-1]) if values else "–"


def _passes(run: Run) -> str:
    """What the method makes, and in brackets what of it was spared."""
    made = f"{run.total('forward'):,.0f}/{run.total('backward'):,.0f}"
    spared = run.total("spared_forward"), run.total("spared_backward")
    return f"{made} (−{spared[0]:,.0f}/{spared[1]:,.0f})" if any(spared) else made
