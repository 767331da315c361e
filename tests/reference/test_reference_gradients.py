"""Checks of the reference itself: gradients against differences, and facts known in advance."""

from __future__ import annotations

import numpy as np
import pytest

from .methods import METHODS, simulate
from .mlp import MLP

SHAPE = (3, 4, 5)
NET = MLP(*SHAPE)
SIZES = (4, 7, 9, 6)
ALL = [[0, 1, 2, 3]] * 4
SOME = [[0, 2], [1, 2], [0, 1], [2, 0]]  # client 3 never takes part


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


CLIENTS = [
    (draw(i, size, 3), np.random.default_rng(100 + i).integers(0, 5, size)) for i, size in enumerate(SIZES)
]
W0 = 0.5 * draw(7, NET.size)


def run(method: str, schedule=SOME, **options) -> dict:
    settings = {"steps": 3, "lr": 0.1, "lr_decay": 0.9}
    return simulate(method, CLIENTS, W0, SHAPE, schedule, **{**settings, **options})


def assert_same(first: dict, second: dict) -> None:
    np.testing.assert_allclose(first["w"], second["w"], rtol=0, atol=1e-13)


# gradients ---------------------------------------------------------------------------------------


def differences(f, w: np.ndarray, h: float = 1e-5) -> np.ndarray:
    return np.array([(f(w + h * e) - f(w - h * e)) / (2 * h) for e in np.eye(len(w))])


@pytest.mark.parametrize("loss", ["ce", "kd", "ntd"])
@pytest.mark.parametrize(("gamma", "tau"), [(1.0, 1.0), (0.7, 3.0)])
@pytest.mark.parametrize("client", [0, 2])
def test_gradient_matches_central_differences(loss, gamma, tau, client):
    X, y = CLIENTS[client]
    extra = () if loss == "ce" else (NET.logits(draw(8, NET.size), X), gamma, tau)
    analytic = getattr(NET, f"{loss}_grad")(W0, X, y, *extra)
    numeric = differences(lambda w: getattr(NET, loss)(w, X, y, *extra), W0)
    np.testing.assert_allclose(analytic, numeric, rtol=0, atol=1e-9)


def test_losses_by_hand():
    """Zero weights give uniform logits: CE = log C, and the KLs to a known teacher."""
    X, y, w = np.ones((1, 3)), np.array([4]), np.zeros(NET.size)
    teacher = np.log(np.array([[0.1, 0.1, 0.1, 0.2, 0.5]]))
    entropy = 0.3 * np.log(0.1) + 0.2 * np.log(0.2) + 0.5 * np.log(0.5)
    entropy_not_true = 0.6 * np.log(0.2) + 0.4 * np.log(0.4)
    assert NET.ce(w, X, y) == pytest.approx(np.log(5))
    assert NET.kd(w, X, y, teacher, 2.0, 1.0) == pytest.approx(3 * np.log(5) + 2 * entropy)
    assert NET.ntd(w, X, y, teacher, 2.0, 1.0) == pytest.approx(
        np.log(5) + 2 * np.log(4) + 2 * entropy_not_true
    )


def test_weight_mask_separates_matrices_from_biases():
    marked = np.where(NET.weight_mask(), 1.0, 0.0)
    W1, b1, W2, b2 = NET.split(marked)
    assert W1.all() and W2.all() and not b1.any() and not b2.any()


# facts -------------------------------------------------------------------------------------------

HYPER: dict[str, dict] = {
    "fedavg": {},
    "fedavgm": {"momentum_server": 0.7},
    "fedprox": {"mu": 0.3},
    "scaffold": {},
    "feddyn": {"beta": 5.0},
    "fedcm": {"alpha": 0.2},
    "fedacg": {"momentum_server": 0.7, "mu": 0.1},
    "fedntd": {"gamma": 1.0, "tau": 2.0},
    "fedsam": {"rho": 0.1},
    "fedasam": {"rho": 0.1, "eta": 0.2},
    "mofedsam": {"rho": 0.1, "alpha": 0.2},
    "fedgamma": {"rho": 0.1},
    "fedspeed": {"rho": 0.1, "beta": 5.0},
    "fedsmoo": {"rho": 0.1, "beta": 5.0},
    "fedlesam": {"rho": 0.1},
    "fedlesam_s": {"rho": 0.1},
    "fedlesam_d": {"rho": 0.1, "beta": 5.0},
    "fedgf": {"rho": 0.1, "threshold": 0.1, "window": 2},
    "fedgmt": {"alpha": 0.9, "beta": 5.0, "gamma": 1.0, "tau": 3.0},
    "fedgmt_v2": {"alpha": 0.5, "beta": 5.0, "gamma": 1.0, "tau": 3.0},
    "fedwmsam": {"rho": 0.1, "alpha": 0.1, "decay": 0.1},
    "fednsam": {"rho": 0.1, "momentum_server": 0.7},
    "fednsam_s": {"rho": 0.1, "momentum_server": 0.7},
    "fednsam_d": {"rho": 0.1, "momentum_server": 0.7, "beta": 5.0},
    "fedavg_nesterov": {"momentum_server": 0.7},
    "fedsam_nesterov": {"rho": 0.1, "momentum_server": 0.7},
}


def test_every_method_is_listed():
    assert HYPER.keys() == METHODS.keys()


@pytest.mark.parametrize("method", HYPER)
def test_runs_without_touching_its_inputs(method):
    w0 = W0.copy()
    out = run(method, momentum=0.9, weight_decay=0.01, **HYPER[method])
    assert len(out["w"]) == len(SOME) and np.isfinite(out["w"]).all()
    np.testing.assert_array_equal(W0, w0)
    for value in out["clients"].get(3, {}).values():
        assert value is None or not value.any()


def test_local_sgd_momentum_and_decay_by_hand():
    """One client, two steps: buf_0 = d_0, buf_1 = mu buf_0 + d_1, decay at the iterate."""
    X, y = CLIENTS[0]
    d0 = NET.ce_grad(W0, X, y) + 0.01 * W0
    x1 = W0 - 0.1 * d0
    x2 = x1 - 0.1 * (0.9 * d0 + NET.ce_grad(x1, X, y) + 0.01 * x1)
    out = run("fedavg", [[0]], steps=2, momentum=0.9, weight_decay=0.01)
    np.testing.assert_allclose(out["w"][0], x2, atol=1e-15)


@pytest.mark.parametrize("active", [[0, 1, 2, 3], [1], [0, 2]])
def test_first_dynamic_step_is_one_plus_participation_times_the_mean_update(active):
    """Delta - beta u = (1 + S/M) Delta in round 0 with uniform weights; 2 Delta if all are active.

    With one step per round the pull is zero, so Delta is FedAvg's.
    """
    options = {"schedule": [active], "steps": 1, "weighting": "uniform"}
    plain = run("fedavg", **options)["w"][0] - W0
    for method in ("feddyn", "fedspeed", "fedlesam_d", "fednsam_d"):
        hyper = {**HYPER[method], **({"rho": 0.0} if "rho" in HYPER[method] else {})}
        step = run(method, **options, **hyper)["w"][0] - W0
        np.testing.assert_allclose(step, (1 + len(active) / 4) * plain, atol=1e-14)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("scaffold", "c"),
        ("fedgamma", "c"),
        ("fedlesam_s", "c"),
        ("fednsam_s", "c"),
        ("fedwmsam", "c"),
        ("feddyn", "u"),
        ("fedspeed", "u"),
        ("fedsmoo", "u"),
        ("fedlesam_d", "u"),
        ("fednsam_d", "u"),
        ("fedgmt", "u"),
        ("fedgmt_v2", "u"),
    ],
)
def test_server_vectors_are_the_means_of_the_client_vectors(method, name):
    """u = mean u_i and c = mean c_i over all clients, seen or not, whatever the weighting."""
    out = run(method, **HYPER[method])
    mean = np.mean([out["clients"][i][name] for i in range(4)], axis=0)
    assert mean.any()
    np.testing.assert_allclose(out["server"][name], mean, atol=1e-14)


@pytest.mark.parametrize(
    ("method", "change", "same"),
    [
        ("fedsam", {"rho": 0.0}, "fedavg"),
        ("fedprox", {"mu": 0.0}, "fedavg"),
        ("fedavgm", {"momentum_server": 0.0}, "fedavg"),
        ("fedcm", {"alpha": 1.0}, "fedavg"),
        ("mofedsam", {"rho": 0.0}, "fedcm"),
        ("fedgamma", {"rho": 0.0}, "scaffold"),
        ("fedspeed", {"rho": 0.0}, "feddyn"),
        ("fedspeed", {"mix": 0.0}, "feddyn"),
        ("fedsmoo", {"rho": 0.0}, "feddyn"),
        ("fedsmoo", {"rho": 0.0, "beta": None}, "fedavg"),
        ("fedlesam", {"rho": 0.0}, "fedavg"),
        ("fedlesam_s", {"rho": 0.0}, "scaffold"),
        ("fedlesam_d", {"rho": 0.0}, "feddyn"),
        ("fedgf", {"c": 0.0}, "fedsam"),
        ("fedgf", {"threshold": np.inf}, "fedsam"),
        ("fedgmt", {"beta": None, "gamma": 0.0}, "fedavg"),
        ("fedgmt_v2", {"beta": None, "gamma": 0.0}, "fedavg"),
        ("fednsam", {"rho": 0.0}, "fedavg_nesterov"),
        ("fednsam", {"rho": 0.0, "nesterov": False}, "fedavgm"),
        ("fednsam", {"rho": 0.0, "nesterov": False, "heavy_ball": False}, "fedavg"),
        ("fedsam_nesterov", {"momentum_server": 0.0}, "fedsam"),
        ("fednsam_s", {"rho": 0.0, "momentum_server": 0.0}, "scaffold"),
        ("fednsam_d", {"rho": 0.0, "momentum_server": 0.0}, "feddyn"),
    ],
)
def test_special_cases(method, change, same):
    assert_same(run(method, **{**HYPER[method], **change}), run(same, **HYPER[same]))


def test_special_cases_across_hyper_parameters():
    off = {"momentum_correctors": False, "sam": False, "weighted": False}
    assert_same(run("fedwmsam", rho=0.1, alpha=0.2, decay=0.1, **off), run("fedcm", alpha=0.2))
    assert_same(run("fedacg", momentum_server=0.0, mu=0.3), run("fedprox", mu=0.3))
    assert_same(run("fedacg", momentum_server=0.7, mu=0.0), run("fedavg_nesterov", momentum_server=0.7))
    assert_same(run("fednsam", rho=0.1, momentum_server=0.0), run("fedlesam", rho=0.1, direction="server"))


def test_full_participation_hides_the_difference_between_variants():
    assert_same(run("fedlesam", ALL, rho=0.1), run("fedlesam", ALL, rho=0.1, direction="server"))
    gmt = HYPER["fedgmt"]
    assert_same(run("fedgmt", ALL, **gmt), run("fedgmt_v2", ALL, first="initial", **gmt))
    uniform = {"weighting": "uniform"}
    for method, name in (("fedgmt", "server_rule"), ("fedspeed", "dual_mean")):
        default = run(method, ALL, **uniform, **HYPER[method])
        assert_same(default, run(method, ALL, **uniform, **HYPER[method], **{name: "active"}))


def test_fedgf_with_c_one_takes_every_gradient_at_the_perturbed_global_model():
    first, second = run(
        "fedgf", [[1], [1]], lr_decay=1.0, rho=0.2, threshold=0.1, window=2, rho_global=0.3, c=1.0
    )["w"]
    assert_same({"w": [first]}, run("fedsam", [[1]], rho=0.2))
    back = (W0 - first) / np.linalg.norm(W0 - first)
    step = -3 * 0.1 * NET.ce_grad(first + 0.3 * back, *CLIENTS[1])
    np.testing.assert_allclose(second - first, step, atol=1e-14)


def test_fedsmoo_with_one_step_is_fedsam_at_first():
    """Round 0: s_hat = rho n(g) = mu_i, hence s_i = mu_i - s_hat = 0 and s = 0."""
    out = run("fedsmoo", [[0, 1]], steps=1, rho=0.2, beta=None)
    assert_same(out, run("fedsam", [[0, 1]], steps=1, rho=0.2))
    assert not out["server"]["s"].any()
    g = NET.ce_grad(W0, *CLIENTS[1])
    np.testing.assert_allclose(out["clients"][1]["mu"], 0.2 * g / np.linalg.norm(g), atol=1e-15)


def test_fedwmsam_first_rounds_by_hand():
    """Clients 0 then 1, one step each: no perturbation, g_1 = g + alpha / (1 - alpha) (c - 0)."""
    a, out = 0.25, run("fedwmsam", [[0], [1]], steps=1, rho=0.1, alpha=0.25, decay=0.5)
    q0 = NET.ce_grad(W0, *CLIENTS[0])
    w1 = W0 - 0.1 * a * q0
    g = a * q0  # G of round 0, also c_0; c = c_0 / 4
    a = 0.5 * a + 0.5 * 0.1  # the cosine with g = 0 counts 0, clipped to 0.1
    v = a * (NET.ce_grad(w1, *CLIENTS[1]) + g / 4) + (1 - a) * g
    np.testing.assert_allclose(out["w"], [w1, w1 - 0.09 * v], atol=1e-15)
    hat = 1 - v @ g / np.linalg.norm(v) / np.linalg.norm(g)
    assert out["server"]["alpha"] == pytest.approx(0.5 * a + 0.5 * np.clip(hat, 0.1, 0.9))
    np.testing.assert_allclose(out["server"]["g"], v, atol=1e-14)


def test_weightings_differ_only_through_the_sizes():
    single = [[0], [2], [1]]
    for method, hyper in HYPER.items():
        assert_same(run(method, single, **hyper), run(method, single, weighting="uniform", **hyper))
    assert not np.allclose(run("fedavg")["w"], run("fedavg", weighting="uniform")["w"])
