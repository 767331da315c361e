"""Make the page of flatness: `python results/make_flatness.py RUN...`, after these commands on the same runs.

    fedflat flatness RUNS... --all --top 5
    fedflat flatness RUNS... -m sharpness -m worst-case --part test
    fedflat landscape RUNS... --part train --part test --points 25
    fedflat figure landscape RUNS... -o results/fashion-flatness-landscapes.png
    fedflat figure radius RUNS... -o results/fashion-flatness-radius.png

What was measured goes into `fashion-flatness.json`; `fashion-flatness.md` shows it beside the accuracies. Without
RUNS only the page is written again.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from fedflat.composition import as_method
from fedflat.experiments.flatness_of import read_flatness
from fedflat.experiments.running import experiment_of
from fedflat.rundirectory import read_metrics

HERE = Path(__file__).parent
CHANCE = 0.5
"""Below this accuracy a method has not learned, and is no evidence for or against flatness."""
STORE = HERE / "fashion-flatness.json"
ROWS = {
    "sharpness": "sharpness, ρ 0.05",
    "sharpness (test)": "sharpness on test data",
    "worst-case": "worst case within ρ 0.05",
    "worst-case (test)": "worst case on test data",
    "client-sharpness": "clients' own sharpness, mean",
    "client-sharpness std": "its deviation over clients",
    "client-sharpness largest": "its largest",
    "eigenvalues": "λ_max of the Hessian",
    "trace": "trace of the Hessian",
    "low-pass rise": "rise under noise, σ 0.01 (LPF)",
    "distance": "flatness distance",
    "discrepancy": "flatness discrepancy",
    "drift": "diversity of clients' gradients",
    "drift cosine": "cosine between clients' gradients",
}


def collect(runs: list[Path]) -> dict[str, Any]:
    """By method: accuracies, losses and everything measured."""
    found = {}
    for run in runs:
        measured = read_flatness(run)
        if measured is None:
            sys.exit(f"{run} has no flatness.json: run fedflat flatness first.")
        rows = read_metrics(run)
        accuracy = [row["accuracy"] for row in rows]
        numbers = {k: v for one in measured["measures"].values() for k, v in one["numbers"].items()}
        found[as_method(experiment_of(run).method).name] = {
            "rounds": measured["round"],
            "accuracy": statistics.fmean(accuracy[-100:]),
            "test loss": statistics.fmean(row["loss"] for row in rows[-100:]),
            "numbers": numbers,
            "eigenvalues": measured["measures"]["eigenvalues"]["result"]["values"],
        }
    return found


def ranks(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def spearman(one: list[float], other: list[float]) -> float:
    """The correlation of ranks."""
    return statistics.correlation(ranks(one), ranks(other))


def page(found: dict[str, Any]) -> str:
    """Measures down, methods across, the most accurate first."""
    methods = sorted(found, key=lambda name: -found[name]["accuracy"])
    accuracy = [found[name]["accuracy"] for name in methods]
    learned = [number for number, value in enumerate(accuracy) if value > CHANCE]
    lines = [
        (HERE / "fashion-flatness-head.md").read_text(),
        "| | " + " | ".join(methods) + " | rank correlation with accuracy |",
        "| --- |" + " ---: |" * (len(methods) + 1),
        "| accuracy, last 100 rounds, % | " + " | ".join(f"{100 * value:.2f}" for value in accuracy) + " | |",
        "| test loss, last 100 rounds | "
        + " | ".join(f"{found[name]['test loss']:.3f}" for name in methods)
        + " | |",
    ]
    for key, title in ROWS.items():
        values = [found[name]["numbers"].get(key) for name in methods]
        if any(value is None for value in values):
            continue
        related = spearman([values[n] for n in learned], [accuracy[n] for n in learned])
        shown = [f"{value:.3g}" for value in values]
        lines.append(f"| {title} | " + " | ".join(shown) + f" | {related:+.2f} |")
    lines.append((HERE / "fashion-flatness-tail.md").read_text())
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        STORE.write_text(json.dumps(collect([Path(run) for run in sys.argv[1:]]), indent=1) + "\n")
    (HERE / "fashion-flatness.md").write_text(page(json.loads(STORE.read_text())))
