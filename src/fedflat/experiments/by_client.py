"""Runs side by side, client by client: the spread over clients, and those that fare worst by name."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from ..core.monitor import Monitor
from ..errors import FedflatError
from ..storage.client_scores import read_client_scores
from ..storage.metrics_file import read_metrics
from .compare import Group, monitor_of

WORST = 10
"""Clients that are named."""

Values = dict[str, float]
"""Of the monitored metric, by the name of a client."""


def client_values(run: Path) -> Values:
    """Every client's metric on its own samples at the end: from clients.jsonl; accuracy else from the last groups."""
    rows, monitor = read_client_scores(run), monitor_of(run)
    found: dict[str, float | None] = {}
    if rows:
        end = rows[-1]["index"]
        found = {row["client"]: monitor.of(row) for row in rows if row["index"] == end}
    elif monitor.name == "accuracy":
        tested = [row for row in read_metrics(run) if row.get("accuracy_by_group")]
        found = dict(tested[-1]["accuracy_by_group"]) if tested else {}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def group_values(runs: Sequence[Path]) -> Values:
    """The mean over runs that differ in their seed."""
    found = [client_values(run) for run in runs]
    names = dict.fromkeys(name for one in found for name in one)
    return {name: statistics.fmean(one[name] for one in found if name in one) for name in names}


def worst_clients(values: Values, monitor: Monitor, most: int = WORST) -> list[str]:
    """Names in the order of their values, the worst first."""
    return sorted(values, key=lambda name: (monitor.sign * values[name], name))[:most]


def spread(values: Values, monitor: Monitor) -> tuple[float, float, float]:
    """The mean over clients, the deviation, and the mean of the tenth that fares worst."""
    tenth = [values[name] for name in worst_clients(values, monitor, math.ceil(len(values) / 10))]
    return statistics.fmean(values.values()), statistics.pstdev(values.values()), statistics.fmean(tenth)


def client_table(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """Column titles and rows: the spread of every experiment, then the worst clients of the first, a column each."""
    found = {group.name: group_values(group.counted) for group in groups}
    known = {name: values for name, values in found.items() if values}
    if not known:
        raise FedflatError(
            "No run knows whose its test samples are: train with clients_every (--clients-every 10) on data whose "
            "clients have test samples of their own."
        )
    monitors = {group.name: group.monitor for group in groups if group.name in known}
    spreads = {name: spread(values, monitors[name]) for name, values in known.items()}
    head = ["client", *known]
    rows = [
        [title, *(monitors[name].number(spreads[name][place]) for name in known)]
        for place, title in enumerate(("mean", "deviation", "worst tenth"))
    ]
    first = next(iter(known))
    for client in worst_clients(known[first], monitors[first]):
        shown = (
            monitors[name].number(values[client]) if client in values else "–"
            for name, values in known.items()
        )
        rows.append([client, *shown])
    return head, rows
