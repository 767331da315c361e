"""Which statistic of a run comes closest to FedWMSAM's Table 1: `python results/compare_statistics.py`.

Of every run `fedwmsam-table1.json` keeps five statistics of all rounds (best round, last 50, last 100, final, low
tenth) and the accuracy of every tenth round. The five are compared as they are; means, quantiles and deviations over
windows are computed from every tenth round, and so differ a little from those of all rounds. Runs are those of
seed 0, which is what every method has.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedflat.experiments.presets import choose, find_preset

STORE = Path(__file__).parent / "fedwmsam-table1.json"
PRESET = "fedwmsam/table1"
LATER = {
    ("FedLESAM best of 3", "fashion-mnist/dirichlet-0.1"),
    ("FedLESAM best of 3", "fashion-mnist/pathological-3"),
    ("FedSMOO", "fashion-mnist/pathological-3"),
    ("FedWMSAM", "fashion-mnist/pathological-3"),
}
"""Not run yet when the low tenth was chosen, with the other numbers of their columns in view."""
EASIER = ("fashion-mnist/dirichlet-0.6", "fashion-mnist/pathological-6")
"""Columns that were run after that."""
GROUPS = ("chosen with these", "easier columns", "four later ones")
KEPT = {
    "best round": "max",
    "last 50": "last50",
    "last 100": "last100",
    "final": "final",
    "low tenth": "low_tenth",
}
"""Statistics of all rounds, by their key in the store."""
WINDOWS = (50, 100, 200, 300, 400, 500)


class Published(NamedTuple):
    """A number of the paper, and our run for it."""

    row: str
    column: str
    group: str
    paper: float
    run: Mapping[str, Any]


def published(found: Mapping[str, Any]) -> list[Published]:
    """The paper's numbers for which there is a run of seed 0."""
    preset = find_preset(PRESET)
    numbers = []
    for row, about in preset.content["rows"].items():
        for column in preset.content["columns"]:
            paper = (about.get("published") or {}).get(column)
            run = run_of(found, row, column)
            if paper is None or run is None:
                continue
            late = GROUPS[2] if (row, column) in LATER else GROUPS[0]
            numbers.append(Published(row, column, GROUPS[1] if column in EASIER else late, paper, run))
    return numbers


def missing(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The paper's numbers for Fashion-MNIST without a run."""
    preset = find_preset(PRESET)
    columns = {cell.column for cell in choose(preset.cells(), ["fashion-mnist"], [])}
    return [
        (row, column)
        for row, about in preset.content["rows"].items()
        for column in preset.content["columns"]
        if column in columns
        and (about.get("published") or {}).get(column) is not None
        and run_of(found, row, column) is None
    ]


def run_of(found: Mapping[str, Any], row: str, column: str, seed: str = "seed-0") -> Mapping[str, Any] | None:
    """A run; of a row that is the best of several methods, that with the best round, once all are there."""
    others = find_preset(PRESET).best_rows().get(row, (row,))
    runs = [found.get(f"{other}|{column}|{seed}") for other in others]
    there = [run for run in runs if run is not None]
    return max(there, key=lambda run: run["max"]) if len(there) == len(others) else None


def all_statistics() -> dict[str, Callable[[Mapping[str, Any]], float]]:
    """By name, each a function of a stored run."""
    found: dict[str, Callable[[Mapping[str, Any]], float]] = {
        name: lambda run, key=key: run[key]  # type: ignore[misc]
        for name, key in KEPT.items()
    }
    for window in WINDOWS:
        for name, of in MEASURES.items():
            found[f"{name}, last {window} (every tenth)"] = (
                lambda run, of=of, window=window: of(  # type: ignore[misc]
                    run["every10"][-window // 10 :]
                )
            )
    return found


def _quantile(share: float) -> Callable[[list[float]], float]:
    def of(values: list[float]) -> float:
        ordered = sorted(values)
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return of


MEASURES: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "mean less a deviation": lambda values: statistics.fmean(values) - statistics.stdev(values),
    "mean less two deviations": lambda values: statistics.fmean(values) - 2 * statistics.stdev(values),
    "lowest": min,
    **{
        f"{name} quantile": _quantile(share)
        for name, share in (("5 %", 0.05), ("10 %", 0.1), ("20 %", 0.2), ("25 %", 0.25), ("50 %", 0.5))
    },
    "highest": max,
}


def errors(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Root mean squares of ours minus the paper's, in points, by statistic and group."""
    numbers = published(found)
    return {
        name: {
            group: math.sqrt(
                statistics.fmean((100 * (of(n.run) - n.paper)) ** 2 for n in numbers if n.group == group)
            )
            for group in GROUPS
        }
        for name, of in all_statistics().items()
    }


def main() -> None:
    found = errors(json.loads(STORE.read_text()))
    print(f"{'statistic':44}" + "".join(f"{group:>20}" for group in GROUPS))
    for name, by_group in sorted(found.items(), key=lambda entry: entry[1][GROUPS[0]]):
        print(f"{name:44}" + "".join(f"{by_group[group]:20.2f}" for group in GROUPS))


if __name__ == "__main__":
    main()
