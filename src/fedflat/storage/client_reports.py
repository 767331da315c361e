"""Who has tested the models of a run: the server, or, where it has no test set, the clients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from .metrics_file import Row

BY_CLIENTS = "tested_by_clients"
"""The mark of a row whose accuracy and loss clients reported."""


def tested(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A run's rows; where the server has tested none of its models, with what clients reported of them.

    Clients report on the model that they receive, which is the one that the round before ended with: a report is
    moved there. So the report on the untrained model goes, and nobody has tested the last model.
    """
    own = [row.copy() if isinstance(row, Row) else dict(row) for row in rows]
    if any(row.get("accuracy") is not None or row.get("loss") is not None for row in own):
        return own
    for row, then in pairwise(own):
        if isinstance(report := then.get("reported"), Mapping):
            row |= {
                "accuracy": report.get("accuracy"),
                "loss": report.get("loss"),
                "client_accuracy": _spread(report),
                BY_CLIENTS: True,
            }
    return own


def by_clients(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether rows of `tested` have what clients reported."""
    return any(row.get(BY_CLIENTS) for row in rows)


def _spread(report: Mapping[str, Any]) -> dict[str, float] | None:
    """Mean, deviation, and the mean of the tenth of the reporting clients that fare worst."""
    clients = report.get("clients") or {}
    each = sorted(one["accuracy"] for one in clients.values() if one.get("accuracy") is not None)
    if not each or len(each) < len(clients):
        return None
    worst = each[: math.ceil(len(each) / 10)]
    return {
        "mean": statistics.fmean(each),
        "std": statistics.pstdev(each),
        "worst_decile": statistics.fmean(worst),
    }
