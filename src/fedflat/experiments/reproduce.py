"""Running cells of a paper's table beside the published numbers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..methods.text import as_method
from ..storage.metrics_file import read_metrics
from ..storage.run_files import read_settings
from .caveats import kept_caveats, merged, protocol_caveats
from .changes import changed
from .files import make_experiment
from .presets import PaperCell, Preset
from .scale import small
from .statistics import Number, statistic
from .sweep import Cell, slug

Planned = tuple[PaperCell, list[Cell]]
"""A cell of a table and its runs, one per seed."""
Result = dict[str, Any]
"""A cell with the numbers that are there for it."""


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
            code_deviates=False,
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
            caveats = protocol_caveats([(cell.protocol(experiment.model), experiment)])
            if (missing := cell.missing_weights(experiment.model)) is not None:
                caveats.append(missing)
            runs.append(Cell(path, experiment, out / path, tuple(caveats)))
        planned.append((cell, runs))
    return planned


def tabulate(planned: Sequence[Planned], best: Preset | None = None) -> list[Result]:
    """One entry per cell: the statistic over the runs that have ended, what is published, and what to know of them.

    With `best` also the rows of that preset that have the best of others.
    """
    planned = [(_aimed(cell, planned), runs) for cell, runs in planned]
    results = [_result(cell, runs) for cell, runs in planned]
    by_place = {(result["row"], result["column"]): result["ours"] for result in results}
    for (cell, _), result in zip(planned, results, strict=True):
        _set_against(cell, result, by_place)
    return results + (_best_rows(best, results) if best is not None else [])


def _aimed(cell: PaperCell, planned: Sequence[Planned]) -> PaperCell:
    """A cell whose target is another row's final accuracy, with that of our runs of it in the same column."""
    if (row := cell.statistic.get("target_of")) is None:
        return cell
    last = int(cell.statistic["last"])
    means = [
        statistics.fmean(tested[-last:])
        for other, runs in planned
        if (other.row, other.column) == (row, cell.column)
        for run in runs
        if (run.out / "metrics.jsonl").exists() and "finished" in read_settings(run.out)
        if (tested := [r["accuracy"] for r in read_metrics(run.out) if r.get("accuracy") is not None])
    ]
    return replace(cell, target=round(statistics.fmean(means), 4) if means else None)


def _result(cell: PaperCell, runs: Sequence[Cell]) -> Result:
    numbers, last, notes = [], [], []
    for run in runs:
        if not (run.out / "metrics.jsonl").exists():
            continue
        rows = read_metrics(run.out)
        if "finished" not in read_settings(run.out):
            notes.append(f"at round {len(rows)}")
            continue
        numbers.append(statistic(cell, rows))
        last += [row["accuracy"] for row in rows if row.get("accuracy") is not None][-1:]
    values = [number.value for number in numbers if number.value is not None]
    deviation, over = _deviation(cell, numbers, values)
    notes += [number.note for number in numbers if number.note]
    notes += ["random weights" for run in runs if cell.missing_weights(run.experiment.model)]
    if values and len(values) < len(numbers):
        notes.append(f"{len(values)} of {len(numbers)} seeds")
    return {
        "row": cell.row,
        "column": cell.column,
        "statistic": numbers[0].name if numbers else _planned_statistic(cell),
        "unit": cell.unit,
        "ours": statistics.fmean(values) if values else None,
        "ours_std": deviation,
        "ours_std_over": over,
        "ours_note": ", ".join(dict.fromkeys(notes)),
        "seeds": len(values),
        "final_accuracy": statistics.fmean(last) if last else None,
        "paper": cell.published,
        "paper_std": cell.deviation,
        "paper_note": cell.note,
        "misprint": cell.misprint is not None,
        "code_deviates": cell.code_deviates,
        "notes": merged(*(run.notes for run in runs), *(kept_caveats(run.out) for run in runs)),
    }


def _deviation(
    cell: PaperCell, numbers: Sequence[Number], values: Sequence[float]
) -> tuple[float | None, str]:
    """Of the rounds that a mean is over, where the paper's is that, else of the seeds; and what it is over."""
    within = [number.deviation for number in numbers if number.deviation is not None]
    if cell.statistic.get("deviation") == "rounds" and within:
        return statistics.fmean(within), "rounds"
    return (statistics.stdev(values), "seeds") if len(values) > 1 else (None, "")


def _planned_statistic(cell: PaperCell) -> str:
    return statistic(cell, []).name if cell.statistic["kind"] != "mean" else "mean"


def _set_against(cell: PaperCell, result: Result, by_place: Mapping[tuple[str, str], float | None]) -> None:
    """A number relative to another row's, where the paper prints that."""
    for key, name in (("relative_to", "over"), ("gain_over", "gain over")):
        if (other := cell.statistic.get(key)) is None:
            continue
        ours, base = result["ours"], by_place.get((other, cell.column))
        result["statistic"] = f"{result['statistic']}, {name} {other}"
        result["ours_std"], result["ours_std_over"] = None, ""
        if ours is None or base is None or (key == "relative_to" and not base):
            result["ours"] = None
            result["ours_note"] = result["ours_note"] or (f"needs {other}" if base is None else "")
        else:
            result["ours"] = ours / base if key == "relative_to" else ours - base


def _best_rows(preset: Preset, results: Sequence[Result]) -> list[Result]:
    """Where the paper prints the best of several rows: that of ours, in the same column."""
    found = []
    for row, others in preset.best_rows().items():
        published = preset.content["rows"][row]["published"]
        for column in dict.fromkeys(result["column"] for result in results):
            rivals = [r for r in results if r["row"] in others and r["column"] == column]
            ours = [r for r in rivals if r["ours"] is not None]
            if not rivals or column not in published:
                continue
            best = max(ours, key=lambda r: r["ours"]) if ours else rivals[0]
            missing = len(others) - len(ours)
            note = f"{missing} of {len(others)} not there yet" if missing else str(best["row"])
            found.append({**best, "row": row, "paper": published[column], "ours_note": note})
    return found
