"""Five rounds of every method, to compare later versions with: `python tests/training/training_bits.py --store`.

A checksum of float32 weights holds on processors with the same kernels; three projections of float64 weights hold
everywhere, to rounding.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedflat as ff
from fedflat.methods.named import METHODS

STORE = Path(__file__).with_suffix(".json")


def networks() -> dict[str, nn.Module]:
    """The digits' fully connected network and a small convolutional one."""
    torch.manual_seed(3)
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    cnn = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return {"mlp": mlp, "cnn": cnn}


def train(method: str, module: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The weights after five rounds without weight decay."""
    federation = ff.federate("digits", ff.Dirichlet(0.3), clients=8, seed=1)
    local = ff.LocalSGD(lr=0.05, epochs=1, batch_size=20)
    run = ff.train(
        federation, module, method, local, participation=3, rounds=5, eval_every=5, dtype=dtype, seed=2
    )
    return run.server.w


def numbers(method: str, model: str) -> dict[str, Any]:
    """A checksum and three projections."""
    module = networks()[model]
    w = train(method, module, torch.float64)
    directions = torch.randn(3, len(w), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bits = train(method, networks()[model], torch.float32).numpy().tobytes()
    return {"projections": (directions @ w).tolist(), "sha256": hashlib.sha256(bits).hexdigest()}


def machine() -> dict[str, str]:
    """What the last bits depend on."""
    return {"torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability()}


if __name__ == "__main__":
    found = {f"{name} {model}": numbers(name, model) for name in METHODS for model in networks()}
    if "--store" in sys.argv:
        STORE.write_text(json.dumps({"machine": machine(), "runs": found}, indent=1) + "\n")
    else:
        stored = json.loads(STORE.read_text())["runs"]
        different = [key for key, one in found.items() if stored[key]["sha256"] != one["sha256"]]
        print(f"{len(found)} runs, {len(different)} with other bits: {', '.join(different) or 'none'}")
