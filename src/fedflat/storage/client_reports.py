"""Test results that clients reported, for runs whose server has no test set."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from .metrics_file import Row

BY_CLIENTS = "tested_by_clients"
"""The mark of a row whose accuracy and loss were reported by clients."""


def with_client_reports(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy the rows of a run; where the server has tested no model, fill in what clients reported.

    Clients report on the model that they receive, which is the one that the round before ended with: a report moves
    to that round. The report on the untrained model is dropped, and the last model has none.
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


def are_reported(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the test results in rows of `with_client_reports` were reported by clients."""
    return any(row.get(BY_CLIENTS) for row in rows)


def _spread(report: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the mean, the deviation, and the mean of the worst tenth of the reporting clients."""
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
