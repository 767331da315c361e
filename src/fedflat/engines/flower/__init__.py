"""A real federation over Flower: fedflat's round loop on the server, fedflat's local round on every node.

A Flower app needs two names, and both come from here: `app = server_app("experiment.yaml")` on the server and
`app = client_app(load)` on the nodes. `fedflat federate init` writes an app of this kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import MissingExtra

if TYPE_CHECKING:
    from .client import client_app as client_app
    from .limits import Limits as Limits
    from .require import Require as Require
    from .server import server_app as server_app

_HOME = {"client_app": "client", "server_app": "server", "Limits": "limits", "Require": "require"}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for, and say which extra is missing."""
    if name not in _HOME:
        raise AttributeError(f"module 'fedflat.engines.flower' has no attribute '{name}'")
    from importlib import import_module

    try:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] != "flwr":
            raise
        raise MissingExtra("flwr", "flower", "A federation over Flower") from None
