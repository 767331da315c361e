"""Showing a run while it goes on: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from .record import RoundRecord

PLAIN_LINES = 10
"""How many lines a run prints where there is no terminal."""


class RunProgress:
    """One run's progress; use it as a context and call `update` after every round."""

    def __init__(self, console: Console, label: str, rounds: int) -> None:
        self._console, self._label, self._rounds = console, label, rounds
        self._began = time.perf_counter()
        self._accuracy = self._loss = "–"
        self._rejected = 0
        self._first: int | None = None
        """the first round seen: a resumed run does not begin at 0"""
        self._bar = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            TextColumn("round {task.completed}/{task.total}"),
            TextColumn("accuracy"),
            TextColumn("{task.fields[accuracy]}", style="green", markup=False),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}", style="yellow", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=rounds, accuracy="–", loss="–", note="")

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, round: RoundRecord) -> None:
        """Show a finished round."""
        if round.accuracy is not None:
            self._accuracy = f"{round.accuracy:.1%}"
        if round.loss is not None:
            self._loss = f"{round.loss:.3f}"
        self._first = round.index if self._first is None else self._first
        self._rejected += len(round.rejected)
        for sentence in round.rejected:
            said = Text.assemble(("left out:", "yellow"), f" {sentence}")
            self._bar.console.print(said, highlight=False)
        note = f"{self._rejected} uploads left out" if self._rejected else ""
        self._bar.update(
            self._task, completed=round.index + 1, accuracy=self._accuracy, loss=self._loss, note=note
        )
        if not self._console.is_terminal:
            self._print_line(round.index + 1, note)

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
        seen = done - (self._first or 0)
        left = (time.perf_counter() - self._began) / seen * (self._rounds - done)
        parts = [
            self._label,
            f"round {done}/{self._rounds}",
            f"accuracy {self._accuracy}",
            f"loss {self._loss}",
            f"{left:.0f} s left",
            note,
        ]
        self._console.print("  ".join(part for part in parts if part), highlight=False, soft_wrap=True)
