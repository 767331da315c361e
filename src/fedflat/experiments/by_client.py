"""Runs side by side, client by client: the spread over clients, and those that fare worst by name."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from ..errors import FedflatError
from ..storage.client_scores import read_client_scores
from ..storage.metrics_file import read_metrics
from .compare import Group, percent

WORST = 10
"""Clients that are named."""

Accuracies = dict[str, float]
"""By the name of a client."""


def client_accuracies(run: Path) -> Accuracies:
    """Every client's accuracy on its own samples at the end: from clients.jsonl, else from the last test by group."""
    rows = read_client_scores(run)
    if rows:
        end = rows[-1]["index"]
        found = {row["client"]: row.get("accuracy") for row in rows if row["index"] == end}
    else:
        tested = [row for row in read_metrics(run) if row.get("accuracy_by_group")]
        found = dict(tested[-1]["accuracy_by_group"]) if tested else {}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def group_accuracies(runs: Sequence[Path]) -> Accuracies:
    """The mean over runs that differ in their seed."""
    found = [client_accuracies(run) for run in runs]
    names = dict.fromkeys(name for one in found for name in one)
    return {name: statistics.fmean(one[name] for one in found if name in one) for name in names}


def worst_clients(accuracies: Accuracies, most: int = WORST) -> list[str]:
    """Names in the order of their accuracy, the lowest first."""
    return sorted(accuracies, key=lambda name: (accuracies[name], name))[:most]


def spread(accuracies: Accuracies) -> tuple[float, float, float]:
    """The mean over clients, the deviation, and the mean of the tenth that fares worst."""
    values = sorted(accuracies.values())
    tenth = values[: math.ceil(len(values) / 10)]
    return statistics.fmean(values), statistics.pstdev(values), statistics.fmean(tenth)


def client_table(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """Column titles and rows: the spread of every experiment, then the worst clients of the first, a column each."""
    found = {group.name: group_accuracies(group.counted) for group in groups}
    known = {name: accuracies for name, accuracies in found.items() if accuracies}
    if not known:
        raise FedflatError(
            "No run knows whose its test samples are: train with clients_every (--clients-every 10) on data whose "
            "clients have test samples of their own."
        )
    spreads = {name: spread(accuracies) for name, accuracies in known.items()}
    head = ["client", *known]
    rows = [
        [title, *(percent(spreads[name][place]) for name in known)]
        for place, title in enumerate(("mean", "deviation", "worst tenth"))
    ]
    for client in worst_clients(next(iter(known.values()))):
        values = (accuracies.get(client) for accuracies in known.values())
        rows.append([client, *("–" if value is None else percent(value) for value in values)])
    return head, rows
