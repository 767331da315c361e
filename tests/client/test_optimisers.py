"""The clients' optimisers against torch.optim, and mechanisms that divide by the sum of learning rates."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedflat as ff
from fedflat.client.optimisers import OPTIMISERS, LocalOptimiser
from fedflat.client.round import ClientRound
from fedflat.core.flat import FlatModel
from fedflat.core.messages import Download

close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
FEATURES, CLASSES, STEPS = 6, 3, 5


def data(seed: int = 0, samples: int = 12) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=draw, dtype=torch.float64)
    return x, torch.randint(CLASSES, (samples,), generator=draw)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def vector(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def shard(x: Tensor, y: Tensor) -> object:
    return ff.Federation([(x, y)]).to(torch.float64, "cpu").client(0)


# -- against torch.optim ---------------------------------------------------------------------------

Torchs = Callable[..., torch.optim.Optimizer]
PAIRS: dict[str, tuple[LocalOptimiser, Torchs]] = {
    "sgd": (ff.LocalSGD(lr=0.1), partial(torch.optim.SGD, lr=0.1)),
    "sgd, decay": (
        ff.LocalSGD(lr=0.1, weight_decay=0.05),
        partial(torch.optim.SGD, lr=0.1, weight_decay=0.05),
    ),
    "momentum": (ff.LocalSGD(lr=0.1, momentum=0.9), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "momentum, decay": (
        ff.LocalSGD(lr=0.1, momentum=0.9, weight_decay=0.05),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.05),
    ),
    "nesterov": (
        ff.LocalSGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
    ),
    "adam": (ff.LocalAdam(), partial(torch.optim.Adam, lr=0.001)),
    "adam, decay": (
        ff.LocalAdam(lr=0.05, weight_decay=0.1),
        partial(torch.optim.Adam, lr=0.05, weight_decay=0.1),
    ),
    "adam, its numbers": (
        ff.LocalAdam(lr=0.05, beta1=0.5, beta2=0.8, epsilon=1e-3),
        partial(torch.optim.Adam, lr=0.05, betas=(0.5, 0.8), eps=1e-3),
    ),
    "adam, no memory": (
        ff.LocalAdam(lr=0.05, beta1=0.0, beta2=0.0),
        partial(torch.optim.Adam, lr=0.05, betas=(0.0, 0.0)),
    ),
    "adamw": (ff.LocalAdamW(), partial(torch.optim.AdamW, lr=0.001)),
    "adamw, decay": (
        ff.LocalAdamW(lr=0.05, weight_decay=0.3),
        partial(torch.optim.AdamW, lr=0.05, weight_decay=0.3),
    ),
}


def with_steps(optimiser: LocalOptimiser, **more) -> LocalOptimiser:
    return replace(optimiser, epochs=None, steps=STEPS, batch_size=None, **more)


def torchs_path(make: Torchs, x: Tensor, y: Tensor, rates: list[float] | None = None) -> list[Tensor]:
    """Where torch's optimiser is after every step."""
    module = network()
    optimiser, path = make(module.parameters()), [vector(module)]
    for index in range(STEPS):
        if rates is not None:
            optimiser.param_groups[0]["lr"] = rates[index]
        optimiser.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimiser.step()
        path.append(vector(module))
    return path


@pytest.mark.parametrize("within", ["constant", "linear:0.2"])
@pytest.mark.parametrize("name", PAIRS)
def test_the_way_is_that_of_torch(name, within):
    ours, theirs = PAIRS[name]
    x, y = data()
    local = with_steps(ours, within=within)
    rates = None if within == "constant" else [local.lr * (1 - 0.8 * k / STEPS) for k in range(STEPS)]
    path = ff.local_trajectory(network(), 0, shard(x, y), "fedavg", local)
    close(torch.stack(path), torch.stack(torchs_path(theirs, x, y, rates)))


@pytest.mark.parametrize("name", PAIRS)
def test_every_round_starts_anew(name):
    """A second client's round on the same model is that of a fresh optimiser."""
    ours, theirs = PAIRS[name]
    local, model = with_steps(ours), FlatModel(network(), torch.float64)
    start = model.vector.clone()
    training = ClientRound(model, ff.fedavg(), local, F.cross_entropy, seed=0)
    for seed in range(2):
        x, y = data(seed)
        upload = training.run(seed, shard(x, y), Download(0, local.lr, start), {})
        close(start + upload.update, torchs_path(theirs, x, y)[-1])


@pytest.mark.parametrize("local", [ff.LocalAdam, ff.LocalAdamW])
def test_adam_with_corrections_and_a_shift(local):
    """FedSAM's point and a proximal pull: Adam goes along the direction that results."""
    x, y = data()
    module, rho, mu = network(), 0.1, 0.3
    start = copy.deepcopy(module)
    make = torch.optim.Adam if local is ff.LocalAdam else torch.optim.AdamW
    optimiser = make(module.parameters(), lr=0.05, weight_decay=0.1)
    for _ in range(STEPS):
        there = copy.deepcopy(module)
        uphill = torch.autograd.grad(F.cross_entropy(there(x), y), list(there.parameters()))
        norm = torch.cat([g.flatten() for g in uphill]).norm().item()
        with torch.no_grad():
            for p, g in zip(there.parameters(), uphill, strict=True):
                p.add_(g, alpha=rho / norm)
        found = torch.autograd.grad(F.cross_entropy(there(x), y), list(there.parameters()))
        for p, g, w in zip(module.parameters(), found, start.parameters(), strict=True):
            p.grad = g + mu * (p.detach() - w.detach())
        optimiser.step()
    method = ff.Method("both", [ff.LocalAscent(rho), ff.Proximal(mu)])
    path = ff.local_trajectory(
        network(), 0, shard(x, y), method, local(lr=0.05, weight_decay=0.1, steps=STEPS, batch_size=None)
    )
    close(path[-1], vector(module))


def test_trained_by_name_and_on_several_clients():
    """A whole run with Adam is its rounds, averaged."""
    clients, local = [data(0), data(1)], ff.LocalAdam(lr=0.05, steps=STEPS, batch_size=None)
    run = ff.train(ff.Federation(clients), network(), "fedavg", local, rounds=1, dtype=torch.float64)
    ends = [torchs_path(partial(torch.optim.Adam, lr=0.05), x, y)[-1] for x, y in clients]
    close(run.server.w, torch.stack(ends).mean(0))


def test_names_of_optimisers():
    assert {"sgd": ff.LocalSGD, "adam": ff.LocalAdam, "adamw": ff.LocalAdamW} == OPTIMISERS


# -- clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ff.LocalSGD, ff.LocalAdam])
@pytest.mark.parametrize("stage", ["direction", "gradient"])
def test_clipping_at_both_stages(kind, stage):
    """The proximal pull is clipped with the gradient or added to the clipped one; weight decay is never clipped."""
    x, y = data()
    module, limit, mu = network(), 0.05, 4.0
    start = vector(module)
    decay = 0.1
    make = torch.optim.SGD if kind is ff.LocalSGD else torch.optim.Adam
    optimiser = make(module.parameters(), lr=0.2, weight_decay=decay)
    sizes = [p.numel() for p in module.parameters()]

    def clip(v: Tensor) -> Tensor:
        return v * min(1.0, limit / v.norm().item())

    for _ in range(STEPS):
        g = torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(F.cross_entropy(module(x), y), list(module.parameters()))
            ]
        )
        pull = mu * (vector(module) - start)
        d = clip(g) + pull if stage == "gradient" else clip(g + pull)
        for p, piece in zip(module.parameters(), d.split(sizes), strict=True):
            p.grad = piece.view_as(p)
        optimiser.step()
    local = kind(lr=0.2, weight_decay=decay, clip_norm=limit, clip_stage=stage, steps=STEPS, batch_size=None)
    path = ff.local_trajectory(network(), 0, shard(x, y), ff.fedprox(mu), local)
    close(path[-1], vector(module))


# -- refusals --------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "epochs and steps": (lambda: ff.LocalSGD(epochs=1, steps=1), "LocalSGD: give epochs or steps, not both"),
    "nesterov alone": (lambda: ff.LocalSGD(nesterov=True), "LocalSGD: nesterov needs a momentum above 0"),
    "no rate": (lambda: ff.LocalAdam(lr=0.0), "LocalAdam: lr must be above 0, not 0"),
    "a decay below 0": (
        lambda: ff.LocalAdamW(weight_decay=-1),
        "LocalAdamW: weight_decay must be at least 0",
    ),
    "momentum of 1": (lambda: ff.LocalSGD(momentum=1.0), "LocalSGD: momentum must be at least 0 and below 1"),
    "beta of 1": (lambda: ff.LocalAdam(beta2=1.0), "LocalAdam: beta2 must be at least 0 and below 1, not 1"),
    "no epsilon": (lambda: ff.LocalAdam(epsilon=0.0), "LocalAdam: epsilon must be above 0"),
    "half an epoch": (lambda: ff.LocalSGD(epochs=0.5), "LocalSGD: epochs must be at least 1"),
    "one and a half": (lambda: ff.LocalSGD(epochs=1.5), "LocalSGD: epochs must be a whole number, not 1.5"),
    "a word": (lambda: ff.LocalSGD(lr="0.1"), "LocalSGD: lr must be a number, not '0.1'"),
    "another stage": (
        lambda: ff.LocalSGD(clip_stage="update"),
        "clip_stage must be 'direction' or 'gradient', not 'update'",
    ),
    "a schedule": (lambda: ff.LocalSGD(schedule="cosin:5"), "There is no schedule 'cosin'.*cosine"),
    "a schedule within": (lambda: ff.LocalAdam(within="cosine:5"), "There is no schedule 'cosine'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_at_once(name):
    make, says = REFUSED[name]
    with pytest.raises(ff.FedflatError, match=says):
        make()


def test_momentum_is_not_for_adam():
    with pytest.raises(TypeError, match="momentum"):
        ff.LocalAdam(momentum=0.9)


@pytest.mark.parametrize("local", [ff.LocalAdam(), ff.LocalAdamW()])
@pytest.mark.parametrize("method", ff.METHODS)
def test_a_mean_gradient_needs_sgd(method, local):
    """One sentence before anything is trained, for the methods that divide by the sum of rates and no others."""
    made = ff.METHODS[method]()
    dividing = {"control-variates", "momentum-blend", "personal-blend"}
    needs = [m.name for m in made.mechanisms if m.name in dividing]
    model = FlatModel(network(), torch.float64)
    if not needs:
        ClientRound(model, made, local, F.cross_entropy, seed=0)
        return
    kind = type(local).__name__
    says = f"^{needs[0]}: it divides a client's update by the sum of its learning rates.*not with {kind}"
    with pytest.raises(ff.FedflatError, match=says) as refusal:
        ClientRound(model, made, local, F.cross_entropy, seed=0)
    assert "Use LocalSGD" in str(refusal.value) and "\n" not in str(refusal.value)
    with pytest.raises(ff.FedflatError, match=says):
        ff.train(ff.Federation([data()]), network(), made, local, rounds=1)


# -- how long, at which rates ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ff.LocalSGD, ff.LocalAdam, ff.LocalAdamW])
def test_steps_and_rate_sums(kind):
    assert kind(epochs=3, batch_size=5).steps_for(12) == 9
    assert kind(batch_size=None, epochs=3).steps_for(12) == 3
    assert kind(steps=7).steps_for(12) == 7
    local = kind(lr=0.5, within="linear:0.2")
    assert local.rates(0.5, 4) == pytest.approx([0.5, 0.4, 0.3, 0.2])
    assert local.rate_sum(0.5, 4) == pytest.approx(1.4)
    assert kind(lr=0.5).rates(0.25, 3) == [0.25] * 3
    assert kind(lr=0.5).rate_sum(0.25, 3) == 0.75


# -- mean gradients with a rate that changes within a round ----------------------------------------


class Task:
    """Two clients in full batches, straight-line: every method's rounds with the rates written out."""

    def __init__(self) -> None:
        self.clients, self.module = [data(0), data(1)], network()
        self.sizes = [p.numel() for p in self.module.parameters()]
        self.start = vector(self.module)
        self.rates = [0.3 * (1 - 0.9 * k / STEPS) for k in range(STEPS)]

    def gradient(self, w: Tensor, client: int) -> Tensor:
        with torch.no_grad():
            for p, piece in zip(self.module.parameters(), w.split(self.sizes), strict=True):
                p.copy_(piece.view_as(p))
        x, y = self.clients[client]
        found = torch.autograd.grad(F.cross_entropy(self.module(x), y), list(self.module.parameters()))
        return torch.cat([g.flatten() for g in found])

    def trained(self, method: ff.Method, rounds: int = 3) -> list[Tensor]:
        models: list[Tensor] = []
        ff.train(
            ff.Federation(self.clients),
            network(),
            method,
            ff.LocalSGD(lr=0.3, within="linear:0.1", steps=STEPS, batch_size=None),
            rounds=rounds,
            dtype=torch.float64,
            on_round=lambda r: models.append(r.server.w.clone()),
        )
        return models


def test_scaffold_with_a_rate_that_falls_within_a_round():
    task = Task()
    w, c = task.start, torch.zeros_like(task.start)
    own = [torch.zeros_like(w) for _ in range(2)]
    for found in task.trained(ff.scaffold()):
        updates, news = [], []
        for client in range(2):
            x = w
            for rate in task.rates:
                x = x - rate * (task.gradient(x, client) - own[client] + c)
            updates.append(x - w)
            news.append(own[client] - c - (x - w) / sum(task.rates))
        w = w + sum(updates) / 2
        c = c + sum(new - old for new, old in zip(news, own, strict=True)) / 2
        own = news
        close(found, w)


def test_fedcm_with_a_rate_that_falls_within_a_round():
    task, alpha = Task(), 0.3
    w, g = task.start, torch.zeros_like(task.start)
    for found in task.trained(ff.fedcm(alpha)):
        updates = []
        for client in range(2):
            x = w
            for rate in task.rates:
                x = x - rate * (alpha * task.gradient(x, client) + (1 - alpha) * g)
            updates.append(x - w)
        w, g = w + sum(updates) / 2, -sum(updates) / 2 / sum(task.rates)
        close(found, w)


def test_fedwmsam_with_a_rate_that_falls_within_a_round():
    task, alpha, rho = Task(), 0.3, 0.05
    w, g = task.start, torch.zeros_like(task.start)
    c, own = torch.zeros_like(w), [torch.zeros_like(w) for _ in range(2)]
    for found in task.trained(ff.fedwmsam(rho=rho, alpha=alpha, weighted=False)):
        updates, news = [], []
        for client in range(2):
            x, mine = w, g + alpha / (1 - alpha) * (c - own[client])
            for index, rate in enumerate(task.rates):
                target = w + index * mine - x
                point = x + rho * target / target.norm() if index else x
                x = x - rate * (alpha * task.gradient(point, client) + (1 - alpha) * mine)
            updates.append(x - w)
            news.append(own[client] - c - (x - w) / sum(task.rates))
        w, g = w + sum(updates) / 2, -sum(updates) / 2 / sum(task.rates)
        c = c + sum(new - old for new, old in zip(news, own, strict=True)) / 2
        own = news
        close(found, w, rtol=1e-10, atol=1e-11)
