"""Make the pages of results: `python results/make_pages.py RUNS`, with what `fedflat reproduce --out RUNS` wrote.

Every run becomes a few numbers and a thinned learning curve in `fedwmsam-table1.json`, which is kept here;
`fedwmsam-table1.md` shows it beside the published numbers. Without RUNS only the page is written again.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from fedflat.experiments.presets import PaperCell, choose, find_preset
from fedflat.experiments.reproducing import added
from fedflat.experiments.sweep import slug
from fedflat.rundirectory import read_metrics, read_settings

HERE = Path(__file__).parent
STORE = HERE / "fedwmsam-table1.json"
OURS = ["fedgmt", "fednsam", "fedgf"]
HEAD = ["method", "seeds", "best round", "last 100", "low tenth", "worst decile", "paper"]
HEAD += ["best − paper", "last 100 − paper", "low tenth − paper"]
EARLY = 100
"""Rounds that do not count for the low tenth."""
FAR = 1.5
"""Points from which a difference wants an explanation."""


def collect(runs: Path) -> dict[str, Any]:
    """The finished runs, by row, column and seed."""
    found: dict[str, Any] = {}
    for cell in cells():
        place = runs / slug(cell.row) / slug(cell.column)
        for run in sorted(place.glob("seed-*")):
            if not (run / "model.safetensors").exists():
                continue
            rows = read_metrics(run)
            accuracy = [row["accuracy"] for row in rows]
            found[f"{cell.row}|{cell.column}|{run.name}"] = {
                "rounds": len(rows),
                "max": max(accuracy),
                "last50": statistics.fmean(accuracy[-50:]),
                "last100": statistics.fmean(accuracy[-100:]),
                "final": accuracy[-1],
                "low_tenth": statistics.quantiles(accuracy[EARLY:], n=10, method="inclusive")[0],
                "worst_decile": rows[-1]["client_accuracy"]["worst_decile"],
                "every10": [round(a, 4) for a in accuracy[9::10]],
                "torch": read_settings(run)["environment"]["torch"],
            }
    return found


def cells() -> list[PaperCell]:
    theirs = choose(find_preset("fedwmsam/table1").cells(), ["fashion-mnist"], [])
    return theirs + added(theirs, OURS)


def page(found: dict[str, Any]) -> str:
    """One table per column."""
    lines = [(HERE / "fedwmsam-table1-head.md").read_text()]
    for column in dict.fromkeys(cell.column for cell in cells()):
        shown = [cell for cell in cells() if cell.column == column and runs_of(found, cell)]
        if not shown:
            continue
        lines += [f"\n## {column}\n"]
        lines += ["| " + " | ".join(HEAD) + " |", "| --- |" + " ---: |" * (len(HEAD) - 1)]
        lines += [
            line(cell.row + " †" * cell.code_deviates, runs_of(found, cell), cell.published) for cell in shown
        ]
        lines += best_lines(found, column)
    return "\n".join(lines) + "\n"


def line(row: str, mine: list[dict[str, Any]], published: float | None) -> str:
    """One method: ours, the paper's, and the difference by three statistics."""
    best, late, low = ([run[key] for run in mine] for key in ("max", "last100", "low_tenth"))
    others = [spread([run[key] for run in mine]) for key in ("last100", "low_tenth", "worst_decile")]
    paper = "–" if published is None else f"{100 * published:.2f}"
    gaps = [gap(values, published) for values in (best, late, low)]
    entries = [row, str(len(mine)), spread(best), *others, paper, *gaps]
    return "| " + " | ".join(entries) + " |"


def best_lines(found: dict[str, Any], column: str) -> list[str]:
    """Where the paper has one row for the best of several methods."""
    preset = find_preset("fedwmsam/table1")
    lines = []
    for row, others in preset.best_rows().items():
        rivals = [runs_of(found, cell) for cell in cells() if cell.row in others and cell.column == column]
        rivals = [mine for mine in rivals if mine]
        if len(rivals) == len(others):
            best = max(rivals, key=lambda mine: statistics.fmean(run["max"] for run in mine))
            lines.append(line(row, best, preset.content["rows"][row]["published"][column]))
    return lines


def runs_of(found: dict[str, Any], cell: PaperCell) -> list[dict[str, Any]]:
    return [run for key, run in found.items() if key.startswith(f"{cell.row}|{cell.column}|")]


def spread(values: list[float]) -> str:
    mean = f"{100 * statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.2f}"


def gap(values: list[float], published: float | None) -> str:
    if published is None:
        return "–"
    difference = 100 * (statistics.fmean(values) - published)
    return f"**{difference:+.2f}**" if abs(difference) > FAR else f"{difference:+.2f}"


def main() -> None:
    found = json.loads(STORE.read_text()) if STORE.exists() else {}
    if len(sys.argv) > 1:
        found |= collect(Path(sys.argv[1]))
        STORE.write_text(json.dumps(found, indent=0) + "\n")
    (HERE / "fedwmsam-table1.md").write_text(page(found))


if __name__ == "__main__":
    main()
