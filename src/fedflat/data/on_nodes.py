"""Runs whose data is on the clients' own nodes: what is known of it. Importing this does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import FedflatError

ON_NODES = "on-nodes"
"""The dataset of an experiment whose data is there."""
OF_DATA = (
    *("data", "download", "target", "client_column", "features", "image_size", "client_folders"),
    *("categorical", "numeric", "missing", "test_samples", "stand_in", "augment", "partition"),
)
"""What an experiment says of data that is here: nothing of it is used."""
GO_ON = "`flwr run . federation --stream` in the folder of its Flower app"
"""How a run of a real federation is started and resumed."""


def is_on_nodes(settings: Mapping[str, Any]) -> bool:
    """Whether a run, by its run.json, is one of a real federation."""
    how = settings.get("how")
    return isinstance(how, Mapping) and how.get("engine") == "flower"


def as_on_nodes(content: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """An experiment as it was on nodes: without any data, and without a model's name where the app brought its own.

    Args:
        content: the experiment, all written out.
        model: what run.json calls the model.
    """
    left_out = (*OF_DATA, "dataset", *(() if content.get("model") == model else ("model",)))
    return {"dataset": ON_NODES, **{key: value for key, value in content.items() if key not in left_out}}


def what_is_known(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] = ()) -> str:
    """A sentence on data that stays on the nodes: what nodes tell before the first round, and in reports."""
    about = settings.get("federation")
    facts: Mapping[str, Any] = about if isinstance(about, Mapping) else {}
    parts = [f"{facts['clients']} clients"] if "clients" in facts else []
    if "shape" in facts:
        parts.append(f"samples of shape ({', '.join(map(str, facts['shape']))})")
    if "classes" in facts:
        parts.append(f"{facts['classes']} classes")
    if facts.get("test_samples"):
        parts.append(f"{facts['test_samples']:,} samples that the server tests on")
    last = next((row["reported"] for row in reversed(rows) if row.get("reported")), None)
    if last is not None:
        parts.append(f"{last['samples']:,.0f} samples that {len(last['clients'])} clients tested on last")
    known = f" Known of it: {', '.join(parts)}." if parts else ""
    return f"The data is on the clients' own nodes, where the server cannot look at it.{known}"


def no_data(run: object) -> FedflatError:
    """What to say where a run's model is to be measured on data that is not here."""
    return FedflatError(
        f"{run}: the data is on the clients' own nodes, so that nothing can be computed from it here. To measure the "
        f"model on data that you have, use Python: ff.load_run({str(run)!r}, ff.Federation([(x, y)], classes=...))."
    )
