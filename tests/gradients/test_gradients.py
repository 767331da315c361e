"""Gradients against finite differences and plain autograd, and the flat view of a module."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from test_reference import SHAPE, network, problem
from torch import Tensor, nn
from torch.func import functional_call

import fedflat as ff
from fedflat.core.flat import cosine, inverse_norm, sgd_
from fedflat.methods.mechanism import registry

LR = 0.25
CLIENTS, W0 = problem()
X, Y = (torch.from_numpy(array) for array in CLIENTS[1])
START = torch.from_numpy(W0)
NETWORK = network(W0)
few = settings(deadline=None, max_examples=15)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def path(method: ff.Method, rounds: int, steps: int) -> list[Tensor]:
    """The models of a run with a single client and full batches, from the start on."""
    models = [START]
    ff.train(
        ff.Federation([(X, Y)]),
        network(W0),
        method,
        local=ff.LocalSGD(lr=LR, steps=steps, batch_size=None),
        rounds=rounds,
        dtype=torch.float64,
        on_round=lambda r: models.append(r.server.w.clone()),
    )
    return models


# -- the losses, written out ---------------------------------------------------------------------------


def logits(w: Tensor) -> Tensor:
    """The network's outputs at flat weights w, with nothing of the package."""
    named = dict(NETWORK.named_parameters())
    pieces = w.split([p.numel() for p in named.values()])
    values = {n: v.view(p.shape) for v, (n, p) in zip(pieces, named.items(), strict=True)}
    return functional_call(NETWORK, values, (X,))


def cross_entropy(w: Tensor) -> Tensor:
    z = logits(w)
    return (z.logsumexp(1) - z[torch.arange(len(Y)), Y]).mean()


def divergence(teacher: Tensor, student: Tensor, tau: float) -> Tensor:
    """τ² Σ_c p_c log(p_c / q_c), the mean over the batch; the teacher is a constant."""
    p, q = (teacher.detach() / tau).softmax(1), (student / tau).softmax(1)
    return tau**2 * (p * (p / q).log()).sum(1).mean()


def others(z: Tensor) -> Tensor:
    """The logits of the classes that are not the true one."""
    return torch.stack([torch.cat([row[:t], row[t + 1 :]]) for row, t in zip(z, Y, strict=True)])


def trajectory_term(w: Tensor, teacher: Tensor, gamma: float, tau: float) -> Tensor:
    return gamma * divergence(logits(teacher), logits(w), tau)


def not_true_term(w: Tensor, teacher: Tensor, gamma: float, tau: float) -> Tensor:
    return gamma * divergence(others(logits(teacher)), others(logits(w)), tau)


def autograd(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    w = w.clone().requires_grad_()
    return torch.autograd.grad(loss(w), w)[0]


def central_differences(loss: Callable[[Tensor], Tensor], w: Tensor, h: float = 1e-5) -> Tensor:
    moves = h * torch.eye(len(w), dtype=w.dtype)
    with torch.no_grad():
        return torch.stack([(loss(w + move) - loss(w - move)) / (2 * h) for move in moves])


def assert_gradient(direction: Tensor, loss: Callable[[Tensor], Tensor], w: Tensor) -> None:
    """A direction is the loss's gradient at w, and the gradient is not that of the cross-entropy alone."""
    torch.testing.assert_close(direction, central_differences(loss, w), rtol=1e-6, atol=1e-8)
    assert (direction - central_differences(cross_entropy, w)).abs().max() > 1e-4


@pytest.mark.parametrize("mechanism", [ff.TrajectoryLoss, ff.OwnTrajectoryLoss])
@pytest.mark.parametrize(("alpha", "gamma", "tau"), [(0.9, 1.3, 2.0), (0.5, 0.6, 1.0), (0.2, 1.0, 3.0)])
def test_trajectory_losses(mechanism, alpha, gamma, tau):
    """One step a round: the difference of two models is the gradient, the teacher the moving average."""
    models = path(ff.as_method(mechanism(alpha, gamma, tau)), rounds=3, steps=1)
    teacher = models[0]
    for w, following in pairwise(models[1:]):
        teacher = alpha * teacher + (1 - alpha) * w
        assert_gradient(
            (w - following) / LR,
            lambda v, e=teacher: cross_entropy(v) + trajectory_term(v, e, gamma, tau),
            w,
        )


@pytest.mark.parametrize("mechanism", [ff.TrajectoryLoss, ff.OwnTrajectoryLoss])
def test_a_loss_of_a_subclass_is_the_one_that_counts(mechanism):
    """The pull of a class is its loss's gradient, which autograd finds of the loss itself."""

    class OtherLoss(mechanism):
        weight: float = ff.number(default=1.0)

        def loss(self, step, outputs):
            ema = (step.local.received if mechanism is ff.TrajectoryLoss else step.local.state)["ema"]
            return self.weight * self.distil(step.teacher(ema, self.soften), outputs)

    try:
        known = path(ff.as_method(mechanism(0.5, 1.2, 2.0)), rounds=3, steps=2)
        found = path(ff.as_method(OtherLoss(0.5, 1.2, 2.0)), rounds=3, steps=2)
        other = path(ff.as_method(OtherLoss(0.5, 1.2, 2.0, weight=0.5)), rounds=3, steps=2)
    finally:
        del registry[OtherLoss.name]
    torch.testing.assert_close(torch.stack(known), torch.stack(found), rtol=1e-10, atol=1e-12)
    assert (known[-1] - other[-1]).abs().max() > 1e-5


@pytest.mark.parametrize(("gamma", "tau"), [(1.0, 1.0), (0.7, 2.0)])
def test_not_true_distillation(gamma, tau):
    """The second step of a round, where the model has left its teacher."""
    method = ff.as_method(ff.NotTrueDistillation(gamma, tau))
    w0, first = path(method, rounds=1, steps=1)
    _, second = path(method, rounds=1, steps=2)
    torch.testing.assert_close((w0 - first) / LR, autograd(cross_entropy, w0), rtol=1e-10, atol=1e-12)
    assert_gradient(
        (first - second) / LR, lambda v: cross_entropy(v) + not_true_term(v, w0, gamma, tau), first
    )


@given(
    rho=st.floats(0.01, 0.5),
    gammas=st.tuples(st.floats(0.1, 2), st.floats(0.1, 2)),
    taus=st.tuples(st.floats(0.5, 4), st.floats(0.5, 4)),
    alpha=st.floats(0, 0.9),
)
@few
def test_composed_step_is_the_formula(rho, gammas, taus, alpha):
    """LocalAscent + TrajectoryLoss + NotTrueDistillation: both gradients of SAM see both extra losses."""
    mechanisms = [
        ff.LocalAscent(rho),
        ff.TrajectoryLoss(alpha, gammas[0], taus[0]),
        ff.NotTrueDistillation(gammas[1], taus[1]),
    ]
    w0, w1, w2 = path(ff.Method("all three", mechanisms), rounds=2, steps=1)
    average = alpha * w0 + (1 - alpha) * w1

    def loss(v: Tensor) -> Tensor:
        return (
            cross_entropy(v)
            + trajectory_term(v, average, gammas[0], taus[0])
            + not_true_term(v, w1, gammas[1], taus[1])
        )

    uphill = autograd(loss, w1)
    expected = autograd(loss, w1 + rho * uphill / uphill.norm())
    torch.testing.assert_close((w1 - w2) / LR, expected, rtol=1e-9, atol=1e-11)


def test_composed_rounds_with_corrections_are_the_formula():
    """Extrapolation, ascent from there, duals and two pulls, and a server that corrects and then accumulates."""
    momentum, rho, beta, mu = 0.6, 0.2, 4.0, 0.3
    mechanisms = [
        ff.DynamicRegulariser(beta),
        ff.NesterovMomentum(momentum),
        ff.LocalAscent(rho),
        ff.Proximal(mu),
    ]
    w = START
    m = dual = torch.zeros_like(w)
    for trained in path(ff.Method("corrected", mechanisms), rounds=3, steps=2)[1:]:
        x = w
        for _ in range(2):
            ahead = x + momentum * m
            uphill = autograd(cross_entropy, ahead)
            d = autograd(cross_entropy, ahead + rho * uphill / uphill.norm())
            x = x - LR * (d - dual + (1 / beta + mu) * (x - w))
        dual = dual - (x - w) / beta
        m = momentum * m + (x - w) - beta * dual
        w = w + m
        torch.testing.assert_close(trained, w, rtol=1e-10, atol=1e-12)


# -- the flat model ------------------------------------------------------------------------------------


def small(dtype: torch.dtype = torch.float64) -> ff.FlatModel:
    return ff.FlatModel(network(W0), dtype)


def batch_loss(module: nn.Module) -> Tensor:
    return F.cross_entropy(module(X.to(next(module.parameters()).dtype)), Y)


@dtypes
def test_parameters_are_views(dtype):
    flat = small(dtype)
    assert flat.vector.dtype == dtype
    assert flat.size == sum(p.numel() for p in flat.module.parameters())
    torch.testing.assert_close(flat.vector, START.to(dtype), rtol=0, atol=0)
    flat.vector.copy_(torch.arange(flat.size))
    read = torch.cat([p.detach().reshape(-1) for p in flat.module.parameters()])
    torch.testing.assert_close(read, torch.arange(flat.size).to(dtype))
    for p in flat.module.parameters():
        assert p.untyped_storage().data_ptr() == flat.vector.untyped_storage().data_ptr()
        assert p.grad is None
    with torch.no_grad():
        flat.module[0].bias.fill_(-1)
    assert (flat.vector == -1).sum() == SHAPE[1]


@dtypes
def test_the_flat_gradient_is_what_backward_finds(dtype):
    flat = small(dtype)
    gradient = flat.gradient(batch_loss)
    torch.testing.assert_close(gradient.double(), autograd(cross_entropy, START), rtol=1e-4, atol=1e-6)
    batch_loss(flat.module).backward()
    assert torch.equal(gradient, torch.cat([p.grad.reshape(-1) for p in flat.parameters]))


@given(offset=hnp.arrays(float, len(START), elements=st.floats(-2, 2)))
@few
def test_gradient_elsewhere_is_autograds(offset):
    flat, point = small(), START + torch.from_numpy(offset)
    before = flat.vector.clone()
    gradient = flat.gradient(batch_loss, at=point)
    torch.testing.assert_close(gradient, autograd(cross_entropy, point), rtol=1e-10, atol=1e-12)
    assert torch.equal(flat.vector, before)


class Interrupted(Exception):
    pass


@dtypes
@pytest.mark.parametrize("fails", [False, True])
def test_at_restores_every_bit(dtype, fails):
    flat = small(dtype)
    flat.vector[:4] = torch.tensor([1e-30, -0.0, 3e30, torch.pi])  # adding and subtracting would lose these
    before, point = flat.vector.clone(), torch.full_like(flat.vector, 1.5)

    def visit() -> None:
        with flat.at(point) as module:
            assert all((p == 1.5).all() for p in module.parameters())
            if fails:
                raise Interrupted

    if fails:
        with pytest.raises(Interrupted):
            visit()
    else:
        visit()
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    assert torch.equal(flat.vector.view(bits), before.view(bits))
    assert (point == 1.5).all()


def test_at_itself_and_nowhere():
    flat = small()
    before = flat.vector.clone()
    with flat.at(flat.vector):
        assert torch.equal(flat.vector, before)
    with flat.at(None):
        assert torch.equal(flat.vector, before)
    assert torch.equal(flat.vector, before)


def test_nested_points_return_one_by_one():
    flat = small()
    before = flat.vector.clone()
    with flat.at(torch.ones_like(before)):
        with flat.at(torch.zeros_like(before)):
            assert (flat.vector == 0).all()
        assert (flat.vector == 1).all()
    assert torch.equal(flat.vector, before)


class Odd(nn.Module):
    """An unused, a frozen and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.frozen)


def test_unused_frozen_and_tied_parameters():
    torch.manual_seed(0)
    module = Odd()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    flat = ff.FlatModel(module, torch.float64)
    assert flat.layout.names == ("unused", "first.weight", "first.bias", "second.bias")
    assert flat.size == 2 + 9 + 3 + 3

    def by_hand(v: Tensor) -> Tensor:
        weight, b1, b2 = v[2:11].view(3, 3), v[11:14], v[14:17]
        return F.cross_entropy((torch.tanh(x @ weight.T + b1) * 0.5) @ weight.T + b2, y)

    point = flat.vector + 0.1
    for at in (None, point):
        expected = autograd(by_hand, flat.vector if at is None else at)
        gradient = flat.gradient(lambda m: F.cross_entropy(m(x), y), at=at)
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
        assert (gradient[:2] == 0).all()
    flat.vector.zero_()
    assert module.second.weight is module.first.weight
    assert (module.second.weight == 0).all()
    assert (module.frozen == 0.5).all()


def test_training_leaves_frozen_parameters_and_ties_alone():
    torch.manual_seed(0)
    x, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    run = ff.train(
        ff.Federation([(x, y)]), Odd(), "local-ascent + trajectory-loss + not-true-distillation", rounds=3
    )
    trained = run.model
    assert isinstance(trained, Odd)
    assert (trained.frozen == 0.5).all()
    assert (trained.unused == 1).all()
    assert trained.second.weight is trained.first.weight
    torch.manual_seed(0)
    torch.randn(6, 3)
    assert (trained.first.weight - Odd().first.weight).abs().max() > 1e-3


def test_the_teacher_of_a_tied_module_is_tied():
    """Outputs at other weights must use them in both places of the tied tensor."""
    torch.manual_seed(0)
    module = Odd().double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    models = []
    ff.train(
        ff.Federation([(x, y)]),
        module,
        ff.fedgmt(alpha=0.5, beta=None, gamma=2.0, tau=1.5),
        local=ff.LocalSGD(lr=LR, steps=1, batch_size=None),
        rounds=2,
        dtype=torch.float64,
        on_round=lambda r: models.append(r.server.w.clone()),
    )
    w0 = torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])
    w1, w2 = models

    def outputs(v: Tensor) -> Tensor:
        weight, b1, b2 = v[2:11].view(3, 3), v[11:14], v[14:17]
        return (torch.tanh(x @ weight.T + b1) * 0.5) @ weight.T + b2

    def loss(v: Tensor) -> Tensor:
        return F.cross_entropy(outputs(v), y) + 2 * divergence(outputs((w0 + w1) / 2), outputs(v), 1.5)

    torch.testing.assert_close((w1 - w2) / LR, autograd(loss, w1), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)])
def test_nothing_to_train_is_an_error(module):
    with pytest.raises(ff.FedflatError, match=rf"{type(module).__name__} has no trainable parameters"):
        ff.FlatModel(module)


def test_mask_chooses_whole_parameters():
    flat = small()
    mask = flat.layout.mask(lambda name: name.endswith("bias"))
    assert mask.sum() == SHAPE[1] + SHAPE[2]
    assert (flat.layout.named(mask)["0.bias"] == 1).all()
    assert (flat.layout.named(mask)["2.weight"] == 0).all()


# -- directions ----------------------------------------------------------------------------------------


@dtypes
def test_zero_has_no_direction(dtype):
    zero = torch.zeros(5, dtype=dtype)
    assert inverse_norm(zero) == 0
    assert torch.equal(zero * inverse_norm(zero), zero)
    assert inverse_norm(torch.full_like(zero, 1e-14)) == 0
    assert cosine(zero, torch.ones_like(zero)) is None
    assert cosine(torch.ones_like(zero), zero) is None


@given(
    vector=hnp.arrays(float, 5, elements=st.floats(-10, 10)).filter(lambda v: abs(v).max() > 1e-3),
    length=st.floats(1e-6, 1e6),
)
@few
def test_directions_have_length_one(vector, length):
    v = torch.from_numpy(vector)
    assert (v * length * inverse_norm(v * length)).norm().item() == pytest.approx(1)
    assert cosine(v, v * length) == pytest.approx(1)
    assert cosine(v, -v * length) == pytest.approx(-1)


# -- steps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [None, 0.7])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_step_of_sgd_is_its_formula(momentum, decay, nesterov):
    w, d = torch.tensor([1.0, -3.0, 0.25]), torch.tensor([0.2, 0.4, -8.0])
    kept, expected, mu = (
        None if momentum is None else [torch.full((3,), torch.nan)],
        w.clone(),
        momentum or 0.0,
    )
    b = torch.zeros(3)
    for index in range(3):
        along = d + decay * expected
        b = mu * b + along
        expected = expected - 0.1 * (along + mu * b if nesterov else b)
        sgd_([w], [d.clone()], kept, mu, decay, 0.1, nesterov and mu > 0, first=index == 0)
        torch.testing.assert_close(w, expected, rtol=1e-6, atol=1e-6)


class Twice(nn.Module):
    """Two parameters that autograd gives the very same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.weight_too = (nn.Parameter(torch.tensor([[0.5, -2.0, 1.0]]) * n) for n in (1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.weight + self.weight_too)


def test_an_adaptive_ascent_where_parameters_share_a_gradient():
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    model = Twice().double()
    w = torch.cat([p.detach().flatten() for p in model.parameters()])

    def gradient(at: torch.Tensor) -> torch.Tensor:
        at = at.clone().requires_grad_()
        return torch.autograd.grad(F.mse_loss(x * (at[:3] + at[3:]), y), at)[0]

    scale, g = w.abs() + 0.2, gradient(w)
    expected = w - 0.1 * gradient(w + 0.7 * scale**2 * g / (scale * g).norm())
    run = ff.train(
        ff.Federation([(x, y)]),
        model,
        ff.fedasam(rho=0.7, eta=0.2),
        local=ff.LocalSGD(lr=0.1, steps=1, batch_size=None),
        rounds=1,
        loss=F.mse_loss,
        dtype=torch.float64,
    )
    torch.testing.assert_close(run.server.w, expected)
