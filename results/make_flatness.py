"""Make the page of flatness: `python results/make_flatness.py RUN...`, after the commands at its end on these runs.

What was measured goes into `fashion-flatness.json`; `fashion-flatness.md` shows it beside the accuracies. Without
RUNS only the page is written again.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from fedflat.experiments.measure_run import read_flatness
from fedflat.experiments.run import experiment_of
from fedflat.methods.text import as_method
from fedflat.storage.metrics_file import read_metrics

HERE = Path(__file__).parent
CHANCE = 0.5
"""Below this accuracy a method has not learned, and is no evidence for or against flatness."""
LAST = 100
"""Rounds at the end over which what was recorded is averaged: a single one may be a dip."""
STORE = HERE / "fashion-flatness.json"
RECORDED = {
    "distance": "flatness distance, active clients",
    "distance to server": "distance to the server's model, active clients",
    "discrepancy": "flatness discrepancy, all clients",
    "drift": "diversity of active clients' updates",
    "drift cosine": "cosine between their updates",
    "drift norm": "length of their updates",
    "discrepancy (active) global sharpness": "sharpness, ρ 0.05",
}
"""Rows of what runs recorded while they trained."""
MEASURED = {
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
    "gradient-drift": "diversity of clients' gradients",
    "gradient-drift cosine": "cosine between clients' gradients",
    "distance": "flatness distance of the next round",
    "distance to server": "distance to the server's model in it",
    "discrepancy": "flatness discrepancy of the next round",
    "drift": "diversity of updates in it",
}
"""Rows of what was measured of the last model, and of one further round from it."""


def collect(runs: list[Path]) -> dict[str, Any]:
    """By method: accuracies, losses and everything measured."""
    found = {}
    for run in runs:
        measured = read_flatness(run)
        if measured is None:
            sys.exit(f"{run} has no flatness.json: run fedflat flatness first.")
        rows = read_metrics(run)
        numbers = {k: v for one in measured["measures"].values() for k, v in one["numbers"].items()}
        found[as_method(experiment_of(run).method).name] = {
            "rounds": measured["round"],
            "accuracy": over([row["accuracy"] for row in rows[-LAST:]]),
            "test loss": over([row["loss"] for row in rows[-LAST:]]),
            "recorded": {key: over([row["measures"].get(key) for row in rows[-LAST:]]) for key in RECORDED},
            "final": rows[-1]["accuracy"],
            "numbers": numbers,
            "trained": measured["measures"]["distance"]["trained"],
            "eigenvalues": measured["measures"]["eigenvalues"]["result"]["values"],
        }
    return found


def over(values: list[float | None]) -> dict[str, float]:
    """Mean and deviation over the rounds that have a value."""
    there = [value for value in values if value is not None]
    if not there:
        sys.exit("A measure was not recorded: train the runs with the command at the end of the page.")
    return {"mean": statistics.fmean(there), "std": statistics.pstdev(there), "rounds": len(there)}


def ranks(values: list[float]) -> list[float]:
    """With the mean rank where values are equal."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def spearman(one: list[float], other: list[float]) -> float:
    """The correlation of ranks."""
    return statistics.correlation(ranks(one), ranks(other))


def page(found: dict[str, Any]) -> str:
    """Measures down, methods across, the most accurate first."""
    methods = sorted(found, key=lambda name: -found[name]["accuracy"]["mean"])
    accuracy = [found[name]["accuracy"]["mean"] for name in methods]
    learned = [number for number, value in enumerate(accuracy) if value > CHANCE]

    def row(title: str, values: list[float | None], shown: list[str], compared: bool = True) -> str:
        related, those = "", [(value, accuracy[n]) for n, value in enumerate(values) if n in learned]
        known = [(value, reached) for value, reached in those if value is not None]
        if compared and len(known) == len(those) and len(set(values)) > 1:
            related = f"{spearman([value for value, _ in known], [reached for _, reached in known]):+.2f}"
        return f"| {title} | " + " | ".join(shown) + f" | {related} |"

    def recorded(title: str, key: str, group: str | None = "recorded") -> str:
        of = [(found[name] if group is None else found[name][group])[key] for name in methods]
        if key == "accuracy":
            shown = [f"{100 * one['mean']:.2f} ± {100 * one['std']:.2f}" for one in of]
        else:
            shown = [f"{one['mean']:.3g} ± {one['std']:.2g}" for one in of]
        return row(title, [one["mean"] for one in of], shown, compared=group is not None)

    head = [
        "| | " + " | ".join(methods) + " | rank correlation with accuracy |",
        "| --- |" + " ---: |" * (len(methods) + 1),
    ]
    lines = [(HERE / "fashion-flatness-head.md").read_text(), f"## Over the last {LAST} rounds", "", *head]
    lines += [recorded("accuracy, %", "accuracy", None), recorded("test loss", "test loss", None)]
    lines += [recorded(title, key) for key, title in RECORDED.items()]
    lines += ["", "## Of the last model, and of one further round from it", "", *head]
    final = [found[name]["final"] for name in methods]
    lines.append(row("accuracy of this model, %", final, [f"{100 * value:.2f}" for value in final], False))
    for key, title in MEASURED.items():
        values = [found[name]["numbers"].get(key) for name in methods]
        lines.append(row(title, values, ["–" if value is None else f"{value:.3g}" for value in values]))
    lines.append((HERE / "fashion-flatness-tail.md").read_text())
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        STORE.write_text(json.dumps(collect([Path(run) for run in sys.argv[1:]]), indent=1) + "\n")
    (HERE / "fashion-flatness.md").write_text(page(json.loads(STORE.read_text())))
