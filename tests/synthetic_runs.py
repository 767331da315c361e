"""Run directories with made-up numbers, in the form that a training leaves behind."""

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

CONFIG: dict[str, Any] = {
    "dataset": "digits",
    "partition": "dirichlet:0.1",
    "clients": 20,
    "model": "mlp",
    "local": {"lr": 0.05, "epochs": 5, "batch_size": 20},
    "participation": 5,
}
HEIGHTS = {
    "fedavg": 0.90,
    "fedsam": 0.93,
    "fedgmt": 0.97,
    "fedwmsam": 0.96,
    "fednsam": 0.95,
    "scaffold": 0.91,
}


def made_run(
    path: Path,
    method: str = "fedavg",
    seed: int = 0,
    rounds: int = 50,
    done: int | None = None,
    eval_every: int = 1,
    flatness: bool = False,
    landscape: bool = False,
    **settings: Any,
) -> Path:
    """A run of so many rounds, `done` of them finished."""
    path.mkdir(parents=True)
    done = rounds if done is None else done
    experiment = {**CONFIG, "method": method, "rounds": rounds, "seed": seed, **settings}
    about: dict[str, Any] = {
        "format": 1,
        "method": method,
        "rounds": rounds,
        "seed": seed,
        "environment": {"fedflat": "0.1.0", "python": "3.11.7", "torch": "2.13.0"},
        "started": "2026-01-01T10:00:00+0000",
    }
    if done == rounds:
        about["finished"] = "2026-01-01T11:00:00+0000"
    (path / "run.json").write_text(json.dumps(about))
    (path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    (path / "metrics.jsonl").write_text("")
    grow(path, method, seed, range(done), eval_every, rounds)
    top = HEIGHTS.get(method, 0.92)
    if flatness:
        write_flatness(path, rounds, 2 * (1 - top), seed)
    if landscape:
        write_landscape(path, rounds, 40 * (1 - top))
    return path


def grow(path: Path, method: str, seed: int, rounds: range, eval_every: int = 1, planned: int = 50) -> None:
    """Further rounds at the end of the metrics."""
    with (path / "metrics.jsonl").open("a") as file:
        for index in rounds:
            tested = (index + 1) % eval_every == 0 or index + 1 == planned
            file.write(json.dumps(made_round(method, seed, index, tested)) + "\n")


def made_round(method: str, seed: int, index: int, tested: bool = True) -> dict[str, Any]:
    noise = random.Random(f"{method} {seed} {index}").gauss(0, 0.012)
    reach = 1 - math.exp(-(index + 1) / 25)
    accuracy = min(1.0, max(0.0, HEIGHTS.get(method, 0.92) * (0.25 + 0.75 * reach) + noise * (1.2 - reach)))
    worst = {"mean": accuracy, "std": 0.1, "worst_decile": accuracy - 0.2}
    return {
        "index": index,
        "clients": [0, 1, 2, 3, 4],
        "accuracy": accuracy if tested else None,
        "loss": 2.3 * (1 - accuracy) if tested else None,
        "train_loss": 1.9 * (1 - accuracy),
        "train_loss_std": 0.1,
        "client_accuracy": worst if tested else None,
        "rejected": [],
        "steps": 100,
        "forward": 200 if method != "fedavg" else 100,
        "backward": 100,
        "spared_forward": 0,
        "spared_backward": 0,
        "vectors_down": 5,
        "vectors_up": 5,
        "bytes_down": 1_000_000,
        "bytes_up": 500_000,
        "lr": 0.05 * 0.998**index,
        "seconds": 0.25,
        "scalars": {"alpha": 1 - 0.9**index} if method == "fedwmsam" else {},
        "measures": {"distance": 3 / (index + 1)} if tested else {},
    }


def write_flatness(path: Path, rounds: int, scale: float, seed: int) -> None:
    radii = [0.5 * n for n in range(11)]
    random_losses = [0.1 + scale * r * r for r in radii]
    measures = {
        "sharpness": {
            "numbers": {"sharpness": scale * (1 + 0.1 * seed)},
            "result": {},
            "settings": {"part": "train"},
        },
        "eigenvalues": {"numbers": {"top eigenvalue": 90 * scale, "second": None}, "result": {}},
        "radius": {
            "numbers": {},
            "result": {
                "radii": radii,
                "random": [
                    {"value": v, "low": 0.95 * v, "high": 1.05 * v, "draws": 10, "confidence": 0.95}
                    for v in random_losses
                ],
                "gradient": [1.4 * v for v in random_losses],
            },
        },
        "density": {
            "numbers": {},
            "result": {
                "largest": 90 * scale,
                "smallest": -1.0,
                "nodes": [[-1.0, 0.0, 2.0, 90 * scale]],
                "weights": [[0.1, 0.8, 0.08, 0.02]],
                "size": 1000,
            },
        },
    }
    (path / "flatness.json").write_text(json.dumps({"format": 1, "round": rounds, "measures": measures}))


def write_landscape(path: Path, rounds: int, steepness: float, points: int = 21) -> None:
    axis = [-1 + 2 * n / (points - 1) for n in range(points)]
    train = [[0.05 + steepness * (a * a + 0.6 * b * b + 0.3 * a * b) for b in axis] for a in axis]
    test = [[1.15 * loss + 0.1 for loss in row] for row in train]
    content = {
        "format": 1,
        "round": rounds,
        "seed": 0,
        "axes": [axis, axis],
        "losses": {"train": train, "test": test},
    }
    (path / "landscape.json").write_text(json.dumps(content))
