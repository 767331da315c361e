"""Two ablations, scaled down: `python results/make_ablations.py RUNS`, with RUNS/NAME from the commands in `TABLES`.

Every run becomes a few numbers in `ablations.json`, which is kept here; `ablations.md` shows the effects that the
papers' tables show, ours beside theirs. Without RUNS only the page is written again.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from fedflat.experiments.presets import PaperCell, choose, find_preset
from fedflat.experiments.sweep import slug
from fedflat.storage.metrics_file import read_metrics
from fedflat.storage.run_files import read_settings

HERE = Path(__file__).parent
STORE = HERE / "ablations.json"
LAST = 5
"""evaluations that count, the last ones"""


class Table(NamedTuple):
    """A table of a paper, and what it is about."""

    preset: str
    columns: list[str]
    effects: list[tuple[str, str]]
    """pairs of rows: what the first is better than the second by"""


TABLES = [
    Table(
        "fedgmt/table3",
        [],
        [
            ("trajectory loss only", "neither"),
            ("ADMM only", "neither"),
            ("both", "neither"),
            ("both", "trajectory loss only"),
            ("both", "ADMM only"),
        ],
    ),
    Table(
        "fedgf/table5",
        ["cifar10"],
        [("c 0.5", "c 0"), ("c 1", "c 0"), ("c 1", "c 0.5"), ("FedGF", "c 0"), ("FedGF", "c 1")],
    ),
]


def cells(table: Table) -> list[PaperCell]:
    return choose(find_preset(table.preset).cells(), table.columns, [])


def collect(runs: Path) -> dict[str, Any]:
    """The finished runs, by table, row and column."""
    found: dict[str, Any] = {}
    for table in TABLES:
        for cell in cells(table):
            run = runs / slug(table.preset) / slug(cell.row) / slug(cell.column) / "seed-0"
            if not (run / "model.safetensors").exists():
                continue
            accuracy = [row["accuracy"] for row in read_metrics(run) if row.get("accuracy") is not None]
            found[f"{table.preset}|{cell.row}|{cell.column}"] = {
                "last": [round(value, 4) for value in accuracy[-LAST:]],
                "max": max(accuracy),
                "rounds": read_settings(run)["rounds"],
                "lr": read_settings(run)["local"]["lr"],
            }
    return found


def page(found: dict[str, Any]) -> str:
    """The accuracies of every table, then its effects."""
    lines = [(HERE / "ablations-head.md").read_text()]
    for table in TABLES:
        here = cells(table)
        columns, rows = (list(dict.fromkeys(getattr(c, part) for c in here)) for part in ("column", "row"))
        known = {
            (row, column): found[key]["last"]
            for row in rows
            for column in columns
            if (key := f"{table.preset}|{row}|{column}") in found
        }
        theirs = {(cell.row, cell.column): cell.published for cell in here}
        if not known:
            continue
        text = HERE / f"ablations-{slug(table.preset)}.md"
        lines += [f"\n## {table.preset}\n", text.read_text() if text.exists() else ""]
        lines += [
            "| accuracy, ours (paper) | " + " | ".join(columns) + " |",
            "| --- |" + " ---: |" * len(columns),
        ]
        for row in rows:
            entries = [
                f"{mean(known[row, column]):.2f} ± {deviation(known[row, column]):.2f} ({theirs[row, column]:.2f})"
                if (row, column) in known
                else "–"
                for column in columns
            ]
            lines += ["| " + " | ".join([row, *entries]) + " |"]
        lines += [
            "",
            "| effect, ours (paper) | " + " | ".join(columns) + " |",
            "| --- |" + " ---: |" * len(columns),
        ]
        for better, worse in table.effects:
            entries = [
                effect(known, theirs, better, worse, column)
                if (better, column) in known and (worse, column) in known
                else "–"
                for column in columns
            ]
            lines += ["| " + " | ".join([f"{better} over {worse}", *entries]) + " |"]
    return "\n".join(lines) + "\n"


def mean(values: list[float]) -> float:
    return 100 * statistics.fmean(values)


def deviation(values: list[float]) -> float:
    return 100 * statistics.stdev(values)


def effect(known: Any, theirs: Any, better: str, worse: str, column: str) -> str:
    """Ours and the paper's; bold where they point in different directions, ≈ where ours could be either."""
    first, second = known[better, column], known[worse, column]
    ours, paper = mean(first) - mean(second), theirs[better, column] - theirs[worse, column]
    text = f"{ours:+.2f} ({paper:+.2f})"
    if abs(ours) < math.hypot(deviation(first), deviation(second)):
        return f"≈ {text}"
    return text if ours * paper > 0 else f"**{text}**"


def main() -> None:
    found = json.loads(STORE.read_text()) if STORE.exists() else {}
    if len(sys.argv) > 1:
        found |= collect(Path(sys.argv[1]))
        STORE.write_text(json.dumps(found, indent=0) + "\n")
    (HERE / "ablations.md").write_text(page(found))


if __name__ == "__main__":
    main()
