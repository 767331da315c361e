"""fedflat: sharpness-aware federated learning.

Trains one model across many clients so that it lands in a flat minimum of the global loss.
"""

from __future__ import annotations

import ast
import difflib
from importlib import import_module, resources
from typing import Any

__version__ = "0.1.0"


def _homes() -> dict[str, str]:
    """The public names and their modules, as the stub beside this file lists them for type checkers."""
    stub = ast.parse(resources.files(__name__).joinpath("__init__.pyi").read_text("utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: f".{node.module or alias.name}" for node in imports for alias in node.names}


_HOME = _homes()
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: `import fedflat` alone does not load torch."""
    if name not in _HOME:
        close = difflib.get_close_matches(name, __all__, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise AttributeError(f"module 'fedflat' has no attribute '{name}'.{hint}")
    home = import_module(_HOME[name], __name__)
    value = home if _HOME[name] == f".{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
