"""Measures of flatness against truth: closed forms on quadratic losses, dense Hessians of small networks."""

import copy
import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

import fedflat as ff
from fedflat.core.flat import FlatModel, inverse_norm
from fedflat.flatness import surface as surfaces
from fedflat.flatness.directions import signs, unit
from fedflat.flatness.eigenvalues import hessian_eigenpairs
from fedflat.flatness.estimate import student
from fedflat.flatness.local_round import local_round
from fedflat.models.cnn import cnn
from fedflat.models.conv.conv2d import Conv2d
from fedflat.models.fasttext import FastText
from fedflat.models.resnet import resnet

SIZES = (260, 300, 40)
"""samples of the clients: a chunk, one and a bit, and a fraction of one"""
dtypes = pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, 3e-5), (torch.float64, 1e-11)])


def close(found: float, expected: float, tolerance: float) -> None:
    assert found == pytest.approx(expected, rel=tolerance, abs=tolerance)


# -- a quadratic loss, and its closed forms ------------------------------------------------------------


def quadratic_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """`½ s z² − t z`, the mean over the samples, for outputs z and targets (s, t)."""
    s, t = targets.unbind(1)
    z = outputs[:, 0]
    return (0.5 * s * z**2 - t * z).mean()


class Quadratic:
    """`L(w) = ½ wᵀHw − bᵀw` over all samples and over each client's; `H = Σ s x xᵀ / N`, `b = Σ t x / N`."""

    def __init__(self, dtype: torch.dtype = torch.float64, size: int = 12, definite: bool = True) -> None:
        rng = np.random.default_rng(7)
        scales = np.linspace(0.1, 2.0, size)
        x = rng.standard_normal((sum(SIZES), size)) * scales
        x[: SIZES[0]] += 0.5  # clients differ
        s = np.ones(len(x)) if definite else np.where(rng.random(len(x)) < 0.6, 1.0, -1.0)
        y = np.stack([s, rng.standard_normal(len(x)) + 1], axis=1)
        w = rng.standard_normal(size)
        x, y, w = (torch.tensor(array, dtype=dtype) for array in (x, y, w))
        ends = np.cumsum(SIZES)[:-1].tolist()
        parts = list(zip(x.tensor_split(ends), y.tensor_split(ends), strict=True))
        self.federation = ff.Federation(parts, test=parts[2])
        self.model = nn.Linear(size, 1, bias=False, dtype=dtype)
        self.model.weight.data[0] = w
        x, y, self.w = x.double(), y.double(), w.double()
        pieces = [(x, y), *((a.double(), b.double()) for a, b in parts)]
        self.hessians = [a.T @ (b[:, :1] * a) / len(a) for a, b in pieces]
        self.slopes = [a.T @ b[:, 1] / len(a) for a, b in pieces]
        self.hessian = self.hessians[0]
        self.eigenvalues = torch.linalg.eigvalsh(self.hessian)

    def gradient(self, w: Tensor, part: int = 0) -> Tensor:
        """Part 0 is the whole, part i + 1 client i."""
        return self.hessians[part] @ w - self.slopes[part]

    def value(self, w: Tensor, part: int = 0) -> float:
        return (0.5 * w @ self.hessians[part] @ w - self.slopes[part] @ w).item()

    def sharpness(self, rho: float, w: Tensor | None = None, part: int = 0) -> float:
        """`ρ‖g‖ + ½ρ² nᵀHn`."""
        g = self.gradient(self.w if w is None else w, part)
        n = g * inverse_norm(g)
        return (rho * g.norm() + 0.5 * rho**2 * n @ self.hessians[part] @ n).item()

    def worst_case(self, rho: float) -> float:
        """The maximum over the ball: `δ = (μ − H)⁻¹ g` with `μ > λ_max` such that ‖δ‖ = ρ (Moré & Sorensen 1983)."""
        values, vectors = torch.linalg.eigh(self.hessian)
        g = vectors.T @ self.gradient(self.w)
        low, high = values[-1].item(), values[-1].item() + g.norm().item() / rho + 1
        for _ in range(200):
            mu = (low + high) / 2
            low, high = (mu, high) if (g / (mu - values)).norm() > rho else (low, mu)
        shift = g / (high - values)
        return (g @ shift + 0.5 * (values * shift**2).sum()).item()


@dtypes
def test_value_gradient_and_hessian_of_a_quadratic(dtype, exact):
    q = Quadratic(dtype)
    surface = ff.Surface(q.model, q.federation, quadratic_loss)
    value, gradient = surface.value_and_gradient()
    close(value, q.value(q.w), exact)
    close(surface.value(), q.value(q.w), exact)
    torch.testing.assert_close(gradient.double(), q.gradient(q.w), rtol=exact, atol=exact)
    rows = torch.eye(len(q.w), dtype=dtype)
    torch.testing.assert_close(surface.hessian_times(rows).double(), q.hessian, rtol=exact, atol=exact)


@dtypes
def test_sharpness_of_all_of_the_test_set_and_at_another_point(dtype, exact):
    q = Quadratic(dtype)
    measured = ff.sharpness(q.model, q.federation, 0.3, loss=quadratic_loss)
    close(measured, q.sharpness(0.3), exact)
    assert measured == ff.sharpness(q.model, q.federation.union(), 0.3, loss=quadratic_loss)
    close(ff.sharpness(q.model, q.federation.test, 0.3, loss=quadratic_loss), q.sharpness(0.3, part=3), exact)
    other = q.w.flip(0)
    found = ff.sharpness(q.model, q.federation, 0.3, other, quadratic_loss)
    close(found, q.sharpness(0.3, other), exact)


@dtypes
def test_client_sharpness(dtype, exact):
    q = Quadratic(dtype)
    found = ff.client_sharpness(q.model, q.federation, 0.3, loss=quadratic_loss)
    each = [q.sharpness(0.3, part=part) for part in (1, 2, 3)]
    assert found.clients == (0, 1, 2)
    assert found.values == pytest.approx(each, rel=exact, abs=exact)
    close(found.mean, np.average(each, weights=SIZES), exact)
    close(
        found.std, math.sqrt(np.average((each - np.average(each, weights=SIZES)) ** 2, weights=SIZES)), exact
    )
    assert found.largest == max(found.values)
    some = ff.client_sharpness(q.model, q.federation, 0.3, clients=[2], loss=quadratic_loss)
    assert some.values == found.values[2:] and some.mean == found.values[2] and some.std == 0


@pytest.mark.parametrize("definite", [True, False])
@pytest.mark.parametrize("rho", [0.05, 1.0, 5.0])
def test_worst_case_is_the_maximum_over_the_ball(definite, rho):
    q = Quadratic(definite=definite)
    found = ff.worst_case_sharpness(q.model, q.federation, rho, steps=60, loss=quadratic_loss)
    close(found.sharpness, q.worst_case(rho), 1e-6)
    close(found.by_step[0], q.sharpness(rho), 1e-11)
    assert len(found.by_step) == 60 and list(found.by_step) == sorted(found.by_step)
    quick = ff.worst_case_sharpness(q.model, q.federation, rho, loss=quadratic_loss)
    close(quick.sharpness, q.worst_case(rho), 0.02)
    assert quick.by_step == found.by_step[:10]


def test_worst_case_at_the_minimum_starts_at_random():
    q = Quadratic()
    minimum = torch.linalg.solve(q.hessian, q.slopes[0])
    centred = lambda outputs, targets: 0.5 * (targets[:, 0] * outputs[:, 0] ** 2).mean()  # noqa: E731
    found = ff.worst_case_sharpness(
        q.model, q.federation, 0.5, steps=100, restarts=2, at=0 * minimum, loss=centred
    )
    close(found.sharpness, 0.5 * 0.5**2 * q.eigenvalues[-1].item(), 1e-6)
    assert ff.sharpness(q.model, q.federation, 0.5, 0 * minimum, centred) == 0


def test_worst_case_in_single_precision():
    q = Quadratic(torch.float32)
    found = ff.worst_case_sharpness(q.model, q.federation, 1.0, steps=30, loss=quadratic_loss)
    close(found.sharpness, q.worst_case(1.0), 1e-4)


@dtypes
@pytest.mark.parametrize("definite", [True, False])
def test_eigenvalues_of_a_quadratic(dtype, exact, definite):
    q = Quadratic(dtype, 40, definite)
    expected = q.eigenvalues.flip(0)[:5].tolist()
    found = ff.hessian_eigenvalues(q.model, q.federation, 5, 1e-6, loss=quadratic_loss)
    assert found.values == pytest.approx(expected, rel=max(1e-6, exact))
    assert found.largest == found.values[0]
    assert all(r <= max(1e-4, exact) for r in found.residuals)
    rough = ff.hessian_eigenvalues(q.model, q.federation, 5, loss=quadratic_loss)
    assert rough.values == pytest.approx(expected, rel=1e-3)
    assert rough.products <= found.products
    truth = q.eigenvalues.numpy()
    for value, residual in zip(rough.values, rough.residuals, strict=True):
        assert np.abs(truth - value).min() <= residual + 1e-5


def test_eigenvectors_are_unit_and_orthogonal():
    q = Quadratic(size=40)
    surface = ff.Surface(q.model, q.federation, quadratic_loss)
    found, vectors = hessian_eigenpairs(surface, 3, 1e-10)
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(
        vectors @ q.hessian @ vectors.T, torch.diag(torch.tensor(found.values, dtype=torch.float64))
    )


def test_trace_of_a_quadratic():
    q = Quadratic(size=40)
    trace = q.hessian.trace().item()
    plain = ff.hessian_trace(q.model, q.federation, 30, "hutchinson", loss=quadratic_loss)
    surface = ff.Surface(q.model, q.federation, quadratic_loss)
    draws = [z @ q.hessian @ z for z in (signs(surface, 0, "trace", number) for number in range(30))]
    close(plain.value, float(np.mean(draws)), 1e-11)
    half = student(0.95, 29) * np.std(draws, ddof=1) / math.sqrt(30)
    close(plain.high - plain.low, 2 * half, 1e-11)
    usual, wide = (
        ff.hessian_trace(q.model, q.federation, 30, confidence=c, loss=quadratic_loss) for c in (0.95, 0.999)
    )
    assert usual.value == wide.value
    assert wide.low < usual.low and wide.low <= trace <= wide.high


@dtypes
def test_trace_is_exact_where_the_basis_reaches(dtype, exact):
    q = Quadratic(dtype, size=8)
    found = ff.hessian_trace(q.model, q.federation, 30, loss=quadratic_loss)
    close(found.value, q.hessian.trace().item(), exact)
    close(found.high - found.low, 0, 10 * exact)


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_the_trace_s_interval_covers(method):
    q = Quadratic(size=40)
    trace, hits, seeds = q.hessians[3].trace().item(), 0, 200
    for seed in range(seeds):
        found = ff.hessian_trace(q.model, q.federation.test, 12, method, 0.9, seed, loss=quadratic_loss)
        hits += found.low <= trace <= found.high
    assert 0.84 <= hits / seeds <= 0.96


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("definite", [True, False])
def test_moments_of_the_density(dtype, exact, definite):
    q = Quadratic(dtype, 40, definite)
    found = ff.spectral_density(q.model, q.federation, steps=12, probes=6, loss=quadratic_loss)
    surface = ff.Surface(q.model, q.federation, quadratic_loss)
    probes = torch.stack([signs(surface, 0, "density", number) for number in range(6)]).double()
    for power in range(8):
        forms = (probes * (probes @ torch.linalg.matrix_power(q.hessian, power))).sum(1)
        close(found.moment(power).value, forms.mean().item() / 40, exact)
    trace = ff.hessian_trace(q.model, q.federation, 60, loss=quadratic_loss)
    assert found.moment(1, 0.999).low * 40 <= trace.value <= found.moment(1, 0.999).high * 40
    close(found.largest, q.eigenvalues[-1].item(), 1e-2)
    assert found.size == 40 and len(found.nodes) == 6 and all(len(nodes) == 12 for nodes in found.nodes)


def test_the_whole_density_after_as_many_steps_as_eigenvalues():
    q = Quadratic(definite=False)
    found = ff.spectral_density(q.model, q.federation, steps=50, probes=40, loss=quadratic_loss)
    for nodes in found.nodes:
        assert nodes == pytest.approx(q.eigenvalues.tolist(), abs=1e-6)
    negative = (q.eigenvalues < 0).double().mean().item()
    share = found.fraction(high=0, confidence=0.999)
    assert share.low <= negative <= share.high
    close(found.fraction().value, 1, 1e-12)
    grid, density = found.curve(points=4000)
    close(np.trapezoid(density, grid), 1, 1e-6)
    close(np.trapezoid(density * grid, grid), found.moment(1).value, 1e-6)


def test_a_loss_without_curvature():
    def linear(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] * targets[:, 1]).mean()

    q = Quadratic()
    found = ff.spectral_density(q.model, q.federation, loss=linear)
    assert found.nodes == ((0.0,),) * 5 and found.largest == found.smallest == 0
    assert np.isfinite(found.curve()[1]).all()
    trace = ff.hessian_trace(q.model, q.federation, loss=linear)
    assert trace.value == trace.low == trace.high == 0
    assert ff.hessian_eigenvalues(q.model, q.federation, 2, loss=linear).values == (0, 0)


def test_eigenvalues_of_a_model_that_diverged():
    q = Quadratic()
    with pytest.raises(ff.FedflatError, match="diverged"):
        ff.hessian_eigenvalues(
            q.model, q.federation, at=q.w * math.nan, loss=lambda z, y: (y[:, 0] * z[:, 0] ** 4).mean()
        )


@dtypes
@pytest.mark.parametrize("antithetic", [False, True])
def test_low_pass_of_a_quadratic(dtype, exact, antithetic):
    q = Quadratic(dtype)
    sigma, trace = 0.1, q.hessian.trace().item()
    settings = {"sigma": sigma, "antithetic": antithetic, "loss": quadratic_loss}
    found = ff.low_pass(q.model, q.federation, draws=400, confidence=0.99, **settings)
    assert found.rise.low <= 0.5 * sigma**2 * trace <= found.rise.high
    close(found.loss, q.value(q.w), exact)
    close(found.filtered.value, found.loss + found.rise.value, exact)
    assert found.filtered.draws == (200 if antithetic else 400)


def test_antithetic_draws_are_exact_but_for_the_curvature():
    q = Quadratic()
    plain, paired = (
        ff.low_pass(q.model, q.federation, antithetic=pairs, loss=quadratic_loss).rise
        for pairs in (False, True)
    )
    assert paired.high - paired.low < 0.1 * (plain.high - plain.low)


def test_the_low_pass_interval_covers():
    q = Quadratic()
    expected, hits, seeds = 0.5 * 0.2**2 * q.hessians[3].trace().item(), 0, 200
    for seed in range(seeds):
        found = ff.low_pass(
            q.model, q.federation.test, 0.2, 20, confidence=0.9, seed=seed, loss=quadratic_loss
        ).rise
        hits += found.low <= expected <= found.high
    assert 0.84 <= hits / seeds <= 0.96


@dtypes
def test_loss_along_the_radius_of_a_quadratic(dtype, exact):
    q = Quadratic(dtype)
    found = ff.loss_along_radius(q.model, q.federation, (0, 0.5, 2), 30, loss=quadratic_loss)
    assert found.radii == (0.0, 0.5, 2.0)
    surface = ff.Surface(q.model, q.federation, quadratic_loss)
    rays = [unit(surface, 0, "radius", number).double() for number in range(30)]
    uphill = q.gradient(q.w) * inverse_norm(q.gradient(q.w))
    for r, mean, along in zip(found.radii, found.random, found.gradient, strict=True):
        close(mean.value, float(np.mean([q.value(q.w + r * ray) for ray in rays])), exact)
        close(along, q.value(q.w + r * uphill), exact)
        expected = q.value(q.w) + 0.5 * r**2 * q.hessian.trace().item() / len(q.w)
        assert mean.low - exact <= expected <= mean.high + exact


# -- clients -------------------------------------------------------------------------------------------


def brute_force(updates: Tensor) -> tuple[float, float, float]:
    """Diversity, mean cosine of pairs, mean cosine to the sum."""
    total = updates.sum(0)
    pairs = [
        F.cosine_similarity(a, b, 0) for i, a in enumerate(updates) for j, b in enumerate(updates) if i != j
    ]
    to_mean = [F.cosine_similarity(a, total, 0) for a in updates]
    return ((updates**2).sum() / (total**2).sum()).item(), float(np.mean(pairs)), float(np.mean(to_mean))


@dtypes
def test_sums_of_updates_give_distance_and_drift(dtype, exact):
    torch.manual_seed(0)
    updates = torch.randn(7, 50, dtype=dtype) * torch.rand(7, 1, dtype=dtype) + 0.3
    start, w = torch.randn(2, 50, dtype=dtype)
    sums = ff.UpdateSums()
    for update in updates:
        sums.add(update)
    updates, start, w = updates.double(), start.double(), w.double()
    expected = ((start + updates - w) ** 2).sum(1).mean().item()
    close(sums.distance_to(start.to(dtype), w.to(dtype)), expected, exact)
    close(sums.distance(), updates.var(0, correction=0).sum().item(), exact)
    drift = sums.drift()
    diversity, cosine, to_mean = brute_force(updates)
    close(drift.diversity, diversity, exact)
    close(drift.cosine, cosine, exact)
    close(drift.cosine_to_mean, to_mean, exact)
    close(drift.norm, (updates**2).sum(1).mean().sqrt().item(), exact)
    assert drift.clients == 7


def test_drift_where_there_is_no_direction():
    sums = ff.UpdateSums()
    sums.add(torch.zeros(3))
    assert sums.drift() == ff.Drift(None, None, None, 0.0, 1)
    sums.add(torch.ones(3))
    close(sums.drift().diversity, 1, 1e-6)
    assert sums.drift().cosine is None and sums.drift().cosine_to_mean == pytest.approx(1)
    sums.add(-torch.ones(3))
    assert sums.drift().diversity is None and sums.drift().cosine == pytest.approx(-1)
    alike = ff.UpdateSums()
    for _ in range(4):
        alike.add(torch.ones(3))
    assert alike.drift().diversity == pytest.approx(0.25) and alike.drift().cosine == pytest.approx(1)
    assert alike.distance() == pytest.approx(0, abs=1e-6)
    assert alike.distance_to(torch.zeros(3), torch.ones(3)) == pytest.approx(0, abs=1e-6)


@dtypes
def test_drift_of_the_clients_gradients(dtype, exact):
    q = Quadratic(dtype)
    found = ff.gradient_drift(q.model, q.federation, loss=quadratic_loss)
    expected = brute_force(torch.stack([q.gradient(q.w, part) for part in (1, 2, 3)]))
    assert (found.diversity, found.cosine, found.cosine_to_mean) == pytest.approx(expected, rel=exact)
    assert ff.gradient_drift(q.model, q.federation, [0, 2], loss=quadratic_loss).clients == 2


def local_models(q: Quadratic, lr: float, steps: int) -> list[Tensor]:
    """What full-batch gradient descent leads the clients to."""
    results = []
    for part in (1, 2, 3):
        w = q.w.clone()
        for _ in range(steps):
            w = w - lr * q.gradient(w, part)
        results.append(w)
    return results


@dtypes
def test_flatness_distance_of_a_round(dtype, exact):
    q = Quadratic(dtype)
    sgd = ff.LocalSGD(lr=0.1, steps=3, batch_size=None)
    ends = torch.stack(local_models(q, 0.1, 3))
    expected = ((ends - ends.mean(0)) ** 2).sum(1).mean().item()
    plain = ff.flatness_distance(q.model, q.federation, sgd, weighting="uniform", loss=quadratic_loss)
    close(plain.distance, expected, exact)
    close(plain.to_server, expected, exact)
    dual = ff.flatness_distance(q.model, q.federation, sgd, ff.fedavg(server_lr=2.0), loss=quadratic_loss)
    far = q.w + 2 * ((torch.tensor(SIZES).double() / sum(SIZES)) @ ends - q.w)
    close(dual.distance, expected, exact)
    close(dual.to_server, ((ends - far) ** 2).sum(1).mean().item(), exact)


@pytest.mark.parametrize("method", ["fedacg", "feddyn", "fednsam"])
def test_a_round_by_itself_is_the_first_of_a_run(method):
    q = Quadratic()
    sgd = ff.LocalSGD(lr=0.1, epochs=2, batch_size=50)
    kept: list[Tensor] = []
    ff.train(
        q.federation,
        q.model,
        method,
        sgd,
        rounds=1,
        dtype=torch.float64,
        loss=quadratic_loss,
        on_round=lambda r: kept.append(r.server.w.clone()),
    )
    server, uploads = local_round(q.model, q.federation, sgd, method, loss=quadratic_loss)
    assert [upload.client for upload in uploads] == [0, 1, 2]
    server.close()
    assert torch.equal(server.w, kept[0])


@dtypes
def test_flatness_discrepancy(dtype, exact):
    q = Quadratic(dtype)
    sgd = ff.LocalSGD(lr=0.1, steps=3, batch_size=None)
    ends = local_models(q, 0.1, 3)
    each = [q.sharpness(0.2, w, part) for part, w in enumerate(ends, 1)]
    found = ff.flatness_discrepancy(q.model, q.federation, 0.2, sgd, loss=quadratic_loss)
    close(found.global_sharpness, q.sharpness(0.2), exact)
    assert found.local_sharpness.values == pytest.approx(each, rel=exact, abs=exact)
    close(found.discrepancy, abs(q.sharpness(0.2) - np.average(each, weights=SIZES)), exact)
    known = [ff.LocalModel(client, w.to(dtype)) for client, w in enumerate(ends)]
    again = ff.flatness_discrepancy(q.model, q.federation, 0.2, local_models=known, loss=quadratic_loss)
    close(again.discrepancy, found.discrepancy, exact)


def test_loss_change_of_a_round():
    q = Quadratic()
    after = q.w * 0.9
    found = ff.round_loss_change(q.model, q.federation, q.w, after, [0, 2], quadratic_loss)
    changes = [q.value(q.w, part) - q.value(after, part) for part in (1, 3)]
    close(found, np.average(changes, weights=[SIZES[0], SIZES[2]]), 1e-11)


# -- networks ------------------------------------------------------------------------------------------


def images(
    samples: int, shape: tuple[int, ...], classes: int = 4, dtype: torch.dtype = torch.float64
) -> ff.Federation:
    rng = torch.Generator().manual_seed(5)
    x = torch.randn(samples, *shape, generator=rng, dtype=torch.float64).to(dtype)
    y = torch.randint(0, classes, (samples,), generator=rng)
    return ff.Federation([(x[i::3], y[i::3]) for i in range(3)], test=(x[:20], y[:20]), classes=classes)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    """With normalisation whose statistics are not those of a batch, and dropout; in training mode."""
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 4)
    ).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
        for _ in range(3):
            module(torch.randn(30, 5, dtype=dtype) + 1)
    return module


def dense_hessian(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """By torch.func, one entry after the other."""
    module = copy.deepcopy(module).eval()
    names = [name for name, _ in module.named_parameters()]
    shapes = [p.shape for p in module.parameters()]
    w = torch.cat([p.detach().reshape(-1) for p in module.parameters()])

    def loss(w: Tensor) -> Tensor:
        pieces = w.split([math.prod(shape) for shape in shapes])
        named = {n: piece.view(shape) for n, piece, shape in zip(names, pieces, shapes, strict=True)}
        return F.cross_entropy(functional_call(module, named, (x,)), y)

    return torch.func.hessian(loss)(w)


@dtypes
def test_the_hessian_of_a_network(dtype, exact):
    federation, module = images(600, (5,), dtype=dtype), network(dtype)
    union = federation.union()
    expected = dense_hessian(copy.deepcopy(module).double(), union.inputs.double(), union.targets)
    surface = ff.Surface(module, federation)
    found = surface.hessian_times(torch.eye(surface.size, dtype=dtype)).double()
    torch.testing.assert_close(found, expected, rtol=exact, atol=exact)
    values = torch.linalg.eigvalsh(expected)
    top = ff.hessian_eigenvalues(module, federation, 5, 1e-7)
    assert top.values == pytest.approx(values.flip(0)[:5].tolist(), rel=max(1e-6, 10 * exact))
    assert ff.hessian_eigenvalues(module, federation).largest == pytest.approx(values[-1].item(), rel=1e-3)
    trace = expected.trace().item()
    plain, better = (ff.hessian_trace(module, federation, 60, m, 0.999) for m in ("hutchinson", "hutch++"))
    assert plain.low <= trace <= plain.high and better.low - exact <= trace <= better.high + exact
    assert better.high - better.low < 0.7 * (plain.high - plain.low)
    density = ff.spectral_density(module, federation, steps=40, probes=8)
    for power in (1, 2, 3):
        moment = density.moment(power, 0.999)
        assert moment.low - exact <= (values**power).mean().item() <= moment.high + exact
    close(density.largest, values[-1].item(), 1e-4)
    close(density.smallest, values[0].item(), 1e-4)
    rise = ff.low_pass(module, federation, 0.002, 400, antithetic=True, confidence=0.99).rise
    assert rise.low - 2e-7 <= 0.5 * 0.002**2 * trace <= rise.high + 2e-7


def test_sharpness_of_a_network_by_hand():
    federation, module = images(600, (5,)), network()
    union = federation.union()
    own = copy.deepcopy(module).eval()
    before = F.cross_entropy(own(union.inputs), union.targets)
    before.backward()
    norm = torch.stack([p.grad.norm() for p in own.parameters()]).norm()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(parameter.grad, alpha=0.1 / norm.item())
        after = F.cross_entropy(own(union.inputs), union.targets)
    close(ff.sharpness(module, federation, 0.1), (after - before).item(), 1e-12)
    assert ff.worst_case_sharpness(module, federation, 0.1).sharpness > (after - before).item()


def test_chunks_do_not_matter(monkeypatch):
    federation, module = images(100, (5,)), network()
    whole = ff.Surface(module, federation)
    rows = torch.randn(2, whole.size, dtype=torch.float64)
    products, (value, gradient) = whole.hessian_times(rows), whole.value_and_gradient()
    monkeypatch.setattr(surfaces, "CHUNK", 7)
    torch.testing.assert_close(whole.hessian_times(rows), products, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(whole.value_and_gradient()[1], gradient, rtol=1e-12, atol=1e-13)
    close(whole.value(), value, 1e-13)


def plain(module: nn.Module) -> nn.Module:
    """The same module with PyTorch's own convolutions."""
    module = copy.deepcopy(module)
    for child in module.modules():
        if isinstance(child, Conv2d):
            child.__class__ = nn.Conv2d
    return module


@pytest.mark.parametrize(
    ("shape", "build"),
    [((3, 16, 16), cnn), ((3, 8, 8), lambda shape, classes: resnet(shape, classes, depth=8))],
    ids=["cnn", "resnet8"],
)
def test_the_hessian_of_convolutions(shape, build):
    torch.manual_seed(0)
    federation, module = images(12, shape), build(shape, 4).double()
    ours, theirs = ff.Surface(module, federation), ff.Surface(plain(module), federation)
    torch.manual_seed(1)
    named = {name: torch.randn_like(p) for name, p in module.named_parameters()}

    def product(surface: ff.Surface) -> dict[str, Tensor]:
        vector = torch.empty_like(surface.w)
        for name, view in surface.model.layout.named(vector).items():
            view.copy_(named[name])
        return surface.model.layout.named(surface.hessian_times(vector[None])[0])

    expected = product(theirs)
    for name, piece in product(ours).items():
        torch.testing.assert_close(piece, expected[name], rtol=1e-8, atol=1e-9)
    single = ff.hessian_eigenvalues(build(shape, 4), images(12, shape, dtype=torch.float32), 1)
    assert math.isfinite(single.largest) and single.residuals[0] < 0.05 * abs(single.largest)


def words() -> ff.Federation:
    rng = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 30, (60, 9), generator=rng)
    tokens[:, 6:] = 0  # padding
    labels = torch.randint(0, 4, (60,), generator=rng)
    return ff.Federation([(tokens[i::3], labels[i::3]) for i in range(3)], classes=4, vocabulary=30)


def text(sparse: bool) -> FastText:
    torch.manual_seed(0)
    return FastText(30, 4, width=5, sparse=sparse).double()


@pytest.mark.parametrize("name", ff.MEASURES)
def test_sparse_and_dense_embeddings_measure_alike(name):
    settings = {"draws": 5} if name == "low-pass" else {}
    sparse, dense = (ff.MEASURES[name](text(kind), words(), **settings) for kind in (True, False))
    for label, value in ff.MEASURES[name].numbers(sparse).items():
        close(value, ff.MEASURES[name].numbers(dense)[label], 1e-9)


def test_padding_is_a_constant():
    surface = ff.Surface(text(True), words())
    for draw in (unit(surface, 0, "radius", 0), signs(surface, 0, "trace", 0)):
        rows = surface.model.layout.named(draw)["embedding.weight"]
        assert not rows[0].any() and rows[1:].all()
    hessian = surface.hessian_times(torch.eye(surface.size, dtype=torch.float64))
    torch.testing.assert_close(hessian, hessian.T)
    assert not hessian[:5].any()
    low = ff.low_pass(text(True), words(), 0.01, 2000, antithetic=True, confidence=0.99).rise
    assert low.low <= 0.5 * 0.01**2 * hessian.trace().item() <= low.high


# -- what every measure keeps to -----------------------------------------------------------------------

QUICK = {
    "eigenvalues": {"top": 3},
    "trace": {"products": 6},
    "density": {"steps": 4, "probes": 2},
    "low-pass": {"draws": 3},
    "radius": {"radii": (0, 1), "directions": 2},
    "worst-case": {"steps": 2, "restarts": 1},
}


def everything(module: nn.Module) -> tuple:
    """Bits, modes and gradients of a module."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return state, [m.training for m in module.modules()], [p.grad is None for p in module.parameters()]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", ff.MEASURES)
def test_a_measure_changes_nothing_and_repeats(name, flat):
    federation, module = images(60, (5,)), network()
    module[1].eval()  # a part in another mode than the whole
    model = FlatModel(module, torch.float64) if flat else module
    measure, settings = ff.MEASURES[name], QUICK.get(name, {})
    state, modes, grads = everything(module)
    random = torch.get_rng_state()
    first = measure(model, federation, **settings)
    after, modes_after, grads_after = everything(module)
    assert all(torch.equal(state[key], after[key]) for key in state)
    assert modes == modes_after and grads == grads_after
    assert torch.equal(random, torch.get_rng_state())
    with torch.no_grad():
        torch.manual_seed(99)
        assert measure(model, federation, **settings) == first
        assert (
            measure(network() if flat else FlatModel(network(), torch.float64), federation, **settings)
            == first
        )
    if name in ("eigenvalues", "trace", "density", "low-pass", "radius"):
        assert measure(model, federation, seed=1, **settings) != first
    json.dumps(dataclasses.asdict(first) if dataclasses.is_dataclass(first) else first, allow_nan=False)
    numbers = measure.numbers(first)
    assert all(isinstance(value, float) for value in numbers.values())
    assert (name in numbers) is (name != "radius")


def test_a_failing_measure_puts_the_model_back():
    model = FlatModel(network(), torch.float64)
    before, count = model.vector.clone(), 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if count == 2:
            raise ZeroDivisionError
        return F.cross_entropy(outputs, targets)

    with pytest.raises(ZeroDivisionError):
        ff.sharpness(model, images(60, (5,)), loss=loss)
    assert torch.equal(model.vector, before) and model.module.training


def test_data_in_another_precision_is_converted():
    q = Quadratic()
    single = q.federation.to(torch.float32)
    close(ff.sharpness(q.model, single, loss=quadratic_loss), q.sharpness(0.05), 1e-6)
    union = single.union()
    close(ff.sharpness(q.model, union, loss=quadratic_loss), q.sharpness(0.05), 1e-6)
    assert union.inputs.dtype == torch.float32


def test_parts_and_samples_of_a_federation():
    q = Quadratic()
    measure = ff.MEASURES["sharpness"]
    close(measure(q.model, q.federation, "test", loss=quadratic_loss), q.sharpness(0.05, part=3), 1e-11)
    few = ff.sharpness(q.model, q.federation.union().thinned(50), loss=quadratic_loss)
    assert measure(q.model, q.federation, samples=50, loss=quadratic_loss) == few
    assert measure(q.model, q.federation.union(), samples=50, loss=quadratic_loss) == few
    assert measure.defaults.keys() == {"rho", "at", "loss"} and measure.defaults["rho"] == 0.05
    assert all(m.description and m.name == name for name, m in ff.MEASURES.items())


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda q: ff.MEASURES["trace"](q.model, q.federation, product=3), "Did you mean 'products'"),
        (lambda q: ff.MEASURES["sharpness"](q.model, q.federation, "tests"), "Did you mean 'test'"),
        (lambda q: ff.MEASURES["sharpness"](q.model, ff.Federation([(q.w, q.w)]), "test"), "no test set"),
        (lambda q: ff.MEASURES["sharpness"](q.model, q.federation, samples=0), "at least 1"),
        (lambda q: ff.MEASURES["drift"](q.model, q.federation.union()), "give a federation"),
        (lambda q: ff.MEASURES["drift"](q.model, q.federation, "test"), "give a federation"),
        (lambda q: ff.hessian_trace(q.model, q.federation, method="hutch"), "Did you mean 'hutch"),
        (lambda q: ff.hessian_trace(q.model, q.federation, 3), "products=3: give at least 6"),
        (lambda q: ff.hessian_eigenvalues(q.model, q.federation, 12), "has 12 weights"),
        (lambda q: ff.hessian_eigenvalues(q.model, q.federation, 0), "top=0"),
        (lambda q: ff.low_pass(q.model, q.federation, draws=1), "draws=1"),
        (lambda q: ff.loss_along_radius(q.model, q.federation, directions=1), "directions=1"),
        (lambda q: ff.spectral_density(q.model, q.federation, probes=1), "probes=1"),
        (lambda q: ff.worst_case_sharpness(q.model, q.federation, steps=0), "steps=0"),
        (lambda q: ff.client_sharpness(q.model, q.federation, clients=[3]), "no client 3; they are 0 to 2"),
        (lambda q: ff.gradient_drift(q.model, q.federation, []), "at least one"),
        (lambda q: ff.sharpness(q.model, q.federation, at=torch.zeros(3)), "shape"),
        (lambda q: ff.low_pass(q.model, q.federation, confidence=1.0, loss=quadratic_loss), "confidence=1.0"),
    ],
)
def test_mistakes_are_explained(action: Callable[[Quadratic], object], words: str):
    with pytest.raises(ff.FedflatError, match=words.replace("+", r"\+")):
        action(Quadratic())


class Once(torch.autograd.Function):
    """Squares, without a second derivative."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


class Rough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return Once.apply(self.fc(x))


def test_a_model_without_second_derivatives():
    assert ff.sharpness(Rough(), images(30, (5,))) > 0
    with pytest.raises(ff.FedflatError, match="Rough cannot be differentiated twice"):
        ff.hessian_trace(Rough(), images(30, (5,)))


class Attention(nn.Module):
    """PyTorch's fused attention, which has no second derivative on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.fc = nn.Linear(4, 12, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(x)[:, None].chunk(3, dim=-1)
        return self.fc(F.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))


def test_fused_attention_has_a_hessian_all_the_same():
    torch.manual_seed(0)
    surface = ff.Surface(Attention(), images(30, (6, 4)))
    v = torch.randn(surface.size, dtype=torch.float64)
    step = 1e-5
    ahead, behind = (surface.value_and_gradient(surface.w + s * step * v)[1] for s in (1, -1))
    torch.testing.assert_close(
        surface.hessian_times(v[None])[0], (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8
    )


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
    q = Quadratic()
    with pytest.raises(ff.FedflatError, match=r"fedflat\[flatness\]"):
        ff.hessian_eigenvalues(q.model, q.federation, loss=quadratic_loss)
    ff.hessian_trace(q.model, q.federation, loss=quadratic_loss)  # needs none


def test_measures_are_listed_without_torch():
    code = "import sys, fedflat; print(len(fedflat.MEASURES)); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(ff.MEASURES)


def test_student_s_quantiles():
    stats = pytest.importorskip("scipy.stats")
    for confidence in (0.5, 0.9, 0.95, 0.999):
        for freedom in (1, 2, 3, 4, 7, 30, 99, 400):
            assert student(confidence, freedom) == pytest.approx(
                stats.t.ppf((1 + confidence) / 2, freedom), rel=1e-9
            )
