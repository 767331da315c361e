"""Identities between methods, on whole trajectories: what must coincide when a parameter is switched off."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings, strategies as st
from test_reference import SCHEDULE, SHAPE, SIZES, network, problem
from torch.func import functional_call

import fedflat as ff

EVERYONE = [list(range(len(SIZES)))] * len(SCHEDULE)
# no shrinking: which of the parameters is smallest does not matter here, and a failure is reported at once
few = settings(deadline=None, max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])


def train_small(method: ff.Method | str, schedule: list[list[int]] = SCHEDULE, **given: Any) -> ff.Run:
    """Train on the small problem of the reference tests, in float64; full batches unless told otherwise."""
    clients, w0 = problem()
    options = {
        "local": ff.LocalSGD(lr=0.2, epochs=2, batch_size=None),
        "model": network(w0),
        "dtype": torch.float64,
        "rounds": len(schedule),
        **given,
    }
    return ff.train(
        ff.Federation(clients=clients), method=method, participation=ff.Schedule(schedule), **options
    )


def trajectory(method: ff.Method | str, schedule: list[list[int]] = SCHEDULE, **given: Any) -> torch.Tensor:
    """The global models before the first round and after every round, one per row."""
    path = [torch.from_numpy(problem()[1])]
    train_small(method, schedule, on_round=lambda r: path.append(r.server.w.clone()), **given)
    return torch.stack(path)


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@st.composite
def any_settings(draw: st.DrawFn, **fixed: Any) -> dict[str, Any]:
    """A local optimiser (with mini-batches or without), a weighting and a seed."""
    local = {
        "lr": draw(st.floats(0.01, 0.4)),
        "momentum": draw(st.sampled_from([0.0, 0.5])),
        "weight_decay": draw(st.sampled_from([0.0, 0.02])),
        "lr_decay": draw(st.sampled_from([1.0, 0.9])),
        "batch_size": draw(st.sampled_from([None, 6])),
        "epochs": 2,
    }
    return {
        "local": ff.LocalSGD(**{**local, **fixed}),
        "weighting": draw(st.sampled_from(["samples", "uniform"])),
        "seed": draw(st.integers(0, 2**31)),
    }


@st.composite
def any_parameters(draw: st.DrawFn) -> dict[str, float]:
    """The methods' own parameters, in ranges where training is stable."""
    return {
        "rho": draw(st.floats(0.01, 0.3)),
        "beta": draw(st.floats(3.0, 50.0)),
        "alpha": draw(st.floats(0.1, 0.9)),
        "momentum": draw(st.floats(0.1, 0.8)),
        "mu": draw(st.floats(0.01, 0.5)),
        "server_lr": draw(st.floats(0.5, 1.2)),
        "prox": draw(st.sampled_from(["square", "norm"])),
        "mix": draw(st.floats(0.1, 1.0)),
    }


ORDINARY = {
    "rho": 0.1,
    "beta": 5.0,
    "alpha": 0.3,
    "momentum": 0.6,
    "mu": 0.2,
    "server_lr": 0.9,
    "prox": "square",
    "mix": 0.7,
}
# a method with a parameter x, x switched off, x switched on, the method it must be when x is off
IDENTITIES = [
    ("fedsam(rho={x})", 0, 0.1, "fedavg"),
    ("fedasam(rho={x})", 0, 0.1, "fedavg"),
    ("fedprox(mu={x})", 0, 0.2, "fedavg"),
    ("fedntd(gamma={x})", 0, 1, "fedavg"),
    ("fedavgm(momentum={x}, server_lr={server_lr})", 0, 0.6, "fedavg(server_lr={server_lr})"),
    ("fedcm(alpha={x}, server_lr={server_lr})", 1, 0.3, "fedavg(server_lr={server_lr})"),
    ("mofedsam(rho={x}, alpha={alpha})", 0, 0.1, "fedcm(alpha={alpha})"),
    ("mofedsam(rho={rho}, alpha={x})", 1, 0.3, "fedsam(rho={rho})"),
    ("fedgamma(rho={x}, server_lr={server_lr})", 0, 0.1, "scaffold(server_lr={server_lr})"),
    ("fedspeed(rho={x}, beta={beta}, mix={mix}, prox={prox})", 0, 0.1, "feddyn(beta={beta}, prox={prox})"),
    ("fedspeed(rho={rho}, beta={beta}, mix={x})", 0, 1, "feddyn(beta={beta})"),
    ("fedsmoo(rho={x}, beta={beta}, prox={prox})", 0, 0.1, "feddyn(beta={beta}, prox={prox})"),
    ("fedlesam(rho={x})", 0, 0.1, "fedavg"),
    ("fedlesam_s(rho={x}, server_lr={server_lr})", 0, 0.1, "scaffold(server_lr={server_lr})"),
    ("fedlesam_d(rho={x}, beta={beta}, prox={prox})", 0, 0.1, "feddyn(beta={beta}, prox={prox})"),
    ("fedgf(rho={rho}, c={x})", 0, 0.5, "fedsam(rho={rho})"),
    ("fedgf(rho={rho}, threshold={x})", 1e9, 0.01, "fedsam(rho={rho})"),
    ("fedacg(momentum={x}, mu={mu})", 0, 0.6, "fedprox(mu={mu})"),
    ("fednsam(rho={rho}, momentum={x})", 0, 0.6, "fedlesam(rho={rho}, direction=server)"),
    ("fednsam_s(rho=0, momentum={x})", 0, 0.6, "scaffold"),
    ("fednsam_d(rho=0, momentum={x}, beta={beta})", 0, 0.6, "feddyn(beta={beta})"),
    ("fedsam_nesterov(rho={x}, momentum={momentum})", 0, 0.1, "fedavg_nesterov(momentum={momentum})"),
    (
        "fedwmsam(rho={rho}, alpha={alpha}, momentum={x}, sam={x}, weighted={x}, server_lr={server_lr})",
        False,
        True,
        "fedcm(alpha={alpha}, server_lr={server_lr})",
    ),
    ("trajectory-loss(gamma={x}) + dual-correction(beta={beta})", 0, 1, "dual-correction(beta={beta})"),
]
identities = pytest.mark.parametrize(
    ("general", "off", "on", "special"), IDENTITIES, ids=[f"{g}, x={x}" for g, x, *_ in IDENTITIES]
)


@identities
@given(parameters=any_parameters(), options=any_settings())
@few
def test_switched_off(general, off, on, special, parameters, options):
    ours = trajectory(general.format(x=off, **parameters), **options)
    assert_same(ours, trajectory(special.format(**parameters), **options))


@identities
def test_switched_on_differs(general, off, on, special):
    """The same comparison with the parameter switched on: otherwise the identities would prove nothing."""
    ours = trajectory(general.format(x=on, **ORDINARY))
    assert (ours - trajectory(special.format(**ORDINARY))).abs().max() > 1e-4


class Unnamed(torch.nn.Module):
    """A linear model whose tensors are not called weight, so that FedASAM leaves all of them unscaled."""

    def __init__(self, name: str) -> None:
        super().__init__()
        w0 = torch.from_numpy(problem()[1])
        self.name = name
        self.register_parameter(name, torch.nn.Parameter(w0[: SHAPE[0] * SHAPE[2]].view(SHAPE[0], SHAPE[2])))
        self.offset = torch.nn.Parameter(w0[: SHAPE[2]].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ getattr(self, self.name) + self.offset


@given(rho=st.floats(0.01, 0.5), eta=st.floats(0, 1), options=any_settings())
@few
def test_fedasam_without_weights_is_fedsam(rho, eta, options):
    asam = train_small(ff.fedasam(rho=rho, eta=eta), model=Unnamed("kernel"), **options)
    sam = train_small(ff.fedsam(rho=rho), model=Unnamed("kernel"), **options)
    assert_same(asam.server.w, sam.server.w)


def test_fedasam_scales_tensors_named_weight():
    asam = train_small(ff.fedasam(rho=0.3), model=Unnamed("weight"))
    sam = train_small(ff.fedsam(rho=0.3), model=Unnamed("weight"))
    assert (asam.server.w - sam.server.w).abs().max() > 1e-4


@given(parameters=any_parameters(), options=any_settings(weight_decay=0.0))
@few
def test_fednsam_without_ascent_is_fedacg_without_pull(parameters, options):
    """Extrapolating every gradient, or starting at the look-ahead: the same without weight decay."""
    momentum = parameters["momentum"]
    nsam = trajectory(ff.fednsam(rho=0, momentum=momentum), **options)
    assert_same(nsam, trajectory(ff.fedacg(momentum=momentum, mu=0), **options))
    assert_same(nsam, trajectory(ff.fedavg_nesterov(momentum=momentum), **options))


def test_fednsam_is_not_fedacg_with_weight_decay():
    local = ff.LocalSGD(lr=0.2, epochs=2, batch_size=None, weight_decay=0.1)
    nsam, acg = (trajectory(m, local=local) for m in (ff.fednsam(rho=0), ff.fedacg(mu=0)))
    assert (nsam - acg).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("own", "servers"),
    [
        ("fedlesam(rho={rho})", "fedlesam(rho={rho}, direction=server)"),
        ("fedlesam_s(rho={rho})", "fedlesam_s(rho={rho}, direction=server)"),
        ("fedlesam_d(rho={rho}, beta={beta})", "fedlesam_d(rho={rho}, beta={beta}, direction=server)"),
        ("fedgmt_v2(alpha={alpha}, beta={beta}, first=initial)", "fedgmt(alpha={alpha}, beta={beta})"),
    ],
)
class TestWhatClientsRememberThemselves:
    """With full participation a client remembers the same as the server; otherwise not."""

    @given(parameters=any_parameters(), options=any_settings())
    @few
    def test_full_participation(self, own, servers, parameters, options):
        assert_same(
            trajectory(own.format(**parameters), EVERYONE, **options),
            trajectory(servers.format(**parameters), EVERYONE, **options),
        )

    def test_partial_participation(self, own, servers):
        difference = trajectory(own.format(**ORDINARY)) - trajectory(servers.format(**ORDINARY))
        assert difference.abs().max() > 1e-5


@given(parameters=any_parameters(), lr=st.floats(0.01, 0.4))
@few
def test_first_step_of_momentum_blends(parameters, lr):
    """g = 0 in round 0, so one plain step is α times the step without blending."""
    alpha, rho = parameters["alpha"], parameters["rho"]
    pairs = [
        (ff.fedcm(alpha=alpha), ff.fedavg()),
        (ff.mofedsam(rho=rho, alpha=alpha), ff.fedsam(rho=rho)),
        (ff.mofedsam(rho=0, alpha=alpha), ff.fedavg()),
    ]
    for blended, plain in pairs:
        one_step = ff.LocalSGD(lr=lr, steps=1, batch_size=None)
        a, b = (trajectory(m, SCHEDULE[:1], local=one_step) for m in (blended, plain))
        assert_same(a[1] - a[0], alpha * (b[1] - b[0]))


# -- duals, by hand -----------------------------------------------------------------------------------


def client_gradient(client: int, w: torch.Tensor) -> torch.Tensor:
    """Autograd's gradient of a client's mean cross-entropy, with nothing of the package."""
    clients, w0 = problem()
    module, (x, y) = network(w0), (torch.from_numpy(a) for a in clients[client])
    w = w.clone().requires_grad_()
    shapes = [p.shape for p in module.parameters()]
    pieces = [v.view(s) for v, s in zip(w.split([s.numel() for s in shapes]), shapes, strict=True)]
    names = [name for name, _ in module.named_parameters()]
    loss = F.cross_entropy(functional_call(module, dict(zip(names, pieces, strict=True)), (x,)), y)
    return torch.autograd.grad(loss, w)[0]


def duals_by_hand(beta: float, lr: float, steps: int) -> torch.Tensor:
    """FedDyn without its proximal term, uniform weights, written as one loop."""
    w = torch.from_numpy(problem()[1])
    duals = torch.zeros(len(SIZES), len(w), dtype=w.dtype)
    path = [w]
    for active in SCHEDULE:
        updates = []
        for i in active:
            x = w
            for _ in range(steps):
                x = x - lr * (client_gradient(i, x) - duals[i])
            updates.append(x - w)
            duals[i] -= updates[-1] / beta
        w = w + torch.stack(updates).mean(0) - beta * duals.mean(0)
        path.append(w)
    return torch.stack(path)


@pytest.mark.parametrize("beta", [2.0, 10.0])
def test_fedgmt_without_loss_is_feddyn_without_pull(beta):
    options = {"local": ff.LocalSGD(lr=0.2, steps=3, batch_size=None), "weighting": "uniform"}
    by_hand = duals_by_hand(beta, 0.2, 3)
    assert_same(trajectory(ff.fedgmt(gamma=0, beta=beta), **options), by_hand)
    assert_same(trajectory(ff.fedgmt_v2(gamma=0, beta=beta), **options), by_hand)
    feddyn = trajectory(ff.feddyn(beta=beta), **options)
    assert (feddyn - by_hand).abs().max() > 1e-4


@given(beta=st.floats(1.0, 100.0), active=st.integers(1, len(SIZES)), options=any_settings())
@few
def test_first_step_of_feddyn_is_longer(beta, active, options):
    """Without duals yet FedDyn's clients are FedProx's; its server steps (1 + S/M) times their mean."""
    options["weighting"] = "uniform"
    schedule = [list(range(active))]
    dyn = trajectory(ff.feddyn(beta=beta), schedule, **options)
    prox = trajectory(ff.fedprox(mu=1 / beta), schedule, **options)
    assert_same(dyn[1] - dyn[0], (1 + active / len(SIZES)) * (prox[1] - prox[0]))


@pytest.mark.parametrize(
    "make", [lambda beta: ff.feddyn(beta=beta), lambda beta: ff.fedgmt(gamma=0, beta=beta)]
)
def test_infinite_beta_is_not_fedavg(make):
    """u_i vanishes, but −βu is the sum of all updates over M, which the server keeps adding."""
    beta, lr, w = 1e9, 0.2, torch.from_numpy(problem()[1])
    run = train_small(make(beta), weighting="uniform")
    correction = torch.zeros_like(w)
    for active in SCHEDULE:
        updates = []
        for i in active:
            x = w
            for _ in range(2):
                x = x - lr * client_gradient(i, x)
            updates.append(x - w)
        correction = correction + torch.stack(updates).sum(0) / len(SIZES)
        w = w + torch.stack(updates).mean(0) + correction
    torch.testing.assert_close(run.server.w, w, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(-beta * run.server["dual"], correction, rtol=1e-6, atol=1e-6)
    assert correction.abs().max() > 0.01
    assert max(run.clients.get(i)["dual"].abs().max() for i in run.clients.clients()) < 1e-8
    fedavg = train_small(ff.fedavg(), weighting="uniform").server.w
    assert (run.server.w - fedavg).abs().max() > 0.01


# -- means over all clients ---------------------------------------------------------------------------

# method: the vector whose server value is the mean of the clients'
MEANS = {
    **dict.fromkeys(["scaffold", "fedgamma", "fedlesam_s", "fednsam_s"], "control"),
    **dict.fromkeys(["feddyn", "fedspeed", "fedsmoo", "fedlesam_d"], "dual"),
    **dict.fromkeys(["fedgmt", "fedgmt_v2", "fednsam_d"], "dual"),
    "fedwmsam": "corrector",
}


def test_every_method_with_a_mean_is_checked():
    kept = {"control", "dual", "corrector"}
    methods = {name: ff.METHODS[name]().cost for name in ff.METHODS}
    assert {n for n, c in methods.items() if kept & {*c.client, *c.server_per_client}} == {*MEANS}


@pytest.mark.parametrize(("name", "vector"), MEANS.items(), ids=MEANS)
@given(rounds=st.integers(1, len(SCHEDULE)), options=any_settings())
@few
def test_server_holds_the_mean_over_all_clients(name, vector, rounds, options):
    """Clients that never took part count as zero, and nothing is stored for them."""
    run = train_small(ff.METHODS[name](), SCHEDULE[:rounds], **options)
    store = run.server.per_client if name == "fedwmsam" else run.clients
    seen = {client for active in SCHEDULE[:rounds] for client in active}
    assert set(store.clients()) == seen
    total = sum(store.get(client)[vector] for client in seen)
    assert total.abs().max() > 1e-6
    assert_same(run.server[vector], total / len(SIZES))


@pytest.mark.parametrize("name", ff.METHODS)
def test_nothing_is_kept_of_clients_never_seen(name):
    method = ff.METHODS[name]()
    run = train_small(method, SCHEDULE[:2])
    assert all(run.clients.get(client).keys() == set(method.cost.client) for client in (0, 1, 2, 3))
    assert run.clients.get(4) == {}
    assert run.server.per_client.get(4) == {}
    assert 4 not in [*run.clients.clients(), *run.server.per_client.clients()]


# -- FedSMOO's first round ----------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [10.0, None])
def test_fedsmoo_with_one_step_agrees_on_nothing_at_first(beta):
    """After one step μ_i = ŝ, so s̃_i = 0 and its direction is 0, not 0/0."""
    one_step = ff.LocalSGD(lr=0.2, steps=1, batch_size=None)
    run = train_small(ff.fedsmoo(rho=0.1, beta=beta), SCHEDULE[:1], local=one_step)
    assert run.server["perturbation"].count_nonzero() == 0
    later = train_small(ff.fedsmoo(rho=0.1, beta=beta), local=one_step)
    assert later.server.w.isfinite().all()
    assert later.server["perturbation"].norm().item() == pytest.approx(0.1)
