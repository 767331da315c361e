"""Which clients a measure looks at."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.flat import FlatModel
from ..data.federation import Federation
from ..errors import FedflatError


def fitting(federation: Federation, model: FlatModel) -> Federation:
    """The federation in the floating type and on the device of the model."""
    return federation.to(model.vector.dtype, model.vector.device)


def choose(federation: Federation, clients: Sequence[int] | None) -> list[int]:
    """The named clients; all where none are named."""
    if clients is None:
        return list(range(len(federation)))
    wrong = [client for client in clients if not 0 <= client < len(federation)]
    if wrong or not clients:
        which = f"there is no client {wrong[0]}" if wrong else "name at least one"
        raise FedflatError(f"clients={list(clients)}: {which}; they are 0 to {len(federation) - 1}.")
    return list(clients)
