"""Corners in which local training once gave wrong numbers, each against plain PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedflat as ff

LR = 0.1


def data(samples: int = 12, inputs: int = 6, classes: int = 3, dtype: torch.dtype = torch.float64):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(samples, inputs, generator=rng, dtype=dtype)
    return x, torch.randint(classes, (samples,), generator=rng)


def update(
    module: nn.Module, method: ff.Method | str, x: Tensor, y: Tensor, dtype=torch.float64, **local
) -> Tensor:
    """What one client's first round does, in full batches unless told otherwise."""
    settings = {"lr": LR, "batch_size": None, "steps": 1, **local}
    run = ff.train(
        ff.Federation([(x, y)]), copy.deepcopy(module), method, ff.LocalSGD(**settings), rounds=1, dtype=dtype
    )
    return run.server.step


def vector(tensors) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def gradients(module: nn.Module, loss: Tensor) -> list[Tensor]:
    parameters = list(module.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    dense = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return [g.to_dense() if g.is_sparse else g for g in dense]


def moved(module: nn.Module, direction: list[Tensor], scale: float) -> nn.Module:
    """A copy of the module, `scale` times a direction away."""
    other = copy.deepcopy(module)
    with torch.no_grad():
        for p, d in zip(other.parameters(), direction, strict=True):
            p.add_(d, alpha=scale)
    return other


def unit(direction: list[Tensor]) -> list[Tensor]:
    length = vector(direction).norm()
    return [d / length for d in direction]


def full_batches(steps: int) -> ff.LocalSGD:
    """Of which every step takes the same samples, however many there are."""
    return ff.LocalSGD(lr=LR, batch_size=None, steps=steps)


# -- teachers --------------------------------------------------------------------------------------

TEACHERS = ["trajectory-loss(gamma=2)", "own-trajectory-loss(gamma=2)", "not-true-distillation(gamma=2)"]


def twice(one_module: bool) -> nn.Sequential:
    """A layer used twice: as one module under two names, or as two modules that share their parameters."""
    torch.manual_seed(1)
    layer, last = nn.Linear(6, 6), nn.Linear(6, 3)
    again = layer if one_module else nn.Linear(6, 6)
    again.weight, again.bias = layer.weight, layer.bias
    return nn.Sequential(layer, nn.Tanh(), again, nn.Tanh(), last)


@pytest.mark.parametrize("method", TEACHERS)
def test_a_layer_used_twice_is_trained_beside_a_teacher(method):
    x, y = data()
    federation = ff.Federation([(x, y)])
    local = ff.LocalSGD(lr=LR, batch_size=4, epochs=2)
    runs = [
        ff.train(federation, twice(one), method, local, rounds=2, dtype=torch.float64)
        for one in (True, False)
    ]
    start = twice(True).double()
    assert (runs[0].model[0].weight - start[0].weight).abs().max() > 1e-2
    for run in runs:
        assert vector(run.model.parameters()).equal(run.server.w)
    torch.testing.assert_close(runs[0].server.w, runs[1].server.w, rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", TEACHERS)
@pytest.mark.parametrize("buffers", ["average", "reset", "local"])
def test_a_teacher_has_the_statistics_that_were_received(method, buffers):
    """A teacher with BatchNorm, fixed for the round, against a copy of the module in evaluation mode."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    module[1].running_mean.normal_()
    x, y = data()
    student, teacher = copy.deepcopy(module), copy.deepcopy(module).eval()
    gamma, tau = 2.0, 1.0 if "not-true" in method else 3.0
    optimiser = torch.optim.SGD(student.parameters(), lr=LR)
    for _ in range(4):
        outputs, taught = student(x), teacher(x).detach()
        loss = F.cross_entropy(outputs, y)
        if "not-true" in method:
            others = torch.arange(3) != y[:, None]
            outputs, taught = outputs[others].view(-1, 2), taught[others].view(-1, 2)
        divergence = F.kl_div(
            F.log_softmax(outputs / tau, 1), F.softmax(taught / tau, 1), reduction="batchmean"
        )
        optimiser.zero_grad()
        (loss + gamma * tau**2 * divergence).backward()
        optimiser.step()
    run = ff.train(
        ff.Federation([(x, y)]),
        module,
        method,
        full_batches(4),
        rounds=1,
        dtype=torch.float64,
        buffers=buffers,
    )
    torch.testing.assert_close(run.server.w, vector(student.parameters()), rtol=0, atol=1e-12)


# -- ascents ---------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """Reads a layer's weight without saying so: no module that can be asked knows of it."""

    def __init__(self, layer: nn.Linear, detached: bool) -> None:
        super().__init__()
        self.hidden, self.detached = [layer], detached
        self.last = nn.Linear(layer.in_features, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.hidden[0].weight
        return self.last(x @ (weight.detach() if self.detached else weight))


@pytest.mark.parametrize("detached", [False, True])
def test_sam_with_a_weight_that_another_module_reads(detached):
    torch.manual_seed(1)
    layer = nn.Linear(256, 256)
    module = nn.Sequential(nn.Flatten(), layer, nn.Tanh(), Decoder(layer, detached)).double()
    x, y = data(inputs=256)
    x = x / 16
    first = unit(gradients(module, F.cross_entropy(module(x), y)))
    there = moved(module, first, 0.5)
    second = gradients(there, F.cross_entropy(there(x), y))
    found = update(module, ff.fedsam(rho=0.5), x, y)
    torch.testing.assert_close(found, -LR * vector(second), rtol=0, atol=1e-12)


class Words(nn.Module):
    """An embedding with sparse gradients, and a parameter that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(20, 5, sparse=True)
        self.unused = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words(x))


def test_a_kept_gradient_is_not_overwritten_by_the_next_mechanism():
    """`(1−a) ∇ℓ(w) + a ∇ℓ(w + δ + δ')` with two ascents, each along the gradient where the point is then."""
    torch.manual_seed(1)
    module = Words().double()
    x, y = torch.randint(20, (12, 4), generator=torch.Generator().manual_seed(0)), data()[1]
    first = gradients(module, F.cross_entropy(module(x), y))
    there = moved(module, unit(first), 0.5)
    there = moved(there, unit(gradients(there, F.cross_entropy(there(x), y))), 0.4)
    second = gradients(there, F.cross_entropy(there(x), y))
    method = ff.Method("two ascents", [ff.LocalAscent(rho=0.5, mix=0.3), ff.SharedPerturbation(rho=0.4)])
    expected = -LR * (0.7 * vector(first) + 0.3 * vector(second))
    torch.testing.assert_close(update(module, method, x, y), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_the_length_of_an_ascent_does_not_depend_on_the_inputs_size(size, mean):
    """In float32, with inputs beside which a bias is large: against float64."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 3))
    with torch.no_grad():  # balanced classes at equal outputs: the biases' gradients cancel
        module[2].weight.mul_(20)
        module[2].bias.copy_(-module[2].weight @ torch.relu(module[0].bias))
    x, _ = data(samples=18, inputs=40)
    x, y = (x + mean) * size, torch.arange(18) % 3
    points = []
    for dtype in (torch.float32, torch.float64):
        found = []

        class Looks(ff.Mechanism):
            def shift(self, step) -> None:
                found.append((step.point - step.w).double())  # noqa: B023

        method = ff.Method("look", [ff.LocalAscent(rho=0.5), Looks()])
        update(module, method, x.to(dtype), y, dtype)
        points.append(found[0])
    assert points[0].norm().item() == pytest.approx(0.5, rel=1e-4)
    torch.testing.assert_close(points[0], points[1], rtol=0, atol=1e-2)


# -- weight decay ----------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["dense", "other", "sparse"])
@pytest.mark.parametrize("lr", [0.01, 0.002])
def test_weight_decay_in_single_precision(network, lr):
    """A small decay acts as much as in torch's SGD: `Σ w·Δ_λ / Σ w·w`, Δ_λ what it adds to some steps."""
    torch.manual_seed(1)
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(3, (24,), generator=rng)
    if network == "sparse":
        module = nn.Sequential(nn.EmbeddingBag(100, 400, sparse=True), nn.Linear(400, 3))
        x = torch.randint(100, (24, 300), generator=rng)
    else:
        x = torch.randn(24, 400, generator=rng)
        middle = nn.ReLU() if network == "dense" else nn.Tanh()  # differentiated by hand, and by autograd
        module = nn.Sequential(nn.Linear(400, 100), middle, nn.Linear(100, 3))
    decay, steps = 1e-5, 10
    w = vector(module.parameters()).double()

    def torchs(decay: float) -> Tensor:
        other = copy.deepcopy(module)
        if network == "sparse":
            other[0].sparse = False
        optimiser = torch.optim.SGD(other.parameters(), lr=lr, weight_decay=decay)
        for _ in range(steps):
            optimiser.zero_grad()
            F.cross_entropy(other(x), y).backward()
            optimiser.step()
        return vector(other.parameters())

    def ours(decay: float) -> Tensor:
        return update(module, "fedavg", x, y, torch.float32, lr=lr, steps=steps, weight_decay=decay)

    acted, expected = ((w @ (one(decay) - one(0.0)).double() / (w @ w)).item() for one in (ours, torchs))
    assert expected == pytest.approx(-lr * decay * steps, rel=0.2)
    assert acted == pytest.approx(expected, rel=0.05)
