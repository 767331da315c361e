"""Pictures of who has what: samples by client and class, partitioned again as the experiment says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import ValidationError

from ..errors import FedflatError
from ..experiments.build import make_federation
from ..experiments.schema import Experiment

CLIENTS = 200
"""Clients that a picture shows."""
PICTURES = 24
"""Different splits on a page."""
WHAT = (
    *("dataset", "data", "target", "client_column", "client_folders", "task", "stand_in"),
    *("partition", "clients", "seed"),
)
"""What a split depends on."""


class Splits:
    """The splits of some runs, each partitioned once."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Any]] = {}

    def of(self, content: Mapping[str, Any] | None) -> str | None:
        """The name of an experiment's split; None where there is no experiment."""
        try:
            experiment = None if content is None else Experiment.model_validate(dict(content)).with_defaults()
        except ValidationError:
            return None
        if experiment is None or not isinstance(experiment.seed, int):
            return None
        key = json.dumps(experiment.model_dump(mode="json", include=set(WHAT)), sort_keys=True)
        if key not in self._found:
            self._found[key] = self._picture(experiment)
        return str(self._found[key]["id"])

    def elsewhere(self, known: str) -> str:
        """The name of a split whose labels are on the nodes, from what is known of it."""
        if known not in self._found:
            picture = {
                "id": f"split-{len(self._found)}",
                "title": "on the clients' own nodes",
                "missing": known,
            }
            self._found[known] = picture
        return str(self._found[known]["id"])

    def shown(self) -> list[dict[str, Any]]:
        """All pictures so far."""
        return list(self._found.values())

    def _picture(self, experiment: Experiment) -> dict[str, Any]:
        title = f"{experiment.dataset}, {_text(experiment.partition)}, seed {experiment.seed}"
        picture = {"id": f"split-{len(self._found)}", "title": title}
        if len(self._found) >= PICTURES:
            return picture | {"missing": f"A page shows at most {PICTURES} different splits."}
        try:
            return picture | _counts(experiment)
        except (FedflatError, OSError) as problem:
            return picture | {"missing": str(problem)}


def _counts(experiment: Experiment) -> dict[str, Any]:
    """Samples by class, a row per client."""
    assert isinstance(experiment.seed, int)
    federation = make_federation(experiment.model_copy(update={"download": False}), experiment.seed)
    labels = federation.labels_by_client()
    if labels is None:
        raise FedflatError("Its targets are no single classes.")
    owners, classes = labels
    within = owners < CLIENTS
    table = np.zeros((min(len(federation), CLIENTS), federation.classes), dtype=np.int64)
    np.add.at(table, (owners[within], classes[within]), 1)
    note = f"The first {CLIENTS} of {len(federation):,} clients." if len(federation) > CLIENTS else ""
    return {
        "counts": table.tolist(),
        "clients": len(federation),
        "names": [federation.name_of(client) for client in range(len(table))],
        "samples": federation.samples,
        "note": " ".join(part for part in (note, federation.note, *federation.caveats) if part),
    }


def _text(partition: str | Mapping[str, Any]) -> str:
    if isinstance(partition, str):
        return partition
    return ", ".join(str(value) if key == "name" else f"{key}={value}" for key, value in partition.items())
