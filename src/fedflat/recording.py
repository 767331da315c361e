"""What a run leaves on disk: its settings, one line of metrics per round, and the trained model."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from safetensors.torch import save_file
from torch import nn

from .data.federation import Federation
from .errors import FedflatError
from .local import LocalSGD
from .method import Method


class Recorder:
    """Writes `run.json`, `metrics.jsonl` and `model.safetensors` into a directory; nothing without one."""

    def __init__(
        self,
        out: str | Path | None,
        *,
        method: Method,
        federation: Federation,
        sgd: LocalSGD,
        rounds: int,
        seed: int,
    ) -> None:
        self._metrics: IO[str] | None = None
        if out is None:
            return
        self._out = Path(out)
        if (self._out / "metrics.jsonl").exists():
            raise FedflatError(
                f"{self._out} already holds a run. Choose another directory or remove this one."
            )
        settings = {
            "method": method.name,
            "mechanisms": str(method),
            "federation": {"name": federation.name, "clients": len(federation)},
            "local": asdict(sgd),
            "rounds": rounds,
            "seed": seed,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            (self._out / "run.json").write_text(json.dumps(settings, indent=2) + "\n")
            self._metrics = (self._out / "metrics.jsonl").open("w")
        except OSError as problem:
            raise FedflatError(
                f"Cannot write to {self._out} ({problem.strerror}). Choose another directory."
            ) from None

    def round(self, row: dict[str, Any]) -> None:
        """Append one round."""
        if self._metrics is not None:
            self._metrics.write(json.dumps(_finite(row), allow_nan=False) + "\n")
            self._metrics.flush()

    def finish(self, module: nn.Module) -> None:
        """Write the trained model."""
        if self._metrics is not None:
            self._metrics.close()
            weights = {name: value.contiguous().clone() for name, value in module.state_dict().items()}
            save_file(weights, str(self._out / "model.safetensors"))


def _finite(value: Any) -> Any:
    """NaN and infinity as null: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
