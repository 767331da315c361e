"""``simulate``: run any method of the reference by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from . import baselines, global_sharpness, nesterov, sam
from .common import Run
from .mlp import MLP, Array

METHODS: dict[str, Callable[..., dict]] = {
    f.__name__: f
    for f in (
        baselines.fedavg,
        baselines.fedavgm,
        baselines.fedprox,
        baselines.scaffold,
        baselines.feddyn,
        baselines.fedcm,
        baselines.fedacg,
        baselines.fedntd,
        sam.fedsam,
        sam.fedasam,
        sam.mofedsam,
        sam.fedgamma,
        sam.fedspeed,
        sam.fedsmoo,
        sam.fedlesam,
        sam.fedlesam_s,
        sam.fedlesam_d,
        global_sharpness.fedgf,
        global_sharpness.fedgmt,
        global_sharpness.fedgmt_v2,
        global_sharpness.fedwmsam,
        nesterov.fednsam,
        nesterov.fednsam_s,
        nesterov.fednsam_d,
        nesterov.fedavg_nesterov,
        nesterov.fedsam_nesterov,
    )
}


def simulate(
    method: str,
    clients: Sequence[tuple[Array, Array]],
    w0: Array,
    shape: tuple[int, int, int],
    schedule: Sequence[Sequence[int]],
    steps: int,
    lr: float,
    lr_decay: float = 1.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    weighting: str = "samples",
    clip_norm: float | None = None,
    clip_stage: str = "direction",
    **hyper: object,
) -> dict:
    """Run ``method`` on a tanh perceptron of ``shape = (d, h, C)``, everything in float64.

    ``clients`` are (X, y) pairs, ``schedule`` lists the active clients (at least one, none twice)
    of every round; each takes ``steps`` full-batch SGD steps with rate ``lr * lr_decay**t`` and
    averages weigh clients by "samples" or "uniform"; directions or gradients, the ``clip_stage``, are no
    longer than ``clip_norm``. ``hyper`` goes to the method.

    Returns ``{"w": [model after each round], "server": {name: final value},
    "clients": {i: {name: final value}}}``; stateful methods list all clients, those never active
    with their initial value (None where there is none).
    """
    mlp = MLP(*shape)
    w0 = np.array(w0, dtype=np.float64)
    if w0.shape != (mlp.size,):
        raise ValueError(f"w0 has shape {w0.shape}, the model {mlp.size} parameters")
    run = Run(
        mlp=mlp,
        clients=[(np.asarray(X, dtype=np.float64), np.asarray(y)) for X, y in clients],
        w0=w0,
        schedule=[list(active) for active in schedule],
        K=steps,
        lr=lr,
        lr_decay=lr_decay,
        momentum=momentum,
        weight_decay=weight_decay,
        weighting=weighting,
        clip_norm=clip_norm,
        clip_stage=clip_stage,
    )
    return METHODS[method](run, **hyper)
