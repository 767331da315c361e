"""SAM's ascent past a linear layer that samples go into, against the plain way and against autograd."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import spectral_norm

import fedflat as ff
from fedflat.first_layer import FirstLayer
from fedflat.local import Step
from fedflat.mechanism import Mechanism
from fedflat.mechanisms import LocalAscent

FEATURES, CLASSES, BATCH = 24, 3, 5
METHODS = ["fedsam", "mofedsam", "fedgamma", "fedspeed", "fedsam_nesterov"]


def samples(number: int, shape: tuple[int, ...] = (FEATURES,), seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(number, *shape, generator=draw, dtype=torch.float64)
    return x, torch.randint(CLASSES, (number,), generator=draw)


def network(*middle: nn.Module, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 16, bias), *middle, nn.Linear(16, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "relu in place": lambda: network(nn.ReLU(inplace=True)),
    "dropout": lambda: network(nn.Dropout(0.5), nn.Tanh()),
    "no bias": lambda: network(nn.ReLU(), bias=False),
    "deep": lambda: network(nn.Sequential(nn.Tanh(), nn.Linear(16, 16), nn.BatchNorm1d(16)), nn.ReLU()),
    "one layer": lambda: nn.Sequential(network()[1]),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]()


def train(name: str, method: str | list[Mechanism]):
    """A run that is the same every time."""
    clients = [samples(14, seed=seed) for seed in range(3)]
    return ff.train(
        ff.Federation(clients, test=clients[0]),
        build(name),
        method,
        rounds=3,
        local=ff.LocalSGD(lr=0.1, epochs=2, batch_size=BATCH, weight_decay=0.01),
        dtype=torch.float64,
    )


@pytest.fixture
def plainly(monkeypatch):
    """Lets runs compute every gradient."""
    return lambda: monkeypatch.setattr(FirstLayer, "pays", lambda self, samples: False)


@pytest.fixture
def lifts(monkeypatch) -> list[int]:
    """The batches whose second pass went without the layer's weights."""
    seen: list[int] = []
    second_pass = FirstLayer.second_pass

    def noting(self: FirstLayer, inputs: Tensor) -> Tensor:
        seen.append(len(inputs))
        return second_pass(self, inputs)

    monkeypatch.setattr(FirstLayer, "second_pass", noting)
    return seen


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_the_same_run_as_the_plain_way(model, method, plainly, lifts):
    quick = train(model, method)
    assert len(lifts) == 3 * 3 * 2 * 3, "every step of every client"
    plainly()
    plain = train(model, method)
    assert len(lifts) == 3 * 3 * 2 * 3
    torch.testing.assert_close(quick.server.w, plain.server.w, rtol=1e-11, atol=1e-13)
    for mine, other in zip(quick.history, plain.history, strict=True):
        assert mine["train_loss"] == pytest.approx(other["train_loss"], rel=1e-11)
        assert [mine[key] for key in ("forward", "backward")] == [
            other[key] for key in ("forward", "backward")
        ]


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 9),
    st.integers(1, 30),
    st.integers(1, 12),
    st.floats(0, 2),
    st.booleans(),
    st.integers(0, 99),
)
def test_the_point_is_where_autograd_leads(number, features, width, rho, normalize, seed):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, CLASSES)).double()
    x, y = samples(number, (features,), seed)
    named = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    gradients = torch.autograd.grad(
        F.cross_entropy(functional_call(module, named, (x,)), y), list(named.values())
    )
    length = torch.cat([g.flatten() for g in gradients]).norm() if normalize else 1.0
    point = {n: v.detach() + rho / length * g for (n, v), g in zip(named.items(), gradients, strict=True)}

    model = ff.FlatModel(module, dtype=torch.float64)
    layer = FirstLayer.of(model)
    assert layer is not None
    others = layer.climb(F.cross_entropy(layer.first_pass(x), y), rho, normalize)
    moved = [
        model.parameters[index] + layer.scale * piece
        for index, piece in zip(layer.others, others, strict=True)
    ]
    own = [
        model.parameters[index] + layer.scale * piece
        for index, piece in zip(layer.own, layer.gradient(), strict=True)
    ]
    for value, expected in zip([*own, *moved], point.values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        for index, value in zip(layer.others, moved, strict=True):
            model.parameters[index].copy_(value)
    torch.testing.assert_close(
        layer.second_pass(x), functional_call(module, point, (x,)), rtol=1e-9, atol=1e-11
    )


def watcher(hook: str) -> tuple[Mechanism, list[Tensor]]:
    """A mechanism that notes where the point is, before or after the gradient is taken there."""
    points: list[Tensor] = []

    class Watcher(Mechanism):
        def shift(self, step: Step) -> None:
            if hook == "shift":
                points.append(step.point.clone())

        def direction(self, step: Step, d: Tensor) -> None:
            if hook == "direction":
                points.append(step.point.clone())

    return Watcher(), points


class Drifts(Mechanism):
    """Moves the point on, from wherever it is, and asks for a gradient there."""

    def shift(self, step: Step) -> None:
        step.move(torch.ones_like(step.w), 0.1)
        step.move(step.gradient(), 0.1)


@pytest.mark.parametrize("hook", ["shift", "direction"])
def test_a_mechanism_that_asks_sees_the_whole_point(hook, plainly):
    watching, quick = watcher(hook)
    train("relu in place", [LocalAscent(0.3), watching])
    plainly()
    watching, plain = watcher(hook)
    train("relu in place", [LocalAscent(0.3), watching])
    assert len(quick) == 3 * 3 * 2 * 3
    for mine, other in zip(quick, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("order", [[LocalAscent(0.3), Drifts()], [Drifts(), LocalAscent(0.3)]])
@pytest.mark.parametrize("twice", [False, True])
def test_other_moves_before_and_after(order, twice, plainly):
    mechanisms = [*order, LocalAscent(0.2)] if twice else order
    quick = train("relu in place", mechanisms)
    plainly()
    plain = train("relu in place", mechanisms)
    torch.testing.assert_close(quick.server.w, plain.server.w, rtol=1e-11, atol=1e-13)


class Own(nn.Module):
    """Uses its layer's weights a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) @ self.layer.weight


def tied() -> nn.Module:
    first, second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second)


def repeated() -> nn.Module:
    layer = nn.Linear(FEATURES, FEATURES)
    return nn.Sequential(layer, nn.ReLU(), layer)


def without_its_bias() -> nn.Module:
    model = network(nn.ReLU())
    model[1].bias.requires_grad = False
    return model


def hooked() -> nn.Module:
    model = network(nn.ReLU())
    model.register_forward_pre_hook(lambda _, inputs: inputs)
    return model


UNFIT: dict[str, Callable[[], nn.Module]] = {
    "a forward of its own": Own,
    "tied weights": tied,
    "a layer twice": repeated,
    "a bias that is not trained": without_its_bias,
    "weights made of others": lambda: nn.Sequential(spectral_norm(nn.Linear(FEATURES, FEATURES))),
    "a hook before": hooked,
    "another layer first": lambda: nn.Sequential(nn.Conv1d(FEATURES, 4, 1), nn.Flatten()),
    "flattened otherwise": lambda: nn.Sequential(nn.Flatten(0), nn.Linear(FEATURES, FEATURES)),
    "only flattened": lambda: nn.Sequential(nn.Flatten(), nn.Conv1d(1, 1, 1)),
}


@pytest.mark.parametrize("model", UNFIT)
def test_models_it_is_not_for(model):
    assert FirstLayer.of(ff.FlatModel(UNFIT[model]())) is None


def test_batches_it_is_not_for():
    layer = FirstLayer.of(ff.FlatModel(network(nn.ReLU())))
    assert layer is not None
    assert layer.pays(torch.empty(9, FEATURES))
    assert not layer.pays(torch.empty(10, FEATURES)), "24 x 16 terms are fewer than 10 x (24 + 16)"
    bare = FirstLayer.of(ff.FlatModel(nn.Sequential(nn.Linear(FEATURES, 16))))
    assert bare is not None
    assert not bare.pays(torch.empty(4, 2, FEATURES)), "several rows a sample"


def test_a_failing_pass_leaves_the_layer_as_it_was():
    model = ff.FlatModel(network(nn.ReLU()))
    layer = FirstLayer.of(model)
    assert layer is not None
    with pytest.raises(RuntimeError, match="shape"):
        layer.first_pass(torch.empty(2, FEATURES + 1))
    assert "forward" not in vars(layer.layer)
