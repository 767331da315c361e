"""Every method against an independent straight-line numpy implementation, to 1e-12 in float64."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from reference.methods import simulate
from reference.mlp import MLP

import fedflat as ff

SHAPE = (4, 5, 3)
SIZES = (7, 12, 5, 9, 16)
# clients skip rounds and come back; client 4 comes late
SCHEDULE = [[0, 1, 2], [1, 3], [0, 2, 3], [1, 2, 4], [0, 4], [1, 2, 3]]
STEPS = 3

# package parameter -> reference parameter, where the names differ
RENAMED = {"momentum": "momentum_server"}

VARIANTS: list[tuple[str, dict]] = [
    ("fedavg", {}),
    ("fedavg", {"server_lr": 0.7}),
    ("fedavgm", {"momentum": 0.6}),
    ("fedavgm", {"momentum": 0.6, "server_lr": 0.5}),
    ("fedprox", {"mu": 0.3}),
    ("scaffold", {}),
    ("scaffold", {"server_lr": 0.8}),
    ("feddyn", {"beta": 4.0}),
    ("feddyn", {"beta": 4.0, "prox": "norm"}),
    ("fedcm", {"alpha": 0.3}),
    ("fedcm", {"alpha": 0.3, "server_lr": 0.6}),
    ("fedacg", {"momentum": 0.7, "mu": 0.2}),
    ("fedntd", {"gamma": 0.8, "tau": 1.7}),
    ("fedsam", {"rho": 0.1}),
    ("fedasam", {"rho": 0.3, "eta": 0.2}),
    ("mofedsam", {"rho": 0.1, "alpha": 0.4}),
    ("mofedsam", {"rho": 0.1, "alpha": 0.4, "server_lr": 1.5}),
    ("fedgamma", {"rho": 0.1}),
    ("fedgamma", {"rho": 0.1, "server_lr": 0.9}),
    ("fedspeed", {"rho": 0.1, "beta": 5.0}),
    ("fedspeed", {"rho": 0.1, "beta": 5.0, "normalize": False, "mix": 0.6}),
    ("fedspeed", {"rho": 0.1, "beta": 5.0, "dual_mean": "active"}),
    ("fedspeed", {"rho": 0.1, "beta": 5.0, "prox": "norm", "mix": 0.2}),
    ("fedsmoo", {"rho": 0.1, "beta": 5.0}),
    ("fedsmoo", {"rho": 0.1, "beta": 5.0, "prox": "norm"}),
    ("fedsmoo", {"rho": 0.1, "beta": None}),
    ("fedlesam", {"rho": 0.1}),
    ("fedlesam", {"rho": 0.1, "direction": "server"}),
    ("fedlesam_s", {"rho": 0.1}),
    ("fedlesam_d", {"rho": 0.1, "beta": 5.0}),
    ("fedlesam_d", {"rho": 0.1, "beta": 5.0, "prox": "norm"}),
    ("fedgf", {"rho": 0.1, "threshold": 0.35, "window": 3}),
    ("fedgf", {"rho": 0.1, "threshold": 0.35, "window": 2, "rho_global": 0.2, "server_lr": 0.9}),
    ("fedgf", {"rho": 0.1, "threshold": 0.35, "window": 3, "c": 0.5}),
    ("fedgf", {"rho": 0.1, "threshold": 0.35, "window": 3, "c": 1.0}),
    ("fedgf", {"rho": 0.1, "threshold": 0.35, "window": 3, "c": 0.0}),
    ("fedgmt", {"alpha": 0.8, "beta": 5.0, "gamma": 1.2, "tau": 2.0}),
    ("fedgmt", {"alpha": 0.8, "beta": 5.0, "gamma": 1.2, "tau": 2.0, "server_rule": "active"}),
    ("fedgmt", {"alpha": 0.8, "beta": None, "gamma": 1.2, "tau": 2.0}),
    ("fedgmt", {"alpha": 0.8, "beta": 5.0, "gamma": 0, "tau": 2.0}),
    ("fedgmt_v2", {"alpha": 0.6, "beta": 5.0, "gamma": 1.2, "tau": 2.0}),
    ("fedgmt_v2", {"alpha": 0.6, "beta": 5.0, "gamma": 1.2, "tau": 2.0, "first": "initial"}),
    ("fedwmsam", {"rho": 0.1, "alpha": 0.3, "decay": 0.2}),
    ("fedwmsam", {"rho": 0.1, "alpha": 0.3, "decay": 0.2, "alpha_rule": "paper"}),
    ("fedwmsam", {"rho": 0.1, "alpha": 0.3, "decay": 0.2, "alpha_rule": "gradient"}),
    ("fedwmsam", {"rho": 0.1, "alpha": 0.3, "decay": 0.2, "momentum": False}),
    ("fedwmsam", {"rho": 0.1, "alpha": 0.3, "decay": 0.2, "momentum": False, "alpha_rule": "paper"}),
    ("fedwmsam", {"rho": 0.1, "alpha": 0.3, "decay": 0.2, "sam": False}),
    ("fedwmsam", {"rho": 0.1, "alpha": 0.3, "decay": 0.2, "weighted": False}),
    ("fedwmsam", {"rho": 0.1, "alpha": 0.3, "decay": 0.2, "server_lr": 0.7}),
    ("fednsam", {"rho": 0.1, "momentum": 0.7}),
    ("fednsam", {"rho": 0.1, "momentum": 0.7, "nesterov": False}),
    ("fednsam", {"rho": 0.1, "momentum": 0.7, "nesterov": False, "heavy_ball": False}),
    ("fednsam", {"rho": 0.1, "momentum": 0.7, "heavy_ball": False}),
    ("fednsam_s", {"rho": 0.1, "momentum": 0.7}),
    ("fednsam_d", {"rho": 0.1, "momentum": 0.7, "beta": 5.0}),
    ("fedavg_nesterov", {"momentum": 0.7}),
    ("fedsam_nesterov", {"rho": 0.1, "momentum": 0.7}),
]

# what the package and the reference call the same server state
SERVER_NAMES = {
    "momentum": "m",
    "gradient": "g",
    "control": "c",
    "corrector": "c",
    "dual": "u",
    "perturbation": "s",
    "ema": "e",
    "perturbed": "w_tilde",
}
CLIENT_NAMES = {"control": "c", "dual": "u", "multiplier": "mu", "last_model": "w_old", "ema": "e"}


def problem() -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    rng = np.random.default_rng(11)
    clients = [
        (rng.normal(size=(n, SHAPE[0])) + 0.5 * i, rng.integers(SHAPE[2], size=n))
        for i, n in enumerate(SIZES)
    ]
    return clients, 0.5 * rng.normal(size=MLP(*SHAPE).size)


def network(w0: np.ndarray) -> torch.nn.Module:
    module = torch.nn.Sequential(
        torch.nn.Linear(SHAPE[0], SHAPE[1]), torch.nn.Tanh(), torch.nn.Linear(SHAPE[1], SHAPE[2])
    ).double()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(w0), module.parameters())
    return module


def close(ours: object, theirs: object) -> None:
    ours = ours.numpy() if isinstance(ours, torch.Tensor) else ours
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def names_of(variant: tuple[str, dict]) -> str:
    return variant[0] + "".join(f"-{k}={v}" for k, v in variant[1].items())


@pytest.fixture(params=VARIANTS, ids=names_of)
def variant(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict]]:
    return request.param


OPTIMISERS = {
    "plain": {"lr": 0.2},
    "decayed": {"lr": 0.2, "lr_decay": 0.9, "momentum": 0.4, "weight_decay": 0.03},
}
CLIP = 0.6
"""Some of the gradients are longer, some are not; see below."""


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_trajectory_equals_reference(variant, weighting, optimiser):
    compare(variant, weighting, OPTIMISERS[optimiser])


@pytest.mark.parametrize("stage", ["direction", "gradient"])
def test_clipped_trajectory_equals_reference(variant, stage):
    compare(variant, "uniform", {**OPTIMISERS["decayed"], "clip_norm": CLIP, "clip_stage": stage})


def compare(variant, weighting, settings):
    """Every round's model, and what server and clients keep in the end."""
    name, hyper = variant
    clients, w0 = problem()
    theirs_hyper = {RENAMED.get(k, k): v for k, v in hyper.items()}
    if name == "fedwmsam" and "momentum" in hyper:
        theirs_hyper["momentum_correctors"] = theirs_hyper.pop("momentum_server")
    theirs = simulate(
        name, clients, w0, SHAPE, SCHEDULE, STEPS, weighting=weighting, **settings, **theirs_hyper
    )
    ours: list[torch.Tensor] = []
    run = ff.train(
        ff.Federation(clients=clients),
        network(w0),
        ff.METHODS[name](**hyper),
        local=ff.LocalSGD(epochs=STEPS, batch_size=None, **settings),
        participation=ff.Schedule(SCHEDULE),
        rounds=len(SCHEDULE),
        weighting=weighting,
        dtype=torch.float64,
        on_round=lambda r: ours.append(r.server.w.clone()),
    )
    for a, b in zip(ours, theirs["w"], strict=True):
        close(a, b)
    for mine, reference in SERVER_NAMES.items():
        if mine in run.server.state and reference in theirs["server"]:
            close(run.server[mine], theirs["server"][reference])
    for scalar in ("alpha", "c"):
        if scalar in run.server.scalars():
            close(run.server[scalar], theirs["server"][scalar])
    kept = run.server.per_client if name == "fedwmsam" else run.clients
    for client, state in theirs["clients"].items():
        mine = kept.get(client)
        for key, value in mine.items():
            close(value, state[CLIENT_NAMES.get(key, SERVER_NAMES.get(key))])
        if client not in {c for round in SCHEDULE for c in round}:
            assert mine == {}


def test_every_method_is_compared():
    assert {name for name, _ in VARIANTS} == set(ff.METHODS)


def test_the_problem_exercises_the_controllers():
    """FedGF's clients must diverge in some rounds and not in others, or the comparison proves little."""
    clients, w0 = problem()
    c: list[float] = []
    ff.train(
        ff.Federation(clients=clients),
        network(w0),
        ff.fedgf(rho=0.1, threshold=0.35, window=3),
        local=ff.LocalSGD(lr=0.2, epochs=STEPS, batch_size=None),
        participation=ff.Schedule(SCHEDULE),
        rounds=len(SCHEDULE),
        dtype=torch.float64,
        on_round=lambda r: c.append(r.scalars["c"]),
    )
    assert len({*c}) > 2


def test_some_gradients_are_clipped_and_some_are_not():
    clients, w0 = problem()
    mlp = MLP(*SHAPE)
    final = simulate("fedavg", clients, w0, SHAPE, SCHEDULE, STEPS, lr=0.2, clip_norm=CLIP)["w"][-1]
    lengths = [np.linalg.norm(mlp.ce_grad(w, *data)) for w in (w0, final) for data in clients]
    assert min(lengths) < CLIP < max(lengths)
