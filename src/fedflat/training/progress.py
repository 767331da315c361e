"""Showing a run while it goes on: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..core.monitor import Monitor
from .callbacks import Callback

if TYPE_CHECKING:
    from .record import RoundRecord
    from .train import Run

PLAIN_LINES = 10
"""How many lines a run prints where there is no terminal."""


class RunProgress(Callback):
    """One run's progress on a console, by default that of the script or the notebook."""

    may_lag = True

    def __init__(self, console: Console | None = None) -> None:
        self._console = console = console or Console()
        self._live = console.is_terminal or console.is_jupyter
        self._monitor, self._value, self._loss = Monitor(), "–", "–"
        self._rejected = 0
        self._bar = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            TextColumn("round {task.completed}/{task.total}"),
            TextColumn("{task.fields[metric]}", markup=False),
            TextColumn("{task.fields[value]}", style="green", markup=False),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}", style="yellow", markup=False),
            console=console,
            disable=not self._live,
        )
        self._task = self._bar.add_task("", total=None, metric="", value="–", loss="–", note="")

    def begin(self, run: Run) -> None:
        self._began, self._first = time.perf_counter(), len(run.history)
        self._label, self._rounds = run.method.name, run.settings.rounds
        self._monitor = run.monitor
        self._title = f"{'' if run.settings.validation is None else 'validation '}{run.monitor.title}"
        self._bar.update(
            self._task,
            description=self._label,
            total=self._rounds,
            completed=self._first,
            metric=self._title,
        )
        self._bar.start()

    def end(self, run: Run) -> None:
        self._bar.stop()

    def round(self, record: RoundRecord) -> None:
        value = self._monitor.judged(vars(record))
        if value is not None:
            self._value = self._monitor.text(value)
        loss = (record.validation or vars(record)).get("loss")
        if loss is not None:
            self._loss = f"{loss:.3f}"
        self._rejected += len(record.rejected)
        for sentence in record.rejected:
            said = Text.assemble(("left out:", "yellow"), f" {sentence}")
            self._bar.console.print(said, highlight=False)
        note = f"{self._rejected} uploads left out" if self._rejected else ""
        self._bar.update(
            self._task, completed=record.index + 1, value=self._value, loss=self._loss, note=note
        )
        if not self._live:
            self._print_line(record.index + 1, note)

    def working(self, what: str) -> None:
        self._bar.update(self._task, note=what)

    def measuring(self, name: str) -> None:
        """Show that a measure is being taken; an empty name: that it is done."""
        self._bar.update(self._task, note=f"measuring {name}" if name else "")

    def announce_stop(self) -> None:
        """Ctrl-C was pressed."""
        self._bar.console.print("Stopping after this round; press Ctrl-C again to stop at once.")

    def _print_line(self, done: int, note: str) -> None:
        every = max(1, self._rounds // PLAIN_LINES)
        if done % every and done != self._rounds:
            return
        seen = done - self._first
        left = (time.perf_counter() - self._began) / seen * (self._rounds - done)
        parts = [
            self._label,
            f"round {done}/{self._rounds}",
            f"{self._title} {self._value}",
            f"loss {self._loss}",
            f"{left:.0f} s left",
            note,
        ]
        self._console.print("  ".join(part for part in parts if part), highlight=False, soft_wrap=True)
