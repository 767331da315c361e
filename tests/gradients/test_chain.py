"""A fully connected network differentiated by hand, against autograd; SAM's ascent past its first layer."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune, spectral_norm

import fedflat as ff
from fedflat.client.round import ClientRound
from fedflat.client.step import Local, Step
from fedflat.gradients.dense import Chain, differentiate_loss
from fedflat.methods.mechanism import Mechanism
from fedflat.methods.mechanisms import AdaptiveAscent, LocalAscent, NesterovMomentum, TrajectoryLoss

FEATURES, CLASSES, BATCH = 24, 3, 5
SHAPES = {"image": (2, 3, 4), "row": (FEATURES,)}
STEPS = 3 * 2 * 2 * 3
"""of a run: clients, rounds, epochs, batches"""
CLIMBING = ["fedsam", "mofedsam", "fedgamma", "fedspeed", "fedsam_nesterov"]
"""methods whose shift is `step.climb`"""
BY_AUTOGRAD = {"fedntd"}
"""methods whose loss does not come with its gradient"""
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
near = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-10)


def samples(number: int, shape: tuple[int, ...] = (FEATURES,), seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(number, *shape, generator=draw, dtype=torch.float64)
    return x, torch.randint(CLASSES, (number,), generator=draw)


def network(*widths: int, bias: str = "", inplace: bool = False) -> nn.Sequential:
    """Layers of these widths; with `bias="01"` the first has none, the second has one."""
    parts: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(pairwise((FEATURES, *widths))):
        with_bias = bias[number : number + 1] != "0"
        parts += [nn.Linear(inputs, outputs, with_bias, dtype=torch.float64), nn.ReLU(inplace)]
    return nn.Sequential(*parts[:-1])


def turned() -> nn.Sequential:
    model = network(16, CLASSES)
    for layer in (model[0], model[2]):
        layer.weight.data = layer.weight.data.mT.contiguous().mT
    return model


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "rows": ("row", lambda: network(16, CLASSES)),
    "images": ("image", lambda: nn.Sequential(nn.Flatten(), *network(16, CLASSES))),
    "flattened rows": ("row", lambda: nn.Sequential(nn.Flatten(), *network(16, CLASSES))),
    "relu in place": ("row", lambda: network(16, CLASSES, inplace=True)),
    "no bias": ("row", lambda: network(16, 9, CLASSES, bias="000")),
    "no bias first": ("row", lambda: network(16, CLASSES, bias="01")),
    "no bias last": ("image", lambda: nn.Sequential(nn.Flatten(), *network(16, 9, CLASSES, bias="110"))),
    "one layer": ("row", lambda: network(16)),
    "one layer without bias": ("image", lambda: nn.Sequential(nn.Flatten(), *network(16, bias="0"))),
    "deep": ("row", lambda: network(16, 12, 7, 9, CLASSES, bias="10111")),
    "weights turned in memory": ("row", turned),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name][1]()


def train(model: str, method: str | ff.Method | list[Mechanism], batch_size: int = BATCH, **local) -> ff.Run:
    """A run that is the same every time."""
    clients = [samples(14, SHAPES[MODELS[model][0]], seed) for seed in range(3)]
    return ff.train(
        ff.Federation(clients),
        build(model),
        method,
        rounds=2,
        local=ff.LocalSGD(lr=0.1, epochs=2, batch_size=batch_size, **local),
        dtype=torch.float64,
    )


def same(mine: ff.Run, other: ff.Run) -> None:
    assert mine.server.w.isfinite().all()
    close(mine.server.w, other.server.w)
    for row, row_of_other in zip(mine.history, other.history, strict=True):
        assert row["train_loss"] == pytest.approx(row_of_other["train_loss"], rel=1e-10)
        for key in ("forward", "backward", "spared_forward", "spared_backward"):
            assert row[key] == row_of_other[key]
    assert mine.clients.clients() == other.clients.clients()
    for client in mine.clients.clients():
        ours, theirs = mine.clients.get(client), other.clients.get(client)
        assert ours.keys() == theirs.keys()
        for name in ours:
            close(ours[name], theirs[name], rtol=1e-8, atol=1e-10)


def counting(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> list[str]:
    """Grows with every call of a method."""
    seen: list[str] = []
    method = getattr(kind, name)

    def noting(*arguments):
        seen.append(name)
        return method(*arguments)

    monkeypatch.setattr(kind, name, noting)
    return seen


@pytest.fixture
def by_hand(monkeypatch) -> list[str]:
    """Passes back through a chain."""
    return counting(monkeypatch, Chain, "backward")


@pytest.fixture
def by_autograd(monkeypatch) -> list[str]:
    """The other passes back."""
    return counting(monkeypatch, ff.FlatModel, "gradients")


@pytest.fixture
def lifts(monkeypatch) -> list[str]:
    """Second passes without the first layer's weights."""
    return counting(monkeypatch, Chain, "forward_again")


@pytest.fixture
def without_chains(monkeypatch) -> Callable[[], None]:
    """Lets runs leave all to autograd."""
    return lambda: monkeypatch.setattr(Chain, "of", lambda model: None)


@pytest.fixture
def plainly(monkeypatch) -> Callable[[], None]:
    """Lets runs climb with the first layer too."""
    return lambda: monkeypatch.setattr(Chain, "pays", lambda self, samples: False)


# -- whole runs ------------------------------------------------------------------------------------


OPTIMISERS = {
    "plain": {},
    "decay": {"weight_decay": 0.05},
    "momentum": {"momentum": 0.5},
    "momentum, decay": {"momentum": 0.5, "weight_decay": 0.05},
    "clipped": {"clip_norm": 0.2},
    "clipped before": {"clip_norm": 0.2, "clip_stage": "gradient", "weight_decay": 0.05},
}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("method", ff.METHODS)
def test_the_same_run_as_with_autograd(method, optimiser, by_hand, by_autograd, without_chains):
    mine = train("rows", method, **OPTIMISERS[optimiser])
    passes = int(mine.total("backward") - mine.total("spared_backward"))
    assert passes >= STEPS
    expected = (0, passes) if method in BY_AUTOGRAD else (passes, 0)
    assert (len(by_hand), len(by_autograd)) == expected
    without_chains()
    by_hand.clear()
    by_autograd.clear()
    other = train("rows", method, **OPTIMISERS[optimiser])
    assert (len(by_hand), len(by_autograd)) == (0, passes)
    same(mine, other)


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedasam", "fedgamma", "fedsmoo", "fedgmt"])
@pytest.mark.parametrize("model", MODELS)
def test_the_same_run_of_other_models(model, method, decay, by_hand, by_autograd, without_chains):
    mine = train(model, method, weight_decay=decay)
    assert len(by_hand) >= STEPS and not by_autograd
    without_chains()
    same(mine, train(model, method, weight_decay=decay))
    assert by_autograd


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_the_optimiser_is_not_the_same_run(optimiser):
    """Else the runs above would compare less than they say."""
    others = [
        train("rows", "fedsam", **more).server.w for name, more in OPTIMISERS.items() if name != optimiser
    ]
    mine = train("rows", "fedsam", **OPTIMISERS[optimiser]).server.w
    assert not any(torch.allclose(mine, other, rtol=1e-4) for other in others)


def from_scratch(module: nn.Module, clients: list, rho: float, rounds: int, steps: int, loss) -> list[Tensor]:
    """FedAvg or FedSAM on full batches, with torch alone."""
    for _ in range(rounds):
        ends = []
        for x, y in clients:
            local = copy.deepcopy(module)
            parameters = list(local.parameters())
            for _ in range(steps):
                kept = [p.detach().clone() for p in parameters]
                if rho:
                    ascent = torch.autograd.grad(loss(local(x), y), parameters)
                    norm = torch.cat([g.flatten() for g in ascent]).norm()
                    with torch.no_grad():
                        for p, g in zip(parameters, ascent, strict=True):
                            p.add_(g, alpha=rho / norm.item())
                descent = torch.autograd.grad(loss(local(x), y), parameters)
                with torch.no_grad():
                    for p, w, g in zip(parameters, kept, descent, strict=True):
                        p.copy_(w - 0.1 * g)
            ends.append([p.detach() for p in parameters])
        with torch.no_grad():
            for p, *there in zip(module.parameters(), *ends, strict=True):
                p.copy_(torch.stack(there).mean(0))
    return [p.detach() for p in module.parameters()]


def row_by_row(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of every row of a sample."""
    return F.cross_entropy(outputs.mT, targets.unsqueeze(1).expand(-1, outputs.shape[1]))


@pytest.mark.parametrize("method", ["fedavg", "fedsam"])
@pytest.mark.parametrize("rows", [False, True], ids=["a row a sample", "several rows a sample"])
@pytest.mark.parametrize("number", [7, 20])
def test_what_torch_alone_gives(method, rows, number, by_hand):
    clients = [samples(number, (2, FEATURES) if rows else (FEATURES,), seed) for seed in range(2)]
    loss = row_by_row if rows else F.cross_entropy
    local = ff.LocalSGD(lr=0.1, steps=3, batch_size=None)
    run = ff.train(
        ff.Federation(clients), build("rows"), method, local, rounds=2, dtype=torch.float64, loss=loss
    )
    assert bool(by_hand) is not rows, "a chain takes samples of one row only"
    rho = 0.05 if method == "fedsam" else 0.0
    expected = from_scratch(build("rows"), clients, rho, rounds=2, steps=3, loss=loss)
    close(run.server.w, torch.cat([p.flatten() for p in expected]))


# -- one gradient ----------------------------------------------------------------------------------


def ignoring(targets: Tensor, which: int) -> Tensor:
    """Without every so many."""
    targets = targets.clone()
    targets[::which] = -100
    return targets


LOSSES: dict[str, tuple[Callable, Callable[[Tensor, Tensor], Tensor]]] = {
    "cross-entropy": (F.cross_entropy, lambda outputs, y: y),
    "some ignored": (F.cross_entropy, lambda outputs, y: ignoring(y, 2)),
    "cross-entropy with probabilities": (F.cross_entropy, lambda outputs, y: outputs.flip(0).softmax(1)),
    "smoothed": (partial(F.cross_entropy, label_smoothing=0.1), lambda outputs, y: y),
    "as a module": (nn.CrossEntropyLoss(), lambda outputs, y: y),
    "squares": (F.mse_loss, lambda outputs, y: outputs.flip(0) + 1.0),
    "of some outputs": (lambda outputs, y: outputs[:1].exp().mean(), lambda outputs, y: y),
}
losses = st.sampled_from(list(LOSSES))


def targets_for(loss: str, outputs: Tensor, seed: int) -> Tensor:
    classes = torch.randint(outputs.shape[1], (len(outputs),), generator=torch.Generator().manual_seed(seed))
    return LOSSES[loss][1](outputs.detach(), classes)


@settings(deadline=None, max_examples=60)
@given(losses, st.integers(1, 9), st.integers(1, 6), st.booleans(), st.integers(0, 99))
def test_a_loss_and_its_gradient(loss, number, classes, single, seed):
    outputs = 3 * torch.randn(number, classes, generator=torch.Generator().manual_seed(seed)).double()
    outputs = (outputs.float() if single else outputs).requires_grad_()
    function, targets = LOSSES[loss][0], targets_for(loss, outputs, seed)
    expected = function(outputs, targets)
    (gradient,) = torch.autograd.grad(expected, outputs)
    with torch.no_grad():
        value, delta = differentiate_loss(function, outputs.detach(), targets)
    assert not value.requires_grad and not delta.requires_grad
    # bit for bit; where all targets are ignored, nothing is a number
    torch.testing.assert_close(value, expected.detach(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(delta, gradient, rtol=0, atol=0, equal_nan=True)


def test_a_loss_that_ignores_all_is_no_number():
    value, delta = differentiate_loss(F.cross_entropy, torch.zeros(2, CLASSES), torch.tensor([-100, -100]))
    assert value.isnan() and not delta.nan_to_num().any()


def test_a_loss_that_does_not_look_at_outputs():
    temperature = torch.ones((), requires_grad=True)
    value, delta = differentiate_loss(lambda *_: 2 * temperature, torch.ones(2, CLASSES), torch.ones(2))
    assert value == 2 and not value.requires_grad
    assert torch.equal(delta, torch.zeros(2, CLASSES))


def test_a_loss_whose_targets_are_wrong_is_refused():
    with pytest.raises(IndexError, match="out of bounds"):
        differentiate_loss(F.cross_entropy, torch.zeros(2, CLASSES), torch.tensor([0, CLASSES]))


@st.composite
def networks(draw: st.DrawFn) -> nn.Sequential:
    widths = draw(st.lists(st.integers(1, 12), min_size=2, max_size=5))
    biases = draw(st.lists(st.booleans(), min_size=4, max_size=4))
    torch.manual_seed(draw(st.integers(0, 99)))
    parts: list[nn.Module] = []
    for inputs, outputs, bias in zip(widths[:-1], widths[1:], biases, strict=False):
        parts += [nn.Linear(inputs, outputs, bias, dtype=torch.float64), nn.ReLU(draw(st.booleans()))]
    flattened = [nn.Flatten()] if draw(st.booleans()) else []
    return nn.Sequential(*flattened, *parts[:-1])


def inputs_for(module: nn.Sequential, number: int, seed: int) -> Tensor:
    flattened = isinstance(module[0], nn.Flatten)
    features = module[int(flattened)].in_features
    shape = (1, features, 1) if flattened else (features,)
    return samples(number, shape, seed)[0]


@settings(deadline=None, max_examples=80)
@given(networks(), losses, st.integers(1, 9), st.floats(0.01, 1), st.integers(0, 99))
def test_gradients_are_those_of_autograd(module, loss, number, lr, seed):
    if loss == "some ignored":
        number += 1  # so that one is left
    x = inputs_for(module, number, seed)
    outputs = module(x)
    function, targets = LOSSES[loss][0], targets_for(loss, outputs, seed)
    named = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    value = function(functional_call(module, named, (x,)), targets)
    expected = torch.autograd.grad(value, list(named.values()))

    model = ff.FlatModel(module, dtype=torch.float64)
    chain = Chain.of(model)
    assert chain is not None and chain.takes(x)
    with torch.no_grad():
        mine = chain.forward([p.detach() for p in model.parameters], x)
        close(mine, outputs.detach())
        plain, delta = differentiate_loss(function, mine, targets)
        chain.backward(delta)
    close(plain, value.detach())

    for gradient, other in zip(chain.gradients(), expected, strict=True):
        close(gradient, other)

    written = torch.full_like(model.vector, torch.nan)
    chain.write(model.split(written))
    close(written, torch.cat([g.flatten() for g in expected]))

    w = torch.ones_like(model.vector)  # need not be where the gradient is taken
    chain.descend(model.split(w), lr)
    close(w, 1 - lr * written)
    for p, before in zip(model.parameters, named.values(), strict=True):
        assert torch.equal(p, before), "the model stays where it is"


def test_gradients_may_be_changed():
    model = ff.FlatModel(build("deep"), dtype=torch.float64)
    chain = Chain.of(model)
    assert chain is not None
    chain.backward(torch.ones_like(chain.forward(model.split(model.vector), samples(1)[0])))
    kept = [g.clone() for g in chain.gradients()]
    for gradient in chain.gradients():
        gradient.zero_()
    assert any(g.any() for g in kept)
    assert all(map(torch.equal, chain.gradients(), kept))


# -- the ascent past the first layer ---------------------------------------------------------------


@pytest.mark.parametrize("method", CLIMBING)
@pytest.mark.parametrize("model", MODELS)
def test_the_same_run_as_the_plain_way(model, method, plainly, lifts):
    quick = train(model, method, weight_decay=0.01)
    assert len(lifts) == STEPS, "every step of every client"
    plainly()
    plain = train(model, method, weight_decay=0.01)
    assert len(lifts) == STEPS
    same(quick, plain)


def test_some_batches_the_quick_way(lifts, plainly):
    mixed = train("rows", "fedsam", batch_size=10)
    assert len(lifts) == 3 * 2 * 2, "the batches of 4, not those of 10"
    plainly()
    same(mixed, train("rows", "fedsam", batch_size=10))


@settings(deadline=None, max_examples=60)
@given(networks(), st.integers(1, 9), st.floats(0, 2), st.booleans(), st.integers(0, 99))
def test_the_point_is_where_autograd_leads(module, number, rho, normalize, seed):
    x = inputs_for(module, number, seed)
    y = targets_for("cross-entropy", module(x), seed)
    named = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    gradients = torch.autograd.grad(
        F.cross_entropy(functional_call(module, named, (x,)), y), list(named.values())
    )
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    scale = rho if not normalize else rho / norm if norm > 1e-12 else 0.0
    point = {n: v.detach() + scale * g for (n, v), g in zip(named.items(), gradients, strict=True)}

    model = ff.FlatModel(module, dtype=torch.float64)
    chain, at = Chain.of(model), model.split(model.vector)
    assert chain is not None
    _, delta = differentiate_loss(F.cross_entropy, chain.forward(at, x), y)
    chain.backward(delta)
    into = torch.full_like(model.vector, torch.nan)
    assume(chain.climb(rho, normalize, into, model.split(into)))
    assert chain.scale == pytest.approx(float(scale), rel=1e-9)
    chain.rest_of(model.vector).add_(chain.rest_of(into), alpha=chain.scale)
    again = chain.forward_again(at)
    near(again, functional_call(module, point, (x,)))
    went_on(model, chain, point, again, x, y)


def went_on(
    model: ff.FlatModel, chain: Chain, point: dict[str, Tensor], again: Tensor, x: Tensor, y: Tensor
) -> None:
    """All parameters are at the point once the first layer's follow; the next gradient is the one there."""
    at = [p.detach().clone() for p in model.parameters]
    for index, move in zip(chain.own, chain.moves(), strict=True):
        at[index].add_(move, alpha=chain.scale)
    for mine, expected in zip(at, point.values(), strict=True):
        near(mine, expected)
    chain.backward(differentiate_loss(F.cross_entropy, again, y)[1])
    there = {name: value.requires_grad_() for name, value in point.items()}
    expected = torch.autograd.grad(
        F.cross_entropy(functional_call(model.module, there, (x,)), y), list(there.values())
    )
    for gradient, other in zip(chain.gradients(), expected, strict=True):
        near(gradient, other)


def watcher(hook: str) -> tuple[Mechanism, list[Tensor]]:
    """A mechanism that notes where the point is, before or after the gradient is taken there."""
    points: list[Tensor] = []

    class Watcher(Mechanism):
        def shift(self, step: Step) -> None:
            if hook == "shift":
                points.append(step.point.clone())
            if hook == "outputs":
                points.append(step.outputs().detach())

        def direction(self, step: Step, d: Tensor) -> None:
            if hook == "direction":
                points.append(step.point.clone())
            if hook == "gradient":
                points.append(step.gradient().clone())
            if hook == "model":
                points.append(torch.cat([p.detach().flatten() for p in step.local.model.parameters]))

    return Watcher(), points


class Drifts(Mechanism):
    """Moves the point on, from wherever it is, and asks for a gradient there."""

    def shift(self, step: Step) -> None:
        step.move(torch.ones_like(step.w), 0.1)
        step.move(step.gradient(), 0.1)


class Creeps(Mechanism):
    """The same, a tensor at a time."""

    def shift(self, step: Step) -> None:
        pieces = step.gradient_pieces()
        step.move_pieces(pieces, 0.1)
        step.move_pieces(pieces, 0.1, times=pieces)


class Hesitates(Mechanism):
    """Climbs in every other step; in the last of a round, not in the first."""

    def shift(self, step: Step) -> None:
        if step.index % 2:
            step.climb(0.3, normalize=True)


class Shrinks(Mechanism):
    """Weight decay as a term of the loss, which no output shows."""

    def loss(self, step: Step, outputs: Tensor) -> Tensor:
        return 0.5 * 0.05 * sum((p.square().sum() for p in step.local.model.parameters), torch.zeros(()))


class Calms(Mechanism):
    """`mean(z²) / 10`."""

    def loss(self, step: Step, outputs: Tensor) -> Tensor:
        return outputs.square().mean() / 10


class CalmsByHand(Calms):
    """The same with its gradient."""

    def loss_gradient(self, step: Step, outputs: Tensor) -> Tensor:
        return outputs / (5 * outputs.numel())


class CalmsInTwo(Calms):
    """The same, and what to multiply it by."""

    def loss_gradient(self, step: Step, outputs: Tensor) -> tuple[Tensor, float]:
        return outputs, 1 / (5 * outputs.numel())


@pytest.mark.parametrize("hook", ["shift", "outputs", "direction", "gradient", "model"])
def test_a_mechanism_that_asks_sees_the_whole_point(hook, plainly, without_chains, lifts):
    watching, quick = watcher(hook)
    train("no bias first", [LocalAscent(0.3), watching])
    assert len(quick) == STEPS
    assert len(lifts) == (0 if hook in ("shift", "outputs") else STEPS), "the first layer catches up"
    for otherwise in (plainly, without_chains):
        otherwise()
        watching, plain = watcher(hook)
        train("no bias first", [LocalAscent(0.3), watching])
        for mine, other in zip(quick, plain, strict=True):
            close(mine, other)


@pytest.mark.parametrize("other", [Drifts(), Creeps()])
@pytest.mark.parametrize("climbs", ["before", "after", "before and after", "twice after"])
def test_other_moves_before_and_after(other, climbs, plainly, without_chains):
    ascent, again = LocalAscent(0.3), LocalAscent(0.2, normalize=False)
    mechanisms = {
        "before": [ascent, other],
        "after": [other, ascent],
        "before and after": [ascent, other, again],
        "twice after": [other, ascent, again],
    }[climbs]
    quick = train("relu in place", mechanisms)
    assert not torch.allclose(quick.server.w, train("relu in place", [other]).server.w, rtol=1e-3)
    for otherwise in (plainly, without_chains):
        otherwise()
        same(quick, train("relu in place", mechanisms))


def test_a_step_without_a_climb_after_one_with(lifts, without_chains):
    quick = train("deep", [Hesitates()])
    assert len(lifts) == STEPS / 2
    without_chains()
    same(quick, train("deep", [Hesitates()]))


def test_batches_for_which_it_pays():
    chain = Chain.of(ff.FlatModel(build("images")))
    assert chain is not None
    assert chain.pays(torch.empty(9, *SHAPES["image"]))
    assert not chain.pays(torch.empty(10, *SHAPES["image"])), "24 x 16 terms are fewer than 10 x (24 + 16)"


# -- the adaptive ascent ---------------------------------------------------------------------------


@pytest.mark.parametrize(("eta", "on"), [(0.2, True), (1.0, True), (3.0, True), (1e-8, False), (0.0, False)])
@pytest.mark.parametrize("model", ["rows", "no bias", "no bias first", "one layer", "deep"])
def test_the_same_adaptive_ascent(model, eta, on, lifts, by_autograd, without_chains):
    quick = train(model, ff.fedasam(eta=eta), weight_decay=0.01)
    assert len(lifts) == on * STEPS and not by_autograd
    without_chains()
    same(quick, train(model, ff.fedasam(eta=eta), weight_decay=0.01))


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("batch_size", [1, 10, 14])
def test_the_same_adaptive_ascent_of_other_batches(batch_size, optimiser, lifts, without_chains):
    quick = train("rows", "fedasam", batch_size, **OPTIMISERS[optimiser])
    assert len(lifts) == 3 * 2 * 2 * -(-14 // batch_size)
    without_chains()
    same(quick, train("rows", "fedasam", batch_size, **OPTIMISERS[optimiser]))


def test_the_adaptive_ascent_counts():
    """Else the runs above would compare less than they say."""
    runs = [train("rows", ff.fedasam(rho, eta)).server.w for rho, eta in [(0, 1), (0.7, 0.2), (0.7, 1)]]
    assert not any(torch.allclose(one, other, rtol=1e-4) for one, other in pairwise(runs))


ADAPTIVE: dict[str, list[Mechanism]] = {
    "after a momentum": [NesterovMomentum(0.8), AdaptiveAscent()],
    "after a move": [Drifts(), AdaptiveAscent()],
    "before a move": [AdaptiveAscent(), Creeps()],
    "between moves": [Creeps(), AdaptiveAscent(), Drifts()],
    "after another": [LocalAscent(0.3), AdaptiveAscent()],
    "before another": [AdaptiveAscent(), LocalAscent(0.3)],
    "twice": [AdaptiveAscent(0.3), AdaptiveAscent(0.5)],
    "twice, otherwise": [AdaptiveAscent(0.3, 0.2), AdaptiveAscent(0.5, 0.7)],
    "twice, once small": [AdaptiveAscent(0.3, 0.2), AdaptiveAscent(0.5, 0.0)],
    "beside a loss": [CalmsInTwo(), AdaptiveAscent()],
}


@pytest.mark.parametrize("model", ["relu in place", "no bias first"])
@pytest.mark.parametrize("mechanisms", ADAPTIVE)
def test_the_adaptive_ascent_beside_others(mechanisms, model, by_hand, without_chains):
    quick = train(model, ADAPTIVE[mechanisms])
    assert by_hand
    without_chains()
    same(quick, train(model, ADAPTIVE[mechanisms]))


@pytest.mark.parametrize("hook", ["shift", "outputs", "direction", "gradient", "model"])
@pytest.mark.parametrize("before", [[], [Drifts()], [NesterovMomentum(0.8)]])
def test_the_whole_point_after_an_adaptive_ascent(before, hook, lifts, without_chains):
    watching, quick = watcher(hook)
    train("no bias first", [*before, AdaptiveAscent(), watching])
    assert len(quick) == STEPS
    assert len(lifts) == (0 if hook in ("shift", "outputs") else STEPS)
    without_chains()
    watching, plain = watcher(hook)
    train("no bias first", [*before, AdaptiveAscent(), watching])
    for mine, other in zip(quick, plain, strict=True):
        close(mine, other)


@settings(deadline=None, max_examples=60)
@given(
    networks(), st.integers(1, 9), st.floats(0, 2), st.floats(1e-3, 5), st.sampled_from([0, 1, -1]),
    st.integers(0, 99),
)  # fmt: skip
def test_the_stretched_point_is_where_the_formula_leads(module, number, rho, eta, power, seed):
    x = inputs_for(module, number, seed)
    y = targets_for("cross-entropy", module(x), seed)
    for p in module.parameters():
        p.data.mul_(10.0**power)
    named = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    gradients = torch.autograd.grad(
        F.cross_entropy(functional_call(module, named, (x,)), y), list(named.values())
    )
    stretch = [v.detach().abs() + eta if "weight" in n else torch.ones_like(v) for n, v in named.items()]
    norm = torch.cat([(t * g).flatten() for t, g in zip(stretch, gradients, strict=True)]).norm()
    assume(norm > 1e-9 or norm == 0)
    scale = rho / norm if norm else 0.0
    point = {
        n: v.detach() + scale * t.square() * g
        for (n, v), t, g in zip(named.items(), stretch, gradients, strict=True)
    }

    model = ff.FlatModel(module, dtype=torch.float64)
    chain, at = Chain.of(model), model.split(model.vector)
    assert chain is not None
    chain.backward(differentiate_loss(F.cross_entropy, chain.forward(at, x), y)[1])
    into = torch.full_like(model.vector, torch.nan)
    sizes = torch.cat([(t - eta).flatten() for t in stretch])
    chain.climb_stretched(rho, eta, sizes, into, model.split(into))
    chain.rest_of(model.vector).add_(chain.rest_of(into), alpha=chain.scale)
    again = chain.forward_again(at)
    near(again, functional_call(module, point, (x,)))
    went_on(model, chain, point, again, x, y)


# -- what it is not for ----------------------------------------------------------------------------


class Own(nn.Module):
    """Uses its layer's weights a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) @ self.layer.weight


class OwnSequence(nn.Sequential):
    """Does more than its parts."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnLinear(nn.Linear):
    """Does another thing."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def linear(inputs: int = FEATURES, outputs: int = FEATURES) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def between(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(linear(), *middle, linear())


def tied(name: str) -> nn.Module:
    first, second = linear(), linear()
    setattr(second, name, getattr(first, name))
    return nn.Sequential(first, nn.ReLU(), second)


def repeated() -> nn.Module:
    layer = linear()
    return nn.Sequential(layer, nn.ReLU(), layer)


def frozen(layer: int, name: str) -> nn.Module:
    model = between(nn.ReLU())
    getattr(model[layer], name).requires_grad = False
    return model


def bare() -> nn.Module:
    return nn.Sequential(nn.Flatten(), linear(), nn.ReLU(), linear())


UNFIT: dict[str, Callable[[], nn.Module]] = {
    "a forward of its own": Own,
    "a sequence of its own": lambda: OwnSequence(linear(), nn.ReLU(), linear()),
    "a layer of its own": lambda: nn.Sequential(OwnLinear(FEATURES, FEATURES), nn.ReLU(), linear()),
    "no sequence": linear,
    "a sequence in it": lambda: between(nn.Sequential(nn.ReLU())),
    "tied weights": lambda: tied("weight"),
    "tied biases": lambda: tied("bias"),
    "a layer twice": repeated,
    "a bias that is not trained": lambda: frozen(0, "bias"),
    "weights that are not trained": lambda: frozen(2, "weight"),
    "weights made of others": lambda: nn.Sequential(spectral_norm(linear())),
    "weights made of others, in the new way": lambda: nn.Sequential(parametrizations.weight_norm(linear())),
    "weights left out": lambda: nn.Sequential(prune.random_unstructured(linear(), "weight", 0.5)),
    "another activation": lambda: between(nn.Tanh()),
    "a relation of ReLU": lambda: between(nn.ReLU6()),
    "dropout": lambda: between(nn.ReLU(), nn.Dropout(0.5)),
    "dropout alone": lambda: between(nn.Dropout(0.5)),
    "dropout first": lambda: nn.Sequential(nn.Dropout(0.5), linear()),
    "a normalisation": lambda: between(nn.BatchNorm1d(FEATURES), nn.ReLU()),
    "a normalisation alone": lambda: between(nn.BatchNorm1d(FEATURES, affine=False)),
    "nothing between": between,
    "ReLU twice": lambda: between(nn.ReLU(), nn.ReLU()),
    "ReLU first": lambda: nn.Sequential(nn.ReLU(), linear()),
    "ReLU last": lambda: nn.Sequential(linear(), nn.ReLU()),
    "something else last": lambda: nn.Sequential(linear(), nn.ReLU(), nn.LogSoftmax(1)),
    "flattened otherwise": lambda: nn.Sequential(nn.Flatten(0), linear()),
    "flattened in part": lambda: nn.Sequential(nn.Flatten(1, 2), linear()),
    "flattened twice": lambda: nn.Sequential(nn.Flatten(), nn.Flatten(), linear()),
    "flattened later": lambda: nn.Sequential(linear(), nn.Flatten()),
    "a convolution first": lambda: nn.Sequential(nn.Conv1d(FEATURES, 4, 1), nn.Flatten()),
    "a convolution after ReLU": lambda: between(nn.ReLU(), nn.Conv1d(1, 1, 1), nn.ReLU()),
    "only a convolution": lambda: nn.Sequential(nn.Flatten(), nn.Conv1d(1, 1, 1)),
    "another kind of layer": lambda: between(nn.ReLU(), nn.Bilinear(FEATURES, FEATURES, FEATURES), nn.ReLU()),
}


@pytest.mark.parametrize("model", UNFIT)
def test_models_it_is_not_for(model):
    assert Chain.of(ff.FlatModel(UNFIT[model]())) is None


HOOKS = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("part", [None, 0, 1, 2, 3])
def test_not_where_a_hook_looks_on(hook, part):
    model = bare()
    handle = getattr(model if part is None else model[part], hook)(lambda *_: None)
    flat = ff.FlatModel(model)
    assert Chain.of(flat) is None
    handle.remove()
    assert Chain.of(flat) is not None


def test_hooks_are_called(by_hand):
    model, seen = build("rows"), []
    model[1].register_forward_hook(lambda *_: seen.append("forward"))
    model[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    ff.train(ff.Federation([samples(4)]), model, "fedsam", rounds=1, dtype=torch.float64)
    assert seen.count("backward") == 2 and seen.count("forward") >= 2
    assert not by_hand


def test_samples_it_is_not_for():
    images, rows = (Chain.of(ff.FlatModel(build(name))) for name in ("images", "rows"))
    assert images is not None and rows is not None
    assert images.takes(torch.empty(4, *SHAPES["image"])) and images.takes(torch.empty(4, FEATURES))
    assert rows.takes(torch.empty(4, FEATURES))
    assert not rows.takes(torch.empty(4, 2, FEATURES)), "several rows a sample"
    assert not rows.takes(torch.empty(FEATURES)), "one sample alone"


# -- terms of the loss -----------------------------------------------------------------------------


class CalmsOtherwise(TrajectoryLoss):
    """Another loss than the gradient that it inherits belongs to."""

    def loss(self, step: Step, outputs: Tensor) -> Tensor:
        return outputs.square().mean()


@pytest.mark.parametrize(
    ("method", "on"),
    [
        (ff.METHODS["fedavg"](), True),
        (ff.METHODS["fedgmt"](), True),
        (ff.METHODS["fedgmt_v2"](), True),
        (ff.METHODS["fedntd"](), False),
        (ff.Method("by hand", [CalmsByHand()]), True),
        (ff.Method("by autograd", [Calms()]), False),
        (ff.Method("one of two", [CalmsByHand(), Shrinks()]), False),
        (ff.Method("inherited", [CalmsOtherwise()]), False),
    ],
    ids=lambda value: value.name if isinstance(value, ff.Method) else str(value),
)
def test_a_loss_without_its_gradient_is_left_to_autograd(method, on):
    model = ff.FlatModel(build("rows"))
    training = ClientRound(model, method, ff.LocalSGD(), F.cross_entropy, seed=0)
    assert (training.chain is not None) is on


def test_a_loss_of_the_weights_counts(by_hand):
    decayed = train("rows", "fedavg", weight_decay=0.05)
    by_hand.clear()
    shrunk = train("rows", [Shrinks()])
    assert not by_hand
    close(shrunk.server.w, decayed.server.w)


@pytest.mark.parametrize("more", [[], [LocalAscent(0.3)], [LocalAscent(0.3), Drifts()]])
def test_a_loss_with_its_gradient_counts(more, by_hand):
    mine = train("rows", [CalmsByHand(), *more], weight_decay=0.05)
    assert by_hand
    by_hand.clear()
    other = train("rows", [Calms(), *more], weight_decay=0.05)
    assert not by_hand
    same(mine, other)
    assert not torch.allclose(
        mine.server.w, train("rows", more or "fedavg", weight_decay=0.05).server.w, rtol=1e-3
    )


@pytest.mark.parametrize("more", [[], [LocalAscent(0.3)], [CalmsByHand()]])
@pytest.mark.parametrize("optimiser", ["decay", "momentum", "clipped"])
def test_a_gradient_and_its_scale_are_their_product(more, optimiser, by_hand, without_chains):
    in_two = train("rows", [CalmsInTwo(), *more], **OPTIMISERS[optimiser])
    same(in_two, train("rows", [CalmsByHand(), *more], **OPTIMISERS[optimiser]))
    assert by_hand
    by_hand.clear()
    without_chains()
    for term in (CalmsInTwo(), CalmsByHand()):
        same(in_two, train("rows", [term, *more], **OPTIMISERS[optimiser]))
    assert not by_hand


WRONG: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "another shape": (lambda z: (z[:1], 0.1), "returns a tensor of shape"),
    "another shape alone": (lambda z: z[:, :1], "returns a tensor of shape"),
    "a tensor as scale": (lambda z: (z, torch.tensor(0.1)), r"returns \(tensor"),
    "a word as scale": (lambda z: (z, "0.1"), r"returns \(tensor"),
    "the scale first": (lambda z: (0.1, z), r"returns \(0.1, tensor"),
    "three": (lambda z: (z, 0.1, 0.1), r"returns \(tensor"),
    "numbers alone": (lambda z: (0.1, 0.1), "returns 0.1"),
    "nothing": (lambda z: None, "returns nothing"),
    "nothing and a scale": (lambda z: (None, 0.1), "returns nothing"),
}


@pytest.mark.parametrize("by_chain", [True, False])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_gradient_of_another_kind_is_a_mistake(wrong, by_chain, without_chains):
    class Errs(Calms):
        def loss_gradient(self, step: Step, outputs: Tensor) -> Tensor:
            return WRONG[wrong][0](outputs)

    if not by_chain:
        without_chains()
    with pytest.raises(ff.FedflatError, match=f"(?s)errs: loss_gradient {WRONG[wrong][1]}.*outputs' shape"):
        train("rows", [Errs()])


class CalmsWithAGraph(Calms):
    """Its gradient could itself be differentiated."""

    def loss_gradient(self, step: Step, outputs: Tensor) -> Tensor:
        outputs = outputs.detach().requires_grad_()
        return torch.autograd.grad(self.loss(step, outputs), outputs, create_graph=True)[0]


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_gradient_with_a_graph_is_taken_as_it_is(optimiser, by_hand):
    run = train("rows", [CalmsWithAGraph(), LocalAscent(0.3)], **OPTIMISERS[optimiser])
    assert by_hand
    same(run, train("rows", [CalmsByHand(), LocalAscent(0.3)], **OPTIMISERS[optimiser]))


class CalmsByAutograd(Calms):
    """Its gradient by autograd, in itself."""

    def loss_gradient(self, step: Step, outputs: Tensor) -> Tensor:
        outputs = outputs.detach().requires_grad_()
        return torch.autograd.grad(self.loss(step, outputs), outputs)[0]


def test_the_gradient_of_a_term_may_be_autograds(by_hand):
    run = train("rows", [CalmsByAutograd()])
    assert by_hand
    close(run.server.w, train("rows", [Calms()]).server.w)


# -- what else people do -------------------------------------------------------------------------


def with_loss(loss: Callable[[Tensor, Tensor], Tensor], method: str = "fedavg") -> Tensor:
    local = ff.LocalSGD(lr=0.1, batch_size=BATCH)
    federation = ff.Federation([samples(14)])
    run = ff.train(federation, build("rows"), method, local, rounds=1, dtype=torch.float64, loss=loss)
    return run.server.w


def test_a_loss_may_change_outputs_in_place(by_hand):
    close(
        with_loss(lambda z, y: F.cross_entropy(z.mul_(2), y)),
        with_loss(lambda z, y: F.cross_entropy(2 * z, y)),
    )
    assert by_hand


def test_a_loss_whose_gradient_is_one_number_beside_a_pull(without_chains):
    quick = with_loss(lambda z, y: z.sum(), "fedgmt")
    without_chains()
    close(quick, with_loss(lambda z, y: z.sum(), "fedgmt"))


def test_a_layer_with_a_forward_of_its_own_alone():
    model = network(4, 4)
    model[1].forward = torch.tanh
    assert Chain.of(ff.FlatModel(model)) is None


def test_hooks_on_all_modules_and_on_parameters():
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert Chain.of(ff.FlatModel(build("rows"))) is None
    finally:
        handle.remove()
    model = ff.FlatModel(build("rows"))
    assert Chain.of(model) is not None
    model.parameters[0].register_hook(lambda gradient: 0 * gradient)
    assert Chain.of(model) is None


class Listens(Mechanism):
    """Counts the passes through the first layer, and lets them go on by themselves in later rounds."""

    def begin(self, local: Local) -> None:
        local.memo[self] = None
        if local.round == 0:
            seen = local.model.module[0]
            local.memo[self] = seen.register_forward_hook(lambda *_: heard.append(local.client))

    def end(self, local: Local) -> dict[str, Tensor]:
        if local.memo[self] is not None:
            local.memo[self].remove()
        return {}


heard: list[int] = []


def test_hooks_of_a_mechanism_are_called_while_they_are_there(by_hand):
    heard.clear()
    train("rows", [Listens()])
    assert len(heard) == len(by_hand) == STEPS // 2, "the first of two rounds, then the second"


def test_a_gradient_that_cancels_is_climbed_along_all_the_same(lifts, plainly):
    """Two samples whose shares of the first layer's gradient are opposite but for a tenth of a millionth."""
    x = torch.ones(2, FEATURES) * torch.tensor([[1.0], [1.0 + 1e-7]])
    clients = [(x, torch.tensor([0, 1]))]
    model = nn.Sequential(nn.Linear(FEATURES, 2, bias=False))
    model[0].weight.data.zero_()
    local = ff.LocalSGD(lr=0.1, batch_size=2, steps=1)
    settings = {"local": local, "rounds": 1, "method": ff.fedsam(rho=0.5)}
    quick = ff.train(ff.Federation(clients), copy.deepcopy(model), **settings)
    assert not lifts, "not past the layer, where rounding would decide"
    plainly()
    plain = ff.train(ff.Federation(clients), copy.deepcopy(model), **settings)
    assert plain.server.w.norm() > 0
    torch.testing.assert_close(quick.server.w, plain.server.w)


@pytest.mark.parametrize("method", ["fedsam", "fedasam"])
@pytest.mark.parametrize("part", [0, 2])
def test_a_layer_with_a_second_name(part, method, without_chains):
    def trained() -> ff.Run:
        model = build("rows")
        model.also = model[part].weight  # and comes before all others
        federation = ff.Federation([samples(14)])
        local = ff.LocalSGD(lr=0.1, batch_size=BATCH)
        return ff.train(federation, model, method, local, rounds=2, dtype=torch.float64)

    quick = trained()
    without_chains()
    same(quick, trained())


class Climbs(Mechanism):
    """Moves the point too late, where there is none."""

    def direction(self, step: Step, d: Tensor) -> None:
        step.climb(0.1, normalize=True)


class ClimbsFar(Mechanism):
    """The same, far where weights are large."""

    def direction(self, step: Step, d: Tensor) -> None:
        step.climb_stretched(0.1, 0.2, (True, False, True, False))


@pytest.mark.parametrize("climbing", [Climbs(), ClimbsFar()])
def test_climbing_without_a_shift_is_a_mistake(climbing):
    with pytest.raises(ff.FedflatError, match="The point is moved in a mechanism's hook `shift`"):
        train("rows", [climbing])
