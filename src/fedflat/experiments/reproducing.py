"""Running cells of a paper's table beside the published numbers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..composition import as_method
from ..rundirectory import read_metrics
from .changes import changed
from .presets import PaperCell, measured, small
from .reading import make_experiment
from .sweep import Cell, slug

Planned = tuple[PaperCell, list[Cell]]
"""A cell of a table and its runs, one per seed."""


def added(cells: Sequence[PaperCell], methods: Sequence[str]) -> list[PaperCell]:
    """Rows of our own: other methods in the same settings, without published numbers."""
    columns = {cell.column: cell for cell in cells}
    return [
        replace(
            cell,
            row=as_method(method).name,
            content=changed(cell.content, {"method": method}),
            published=None,
            deviation=None,
            note="",
            misprint=None,
        )
        for method in methods
        for cell in columns.values()
    ]


def plan_runs(
    cells: Sequence[PaperCell], out: Path, scale: str, seeds: Sequence[int], settings: Mapping[str, Any]
) -> list[Planned]:
    """Every cell with its runs; cells of the same experiment share them, under the first one's name.

    `settings` are put in the place of the paper's, by dotted keys.
    """
    contents = small(cells) if scale == "small" else [cell.content for cell in cells]
    names: dict[str, str] = {}
    planned = []
    for cell, content in zip(cells, contents, strict=True):
        name = names.setdefault(cell.run, f"{slug(cell.row)}/{slug(cell.column)}")
        runs = []
        for seed in seeds:
            changes = {**settings, "seed": seed}
            experiment = make_experiment(changed(content, changes), f"{cell.row}, {cell.column}")
            path = f"{name}/seed-{seed}"
            runs.append(Cell(path, experiment, out / path))
        planned.append((cell, runs))
    return planned


def tabulate(planned: Sequence[Planned]) -> list[dict[str, Any]]:
    """One entry per cell: the statistic over the seeds that have run, and what is published."""
    results = []
    for cell, runs in planned:
        values, name = [], ""
        last: list[float] = []
        for run in runs:
            if not (run.out / "metrics.jsonl").exists():
                continue
            rows = read_metrics(run.out)
            value, name = measured(cell, rows)
            if value is not None:
                values.append(value)
            last += [row["accuracy"] for row in rows if row.get("accuracy") is not None][-1:]
        results.append(
            {
                "row": cell.row,
                "column": cell.column,
                "statistic": name or str(cell.statistic.get("of", cell.statistic["kind"])),
                "unit": cell.unit,
                "ours": statistics.fmean(values) if values else None,
                "ours_std": statistics.stdev(values) if len(values) > 1 else None,
                "seeds": len(values),
                "final_accuracy": statistics.fmean(last) if last else None,
                "paper": cell.published,
                "paper_std": cell.deviation,
                "paper_note": cell.note,
            }
        )
    return results
