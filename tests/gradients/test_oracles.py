"""One suite for every oracle: its gradients against plain PyTorch, whole rounds against those by autograd.

A new oracle is one more entry of `ORACLES`, with the networks that it takes.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import pytest
import tiny
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune, spectral_norm

import fedflat as ff
from fedflat.client.optimisers import LocalOptimiser
from fedflat.client.round import ClientRound
from fedflat.client.step import Step
from fedflat.core.flat import Flat, FlatModel
from fedflat.core.messages import Download
from fedflat.data.federation import Shard
from fedflat.gradients import make_oracle
from fedflat.gradients.autograd import Autograd
from fedflat.gradients.base import LossFunction, Oracle, Point, Pull, Terms
from fedflat.gradients.dense import Ascended, Dense, DenseGradient, differentiate_loss, is_watched
from fedflat.methods.mechanism import Mechanism
from fedflat.methods.mechanisms import AdaptiveAscent, LocalAscent, NesterovMomentum, TrajectoryLoss
from fedflat.models import MODELS
from fedflat.models.conv.conv2d import Conv2d
from fedflat.models.mlp import mlp
from fedflat.server.server import Server

FEATURES, CLASSES, BATCH, WORDS = 24, 3, 5, 30
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
near = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-10)
equal = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


# -- networks --------------------------------------------------------------------------------------


def network(*widths: int, bias: str = "", inplace: bool = False) -> nn.Sequential:
    """Layers of these widths; with `bias="01"` the first has none, the second has one."""
    parts: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(pairwise((FEATURES, *widths))):
        with_bias = bias[number : number + 1] != "0"
        parts += [nn.Linear(inputs, outputs, with_bias), nn.ReLU(inplace)]
    return nn.Sequential(*parts[:-1])


def flattened(*widths: int, bias: str = "") -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), *network(*widths, bias=bias))


def turned() -> nn.Sequential:
    model = network(16, CLASSES)
    for layer in (model[0], model[2]):
        layer.weight.data = layer.weight.data.mT.contiguous().mT
    return model


class Words(nn.Module):
    """Sparse gradients, a parameter that nothing depends on, one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 5, sparse=True)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words(x) * self.frozen)


def tied_layers() -> nn.Sequential:
    first, second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(FEATURES, CLASSES))


ROW, IMAGE, TEXT = (FEATURES,), (2, 3, 4), (7,)
DENSE: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "rows": (ROW, lambda: network(16, CLASSES)),
    "images": (IMAGE, lambda: flattened(16, CLASSES)),
    "flattened rows": (ROW, lambda: flattened(16, CLASSES)),
    "relu in place": (ROW, lambda: network(16, CLASSES, inplace=True)),
    "no bias": (ROW, lambda: network(16, 9, CLASSES, bias="000")),
    "no bias first": (ROW, lambda: network(16, CLASSES, bias="01")),
    "no bias last": (IMAGE, lambda: flattened(16, 9, CLASSES, bias="110")),
    "one layer": (ROW, lambda: network(16)),
    "one layer without bias": (IMAGE, lambda: flattened(16, bias="0")),
    "deep": (ROW, lambda: network(16, 12, 7, 9, CLASSES, bias="10111")),
    "weights turned in memory": (ROW, turned),
}
NETWORKS = DENSE | {
    "another activation": (ROW, lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))),
    "normalisation and dropout": (
        ROW,
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES)
        ),
    ),
    "convolution": (
        IMAGE,
        lambda: nn.Sequential(
            Conv2d(2, 4, kernel_size=3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, CLASSES)
        ),
    ),
    "words": (TEXT, Words),
    "tied layers": (ROW, tied_layers),
}  # fmt: skip


@dataclass
class Kind:
    """An oracle, how it is made for a model, and of which networks."""

    make: Callable[[FlatModel, LossFunction], Oracle | None]
    networks: Sequence[str]


ORACLES = {"autograd": Kind(Autograd, list(NETWORKS)), "dense": Kind(Dense.of, list(DENSE))}
every = pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, oracle in ORACLES.items() for name in oracle.networks]
)


def build(name: str, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return NETWORKS[name][1]().double()


def samples(name: str, number: int = BATCH, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shape = NETWORKS[name][0]
    if shape is TEXT:
        x = torch.randint(WORDS, (number, *shape), generator=draw)
    else:
        x = torch.randn(number, *shape, generator=draw, dtype=torch.float64)
    return x, torch.randint(CLASSES, (number,), generator=draw)


def made(
    kind: str, module: nn.Module, loss: LossFunction = F.cross_entropy
) -> tuple[Oracle, FlatModel, Flat]:
    """An oracle in a client's round, its model, and the point where the model is."""
    model = FlatModel(copy.deepcopy(module), torch.float64)
    oracle = ORACLES[kind].make(model, loss)
    assert oracle is not None, "it takes this network"
    oracle.begin(model.read_buffers())
    return oracle, model, model.layout.flat(model.vector.clone())


# -- plain PyTorch ---------------------------------------------------------------------------------


def plain(
    module: nn.Module,
    at: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
    term: Callable[[Tensor], Tensor] | None = None,
    loss: LossFunction = F.cross_entropy,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain loss of a module with these parameters, and the gradient of it and a term."""
    values = {name: value.detach().clone().requires_grad_() for name, value in at.items()}
    outputs = functional_call(copy.deepcopy(module), values, (x,))
    value = loss(outputs, y)
    total = value if term is None else value + term(outputs)
    found = torch.autograd.grad(total, list(values.values()), allow_unused=True)
    pieces = [torch.zeros_like(v) if g is None else g for v, g in zip(values.values(), found, strict=True)]
    dense = [g.to_dense() if g.is_sparse else g for g in pieces]
    return value.detach(), dict(zip(values, dense, strict=True))


def length(pieces: dict[str, Tensor]) -> float:
    return torch.cat([piece.flatten() for piece in pieces.values()]).norm().item()


def moved(at: dict[str, Tensor], by: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    return {name: value.detach() + scale * by[name] for name, value in at.items()}


def uphill(
    at: dict[str, Tensor], gradient: dict[str, Tensor], far: float, normalize: bool
) -> dict[str, Tensor]:
    return moved(at, gradient, far / length(gradient) if normalize else far)


def of(model: FlatModel, flat: Flat) -> dict[str, Tensor]:
    """The parameters at a point, by name."""
    return {name: piece.clone() for name, piece in model.layout.named(flat.vector).items()}


def seeded(ask: Callable, *arguments):
    """Ask with the same dropout every time."""
    torch.manual_seed(7)
    return ask(*arguments)


# -- one question ----------------------------------------------------------------------------------


def shared(z: Tensor) -> list[Tensor]:
    soft = z.softmax(1)
    return [soft.square().sum(), soft[:, 0].log().mean()]


def calm(z: Tensor) -> Tensor:
    """`mean(z²) / 10`."""
    return z.square().mean() / 10


def calming(z: Tensor, share: float = 1.0) -> Pull:
    return Pull(z, share / (5 * z.numel()))


TERMS: dict[str, tuple[Terms | None, Callable[[Tensor], Tensor] | None]] = {
    "none": (None, None),
    "an empty list": (lambda z: [], None),
    "a tensor": (lambda z: [calm(z)], calm),
    "a tensor of one entry": (lambda z: [calm(z).view(1)], calm),
    "tensors of one graph": (shared, lambda z: sum(shared(z))),
    "a pull": (lambda z: [calming(z.detach())], calm),
    "a pull with a graph": (lambda z: [calming(z)], calm),
    "two pulls": (lambda z: [calming(z, 0.25), calming(z.clone(), 0.75)], calm),
    "a pull beside a tensor": (lambda z: [calming(z), z.exp().mean()], lambda z: calm(z) + z.exp().mean()),
    "a number": (lambda z: [0.5], None),
    "a constant": (lambda z: [z.new_ones(())], None),
}


@every
@pytest.mark.parametrize("term", TERMS)
def test_a_gradient_is_torchs(kind, name, term):
    module, (x, y) = build(name), samples(name)
    oracle, model, w = made(kind, module)
    terms, written_out = TERMS[term]
    for flat in (w, model.layout.flat(w.vector * 1.5 + 0.1)):
        before = flat.vector.clone()
        value, expected = seeded(plain, module, of(model, flat), x, y, written_out)
        gradient = seeded(oracle.gradient, Point(flat), x, y, terms)
        close(gradient.loss, value)
        assert not gradient.loss.requires_grad and flat.vector.equal(before)
        found = model.layout.empty()
        found.vector.fill_(torch.nan)
        gradient.write(found)
        close(of(model, found), expected)
        for scale, pull in [(-0.3, 0.0), (-0.3, -0.02), (0.3, 0.0), (0.0, -0.02), (0.0, 0.0)]:
            there = model.layout.flat(torch.linspace(-1, 1, model.size, dtype=torch.float64))
            wanted = there.vector * (1 + pull) + scale * found.vector
            gradient.add_to(there, scale, pull)
            close(there.vector, wanted)
        again = model.layout.empty()
        gradient.write(again)
        close(again.vector, found.vector)


@every
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("number", [BATCH, 20], ids=["lazily", "at once"])
def test_an_ascent_leads_where_torch_does(kind, name, normalize, number):
    """The point and the gradient there, whichever is read first, and after a second ascent."""
    module, (x, y) = build(name), samples(name, number)
    oracle, model, w = made(kind, module)
    before, start = w.vector.clone(), of(model, w)
    once = uphill(start, seeded(plain, module, start, x, y, calm)[1], 0.3, normalize)
    second = seeded(plain, module, once, x, y, calm)[1]
    twice = uphill(once, second, 0.2, normalize)
    third = seeded(plain, module, twice, x, y, calm)[1]

    def ascend(point: Point, far: float, into: Flat) -> Point:
        return seeded(oracle.ascend, point, x, y, lambda z: [calm(z)], far, normalize, into)

    def gradient(point: Point) -> dict[str, Tensor]:
        found = model.layout.empty()
        seeded(oracle.gradient, point, x, y, lambda z: [calming(z)]).write(found)
        return of(model, found)

    for read_first in (False, True):
        into = model.layout.empty()
        into.vector.fill_(torch.nan)
        point = ascend(Point(w), 0.3, into)
        assert isinstance(point, Ascended) == (kind == "dense" and number == BATCH)
        if read_first:
            near(of(model, point.flat), once)
        near(gradient(point), second)
        near(of(model, point.flat), once)
        near(gradient(point), second)
        assert point.flat is into and w.vector.equal(before)

        further = ascend(point, 0.2, into)
        near(gradient(further), third)
        near(of(model, further.flat), twice)
        assert further.flat is into and w.vector.equal(before)


@every
def test_an_ascent_after_a_move_in_the_same_room(kind, name):
    module, (x, y) = build(name), samples(name)
    oracle, model, w = made(kind, module)
    into = model.layout.flat(w.vector + 0.05)
    aside = of(model, into)
    there = uphill(aside, seeded(plain, module, aside, x, y)[1], 0.3, True)
    point = seeded(oracle.ascend, Point(into), x, y, None, 0.3, True, into)
    gradient = seeded(oracle.gradient, point, x, y, None)
    found = model.layout.empty()
    gradient.write(found)
    near(of(model, found), seeded(plain, module, there, x, y)[1])
    for _ in range(2):  # the first layer moves once
        near(of(model, point.flat), there)


@every
def test_a_gradient_on_other_samples_than_those_of_the_ascent(kind, name):
    module, (x, y), (others, labels) = build(name), samples(name), samples(name, seed=1)
    oracle, model, w = made(kind, module)
    start = of(model, w)
    there = uphill(start, seeded(plain, module, start, x, y)[1], 0.3, True)
    point = seeded(oracle.ascend, Point(w), x, y, None, 0.3, True, model.layout.empty())
    found = model.layout.empty()
    seeded(oracle.gradient, point, others, labels, None).write(found)
    near(of(model, found), seeded(plain, module, there, others, labels)[1])


@every
def test_a_teacher_is_in_evaluation_mode_and_leaves_no_trace(kind, name):
    module, (x, y) = build(name), samples(name)
    oracle, model, w = made(kind, module)
    model.module.train()
    began, start = copy.deepcopy(module).eval(), of(model, w)
    oracle.gradient(Point(w), x, y, None)  # in which BatchNorm learns
    model.stand_on(w)
    buffers = model.read_buffers()
    for scale in (1.0, 0.5):
        other = model.layout.flat(w.vector * scale)
        outputs = oracle.outputs(other, x)
        assert not outputs.requires_grad
        close(outputs, functional_call(began, of(model, other), (x,)).detach())
    assert model.module.training
    torch.testing.assert_close(model.read_buffers(), buffers, rtol=0, atol=0)
    close(of(model, w), start)


# -- losses ----------------------------------------------------------------------------------------


def ignoring(targets: Tensor, which: int) -> Tensor:
    targets = targets.clone()
    targets[::which] = -100
    return targets


LOSSES: dict[str, tuple[LossFunction, Callable[[Tensor, Tensor], Tensor]]] = {
    "cross-entropy": (F.cross_entropy, lambda outputs, y: y),
    "some ignored": (F.cross_entropy, lambda outputs, y: ignoring(y, 2)),
    "cross-entropy with probabilities": (F.cross_entropy, lambda outputs, y: outputs.flip(0).softmax(1)),
    "smoothed": (partial(F.cross_entropy, label_smoothing=0.1), lambda outputs, y: y),
    "as a module": (nn.CrossEntropyLoss(), lambda outputs, y: y),
    "another one ignored": (nn.CrossEntropyLoss(ignore_index=0), lambda outputs, y: y),
    "squares": (F.mse_loss, lambda outputs, y: outputs.flip(0) + 1.0),
    "of some outputs": (lambda outputs, y: outputs[:1].exp().mean(), lambda outputs, y: y),
    "in place": (lambda outputs, y: F.cross_entropy(outputs.mul_(2), y), lambda outputs, y: y),
    "one number for all": (lambda outputs, y: outputs.sum(), lambda outputs, y: y),
}
losses = st.sampled_from(list(LOSSES))


def targets_for(loss: str, outputs: Tensor, seed: int) -> Tensor:
    classes = torch.randint(outputs.shape[1], (len(outputs),), generator=torch.Generator().manual_seed(seed))
    return LOSSES[loss][1](outputs.detach(), classes)


@pytest.mark.parametrize("kind", ORACLES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("term", ["none", "a tensor", "a pull", "a pull beside a tensor"])
def test_other_losses(kind, loss, term):
    """Terms are of the model's outputs, also beside a loss that changes its own in place."""
    module, (x, _) = build("rows"), samples("rows", 6)
    function = LOSSES[loss][0]
    oracle, model, w = made(kind, module, function)
    y = targets_for(loss, module(x), seed=3)
    terms, written_out = TERMS[term]

    def of_a_copy(outputs: Tensor, targets: Tensor) -> Tensor:
        return function(outputs.clone(), targets)

    value, expected = plain(module, of(model, w), x, y, written_out, of_a_copy)
    gradient = oracle.gradient(Point(w), x, y, terms)
    found = model.layout.empty()
    gradient.write(found)
    close(gradient.loss, value)
    close(of(model, found), expected)


@settings(deadline=None, max_examples=40)
@given(losses, st.integers(1, 9), st.integers(1, 6), st.booleans(), st.integers(0, 99))
def test_a_loss_by_hand_has_torchs_bits(loss, number, classes, single, seed):
    outputs = 3 * torch.randn(number, classes, generator=torch.Generator().manual_seed(seed)).double()
    outputs = (outputs.float() if single else outputs).requires_grad_()
    function, targets = LOSSES[loss][0], targets_for(loss, outputs, seed)
    expected = function(outputs.clone(), targets)
    (gradient,) = torch.autograd.grad(expected, outputs)
    with torch.no_grad():
        value, delta = differentiate_loss(function, outputs.detach(), targets)
    assert not value.requires_grad and not delta.requires_grad
    # where all targets are ignored, nothing is a number
    torch.testing.assert_close(value, expected.detach(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(delta, gradient, rtol=0, atol=0, equal_nan=True)


def test_a_loss_that_ignores_all_is_no_number():
    value, delta = differentiate_loss(F.cross_entropy, torch.zeros(2, CLASSES), torch.tensor([-100, -100]))
    assert value.isnan() and not delta.nan_to_num().any()


def test_a_loss_whose_targets_are_wrong_is_refused():
    with pytest.raises(IndexError, match="out of bounds"):
        differentiate_loss(F.cross_entropy, torch.zeros(2, CLASSES), torch.tensor([0, CLASSES]))


@pytest.mark.parametrize("kind", ORACLES)
def test_a_loss_that_does_not_look_at_outputs(kind):
    temperature = torch.ones((), requires_grad=True, dtype=torch.float64)
    oracle, model, w = made(kind, build("rows"), lambda *_: 2 * temperature)
    gradient, found = oracle.gradient(Point(w), *samples("rows"), None), model.layout.empty()
    gradient.write(found)
    assert gradient.loss == 2 and not gradient.loss.requires_grad and not found.vector.any()


@st.composite
def networks(draw: st.DrawFn) -> nn.Sequential:
    widths = draw(st.lists(st.integers(1, 12), min_size=2, max_size=5))
    biases = draw(st.lists(st.booleans(), min_size=4, max_size=4))
    torch.manual_seed(draw(st.integers(0, 99)))
    parts: list[nn.Module] = []
    for inputs, outputs, bias in zip(widths[:-1], widths[1:], biases, strict=False):
        parts += [nn.Linear(inputs, outputs, bias, dtype=torch.float64), nn.ReLU(draw(st.booleans()))]
    first = [nn.Flatten()] if draw(st.booleans()) else []
    return nn.Sequential(*first, *parts[:-1])


@pytest.mark.parametrize("kind", ORACLES)
@settings(deadline=None, max_examples=40)
@given(networks(), losses, st.integers(2, 9), st.floats(0.01, 2), st.booleans(), st.integers(0, 99))
def test_any_fully_connected_network(kind, module, loss, number, far, normalize, seed):
    is_flattened = isinstance(module[0], nn.Flatten)
    features = module[int(is_flattened)].in_features
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(number, *((1, features, 1) if is_flattened else (features,)), generator=draw).double()
    function, y = LOSSES[loss][0], targets_for(loss, module(x), seed)
    if loss == "another one ignored" and not y.any():
        y[0] = module(x).shape[1] - 1
        if not y.any():  # a single class, and that one ignored
            return
    oracle, model, w = made(kind, module, function)
    start = of(model, w)

    def copied(outputs: Tensor, targets: Tensor) -> Tensor:
        return function(outputs.clone(), targets)

    value, first = plain(module, start, x, y, loss=copied)
    gradient, found = oracle.gradient(Point(w), x, y, None), model.layout.empty()
    gradient.write(found)
    close(gradient.loss, value)
    close(of(model, found), first)
    if normalize and length(first) < 1e-9:
        return
    there = uphill(start, first, far, normalize)
    point = oracle.ascend(Point(w), x, y, None, far, normalize, model.layout.empty())
    oracle.gradient(point, x, y, None).write(found)
    second = plain(module, there, x, y, loss=copied)[1]
    if smooth(module, start, there, x):
        torch.testing.assert_close(of(model, found), second, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(of(model, point.flat), there, rtol=1e-9, atol=1e-10)


def smooth(module: nn.Module, start: dict[str, Tensor], there: dict[str, Tensor], x: Tensor) -> bool:
    """Whether no unit is so close to 0 that rounding decides whether it is on."""
    z, hidden = x, []
    module = copy.deepcopy(module)
    module.load_state_dict(there)
    with torch.no_grad():
        for part in module:
            if isinstance(part, nn.ReLU):
                hidden.append(z.abs().min().item())
            z = part(z)
    return min(hidden, default=1.0) > 1e-9


# -- where the lazy ascent is not to be trusted ------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_an_ascent_in_single_precision_beside_large_biases(size, mean):
    """Small inputs, and biases whose gradients cancel: by hand as far as by autograd, in float32."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    with torch.no_grad():
        module[2].weight.mul_(20)
        module[2].bias.copy_(-module[2].weight @ torch.relu(module[0].bias))
    x, y = (
        (torch.randn(18, 40, generator=torch.Generator().manual_seed(0)) + mean) * size,
        torch.arange(18) % 3,
    )
    points = {}
    for kind in ORACLES:
        model = FlatModel(copy.deepcopy(module))
        oracle = ORACLES[kind].make(model, F.cross_entropy)
        oracle.begin(None)
        w = model.layout.flat(model.vector.clone())
        point = oracle.ascend(Point(w), x, y, None, 0.5, True, model.layout.empty())
        points[kind] = point.flat.vector - w.vector
        assert points[kind].norm().item() == pytest.approx(0.5, rel=1e-4)
    for found in points.values():
        torch.testing.assert_close(found, points["autograd"], rtol=0, atol=1e-2)


@pytest.mark.parametrize("seed", range(6))
def test_a_gradient_that_cancels_is_climbed_along_all_the_same(seed):
    """Two samples whose shares of the first layer's gradient are opposite but for a tenth of a millionth."""
    row = torch.randn(FEATURES, generator=torch.Generator().manual_seed(seed))
    x = row * torch.tensor([[1.0], [1.0 + 1e-7]])
    module = nn.Sequential(nn.Linear(FEATURES, 16, bias=False))

    def opposite(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[0] - outputs[1]).sum()

    moves = []
    for kind in ORACLES:
        model = FlatModel(copy.deepcopy(module))
        oracle = ORACLES[kind].make(model, opposite)
        oracle.begin(None)
        w = model.layout.flat(model.vector.clone())
        point = oracle.ascend(Point(w), x, torch.empty(0), None, 0.5, True, model.layout.empty())
        assert not isinstance(point, Ascended), "not past the layer, where rounding would decide"
        moves.append(point.flat.vector - w.vector)
        assert moves[-1].norm().item() == pytest.approx(0.5, rel=1e-4)
    for move in moves:
        torch.testing.assert_close(move, moves[0])


def test_batches_for_which_the_lazy_ascent_pays():
    oracle, model, w = made("dense", build("images"))
    for number, lazy in [(9, True), (10, False)]:  # 24 x 16 terms are fewer than 10 x (24 + 16)
        point = oracle.ascend(Point(w), *samples("images", number), None, 0.1, True, model.layout.empty())
        assert isinstance(point, Ascended) is lazy


# -- whole rounds ----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What some rounds lead to."""

    w: Tensor
    state: dict[str, Tensor]
    clients: list[dict[str, Tensor]]
    losses: list[float] = field(default_factory=list)
    passes: list[tuple[int, ...]] = field(default_factory=list)
    buffers: Tensor | None = None


SGD = partial(ff.LocalSGD, lr=0.1, epochs=2, batch_size=BATCH)


def train(
    module: nn.Module,
    shards: list[Shard],
    method: str | ff.Method | list[Mechanism],
    oracle: str = "auto",
    local: LocalOptimiser | None = None,
    rounds: int = 2,
    loss: LossFunction = F.cross_entropy,
) -> Outcome:
    """Some rounds of all clients, on the server's and the client's own round and nothing else."""
    local, chosen = local or SGD(), ff.as_method(method)
    model = FlatModel(copy.deepcopy(module), torch.float64)
    server = Server(model.vector.clone(), chosen, len(shards), buffers=model.read_buffers())
    training = ClientRound(model, chosen, local, loss, seed=0, oracle=oracle)
    clients: list[dict[str, Tensor]] = [{} for _ in shards]
    outcome = Outcome(server.w, {}, clients)
    for index in range(rounds):
        server.open(index, local.lr_in(index), local.rate_sum)
        for client, shard in enumerate(shards):
            upload = training.run(client, shard, server.download(client), clients[client])
            clients[client] = dict(upload.state)
            outcome.losses.append(upload.loss)
            outcome.passes.append(
                (upload.forward, upload.backward, upload.spared_forward, upload.spared_backward)
            )
            server.receive(upload)
        server.close()
    outcome.w, outcome.buffers = server.w, server.buffers
    outcome.state = {name: value for name, value in server.state.items() if isinstance(value, Tensor)}
    return outcome


def run(name: str, method: str | ff.Method | list[Mechanism], oracle: str = "auto", **more) -> Outcome:
    return train(build(name), [Shard(*samples(name, 14, seed)) for seed in range(2)], method, oracle, **more)


def same(mine: Outcome, other: Outcome, compare: Callable = close) -> None:
    assert mine.w.isfinite().all()
    compare(mine.w, other.w)
    compare(mine.state, other.state)
    assert mine.passes == other.passes
    compare(torch.tensor(mine.losses).double(), torch.tensor(other.losses).double())
    for ours, theirs in zip(mine.clients, other.clients, strict=True):
        compare(ours, theirs, rtol=1e-8, atol=1e-10)
    assert (mine.buffers is None) == (other.buffers is None)
    if mine.buffers is not None:
        compare(mine.buffers, other.buffers)


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
    return counting(monkeypatch, DenseGradient, "backward")


@pytest.fixture
def by_autograd(monkeypatch) -> list[str]:
    return counting(monkeypatch, Autograd, "gradient")


@pytest.fixture
def lazily(monkeypatch) -> list[str]:
    """Gradients past a first layer that has not moved."""
    return counting(monkeypatch, Ascended, "first_outputs")


STEPS = 2 * 2 * 2 * 3
"""of a run: clients, rounds, epochs, batches"""
SGDS = {
    "plain": {},
    "momentum": {"momentum": 0.5},
    "decay": {"weight_decay": 0.05},
    "clipped": {"clip_norm": 0.2, "weight_decay": 0.05},
    "clipped before, momentum": {
        "clip_norm": 0.2,
        "clip_stage": "gradient",
        "momentum": 0.5,
        "nesterov": True,
    },
}


@pytest.mark.parametrize("optimiser", SGDS)
@pytest.mark.parametrize("method", ff.METHODS)
def test_every_method_on_an_mlp(method, optimiser, by_hand, by_autograd):
    local = SGD(**SGDS[optimiser])
    mine = run("images", method, local=local)
    passes = sum(backward - spared for _, backward, _, spared in mine.passes)
    assert passes >= STEPS
    assert (len(by_hand), len(by_autograd)) == (passes, 0)
    by_hand.clear()
    other = run("images", method, "autograd", local=local)
    assert (len(by_hand), len(by_autograd)) == (0, passes)
    same(mine, other, equal)


def named_model(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name == "mlp":
        return mlp((1, 4, 4), CLASSES, hidden=(12, 8))
    if name == "norm-dropout":
        return tiny.network(norm=True, dropout=True)
    shapes: dict[str, tuple[int, ...]] = {"cnn": (1, 4, 4), "resnet8": (3, 4, 4), "fasttext": TEXT}
    return MODELS[name](shapes[name], CLASSES, vocabulary=WORDS if name == "fasttext" else None)


NAMED = {"mlp": (1, 4, 4), "cnn": (1, 4, 4), "resnet8": (3, 4, 4), "fasttext": TEXT, "norm-dropout": (6,)}


@pytest.mark.parametrize("model", NAMED)
@pytest.mark.parametrize("method", ff.METHODS)
def test_every_method_on_the_papers_models(method, model):
    """Equal to 1e-12; every method meets every model, every model every optimiser."""
    turn = list(ff.METHODS).index(method) + list(NAMED).index(model)
    local = ff.LocalSGD(lr=0.05, steps=2, batch_size=3, **list(SGDS.values())[turn % len(SGDS)])
    draw = torch.Generator().manual_seed(0)
    shards = []
    for _ in range(1 if model == "resnet8" else 2):
        x = torch.randn(5, *NAMED[model], generator=draw, dtype=torch.float64)
        words = torch.randint(WORDS, (5, *TEXT), generator=draw)
        labels = torch.randint(CLASSES, (5,), generator=draw)
        shards.append(Shard(words if model == "fasttext" else x, labels))
    module = named_model(model).double()
    mine, other = (train(module, shards, method, oracle, local) for oracle in ("auto", "autograd"))
    same(mine, other, equal)
    start = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert (mine.w.sort().values - start.sort().values).abs().max() > 1e-6, "it has been trained"


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedasam", "fedgamma", "fedsmoo", "fedgmt"])
@pytest.mark.parametrize("name", DENSE)
def test_every_network_by_hand(name, method, decay, by_hand, by_autograd):
    mine = run(name, method, local=SGD(weight_decay=decay))
    assert len(by_hand) >= STEPS and not by_autograd
    same(mine, run(name, method, "autograd", local=SGD(weight_decay=decay)))
    assert by_autograd


@pytest.mark.parametrize("optimiser", SGDS)
def test_the_optimiser_is_not_the_same_run(optimiser):
    """Else the runs above would compare less than they say."""
    others = [run("rows", "fedsam", local=SGD(**more)).w for name, more in SGDS.items() if name != optimiser]
    mine = run("rows", "fedsam", local=SGD(**SGDS[optimiser])).w
    assert not any(torch.allclose(mine, other, rtol=1e-4) for other in others)


# -- optimisers, written out ------------------------------------------------------------------------

OPTIMISERS: dict[str, tuple[Callable[..., LocalOptimiser], dict, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (ff.LocalSGD, {}, torch.optim.SGD),
    "decay": (ff.LocalSGD, {"weight_decay": 0.05}, partial(torch.optim.SGD, weight_decay=0.05)),
    "momentum": (ff.LocalSGD, {"momentum": 0.6}, partial(torch.optim.SGD, momentum=0.6)),
    "nesterov": (
        ff.LocalSGD,
        {"momentum": 0.6, "nesterov": True, "weight_decay": 0.05},
        partial(torch.optim.SGD, momentum=0.6, nesterov=True, weight_decay=0.05),
    ),
    "clipped": (ff.LocalSGD, {"clip_norm": 0.2}, torch.optim.SGD),
    "clipped before": (ff.LocalSGD, {"clip_norm": 0.2, "clip_stage": "gradient"}, torch.optim.SGD),
    "adam": (ff.LocalAdam, {"weight_decay": 0.05}, partial(torch.optim.Adam, weight_decay=0.05)),
    "adamw": (ff.LocalAdamW, {"weight_decay": 0.05}, partial(torch.optim.AdamW, weight_decay=0.05)),
    "adam, clipped": (ff.LocalAdam, {"clip_norm": 0.2}, torch.optim.Adam),
}


def by_torch(
    module: nn.Module, x: Tensor, y: Tensor, optimiser: str, method: str, loss: LossFunction, steps: int
) -> Tensor:
    """One client's round in full batches, with torch alone."""
    module = copy.deepcopy(module)
    parameters = [p for p in module.parameters() if p.requires_grad]
    _, options, make = OPTIMISERS[optimiser]
    stepping, start = make(parameters, lr=0.1), [p.detach().clone() for p in parameters]
    limit, stage = options.get("clip_norm"), options.get("clip_stage", "direction")

    def gradient() -> list[Tensor]:
        return list(torch.autograd.grad(loss(module(x), y), parameters))

    def clip(pieces: list[Tensor]) -> list[Tensor]:
        norm = torch.cat([piece.flatten() for piece in pieces]).norm().item()
        return [piece * (limit / norm) for piece in pieces] if norm > limit else pieces

    for _ in range(steps):
        kept = [p.detach().clone() for p in parameters]
        if method == "fedsam":
            ascent = gradient()
            norm = torch.cat([g.flatten() for g in ascent]).norm().item()
            with torch.no_grad():
                for p, g in zip(parameters, ascent, strict=True):
                    p.add_(g, alpha=0.05 / norm)
        d = gradient()
        with torch.no_grad():
            for p, w in zip(parameters, kept, strict=True):
                p.copy_(w)
        if limit and stage == "gradient":
            d = clip(d)
        if method == "fedprox":
            d = [g + 0.1 * (p.detach() - w) for g, p, w in zip(d, parameters, start, strict=True)]
        if limit and stage == "direction":
            d = clip(d)
        for p, g in zip(parameters, d, strict=True):
            p.grad = g
        stepping.step()
    return torch.cat([(p.detach() - w).flatten() for p, w in zip(parameters, start, strict=True)])


@pytest.mark.parametrize("kind", ["auto", "autograd"])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedprox"])
@pytest.mark.parametrize("number", [7, 20])
def test_every_optimiser_is_torchs(kind, optimiser, method, number, by_hand):
    make, options, _ = OPTIMISERS[optimiser]
    module, (x, y) = build("no bias first"), samples("no bias first", number)
    local = make(lr=0.1, steps=4, batch_size=None, **options)
    found = train(module, [Shard(x, y)], method, kind, local, rounds=1).w
    start = torch.cat([p.detach().flatten() for p in module.parameters()])
    close(found - start, by_torch(module, x, y, optimiser, method, F.cross_entropy, steps=4))
    assert bool(by_hand) is (kind == "auto")


def row_by_row(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of every row of a sample."""
    return F.cross_entropy(outputs.mT, targets.unsqueeze(1).expand(-1, outputs.shape[1]))


@pytest.mark.parametrize("method", ["fedavg", "fedsam"])
def test_several_rows_a_sample(method, by_hand):
    module, draw = build("rows"), torch.Generator().manual_seed(0)
    x, y = torch.randn(7, 2, FEATURES, generator=draw, dtype=torch.float64), torch.arange(7) % CLASSES
    local = ff.LocalSGD(lr=0.1, steps=3, batch_size=None)
    found = train(module, [Shard(x, y)], method, "auto", local, rounds=1, loss=row_by_row).w
    start = torch.cat([p.detach().flatten() for p in module.parameters()])
    close(found - start, by_torch(module, x, y, "sgd", method, row_by_row, steps=3))
    assert not by_hand, "only samples of one row"


# -- the lazy point in a round ----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedsam", "mofedsam", "fedgamma", "fedspeed", "fedsam_nesterov"])
def test_methods_that_ascend_do_so_lazily(method, lazily):
    run("rows", method)
    assert len(lazily) == STEPS, "every step of every client"


def test_some_batches_lazily(lazily):
    mixed = run("rows", "fedsam", local=SGD(batch_size=10))
    assert len(lazily) == 2 * 2 * 2, "the batches of 4, not those of 10"
    same(mixed, run("rows", "fedsam", "autograd", local=SGD(batch_size=10)))


def watcher(hook: str) -> tuple[Mechanism, list[Tensor]]:
    """A mechanism that notes where the point is, before or after the gradient is taken there."""
    points: list[Tensor] = []

    class Watcher(Mechanism):
        def shift(self, step: Step) -> None:
            if hook == "shift":
                points.append(step.point.clone())
            if hook == "gradient in shift":
                points.append(step.gradient().clone())

        def direction(self, step: Step, d: Tensor) -> None:
            if hook == "direction":
                points.append(step.point.clone())
            if hook == "gradient":
                points.append(step.gradient().clone())

    return Watcher(), points


@pytest.mark.parametrize("hook", ["shift", "gradient in shift", "direction", "gradient"])
@pytest.mark.parametrize("ascent", [LocalAscent(0.3), AdaptiveAscent()])
def test_a_mechanism_that_asks_sees_the_whole_point(hook, ascent, lazily):
    seen = []
    for oracle in ("auto", "autograd"):
        watching, points = watcher(hook)
        run("no bias first", [ascent, watching], oracle)
        assert len(points) == STEPS
        seen.append(points)
    for mine, other in zip(*seen, strict=True):
        close(mine, other)
    assert bool(lazily) is (isinstance(ascent, LocalAscent) and hook != "shift")


class Drifts(Mechanism):
    """Moves the point on, from wherever it is, and asks for a gradient there."""

    def shift(self, step: Step) -> None:
        step.move(torch.ones_like(step.w), 0.1)
        step.move(step.gradient(), 0.1)


class Hesitates(Mechanism):
    """Ascends in every other step."""

    def shift(self, step: Step) -> None:
        if step.index % 2:
            step.ascend(0.3)


class Relabels(Mechanism):
    """Has other targets in mind, in every step."""

    def shift(self, step: Step) -> None:
        step.targets = (step.targets + 1) % CLASSES


class Blurs(Mechanism):
    """Has other samples in mind, after whatever came before."""

    def shift(self, step: Step) -> None:
        step.inputs = step.inputs / 2


ASCENT, AGAIN = LocalAscent(0.3), LocalAscent(0.2, normalize=False)
COMPOSED: dict[str, list[Mechanism]] = {
    "a move after": [ASCENT, Drifts()],
    "a move before": [Drifts(), ASCENT],
    "a move between": [ASCENT, Drifts(), AGAIN],
    "a move, then twice": [Drifts(), ASCENT, AGAIN],
    "twice": [ASCENT, AGAIN],
    "now and then": [Hesitates()],
    "after a momentum": [NesterovMomentum(0.8), ASCENT],
    "adaptive after a move": [Drifts(), AdaptiveAscent()],
    "adaptive before another": [AdaptiveAscent(), ASCENT],
    "adaptive after another": [ASCENT, AdaptiveAscent(0.5, 0.0)],
    "other targets": [Relabels(), ASCENT],
    "other targets after": [ASCENT, Relabels()],
    "other samples": [Blurs(), ASCENT],
    "other samples after": [ASCENT, Blurs()],
    "mixed": [LocalAscent(0.3, mix=0.4)],
}


@pytest.mark.parametrize("name", ["relu in place", "no bias first", "images"])
@pytest.mark.parametrize("mechanisms", COMPOSED)
def test_moves_before_and_after_an_ascent(mechanisms, name, by_hand):
    mine = run(name, COMPOSED[mechanisms])
    assert by_hand
    same(mine, run(name, COMPOSED[mechanisms], "autograd"))


def test_compositions_are_not_the_same_run():
    """Else the runs above would compare less than they say."""
    ends = [run("images", mechanisms).w for mechanisms in COMPOSED.values()]
    for number, mine in enumerate(ends):
        assert not any(torch.allclose(mine, other, rtol=1e-5) for other in ends[:number])


# -- terms of the loss ------------------------------------------------------------------------------


class Calms(Mechanism):
    def loss(self, step: Step, outputs: Tensor) -> Tensor:
        return calm(outputs)


class CalmsByHand(Mechanism):
    def loss(self, step: Step, outputs: Tensor) -> Pull:
        return calming(outputs.detach())


class CalmsWithAGraph(Mechanism):
    """Its gradient could itself be differentiated."""

    def loss(self, step: Step, outputs: Tensor) -> Pull:
        leaf = outputs.detach().requires_grad_()
        return Pull(torch.autograd.grad(calm(leaf), leaf, create_graph=True)[0])


class CalmsOtherwise(TrajectoryLoss):
    """Another loss than the pull that it inherits."""

    def loss(self, step: Step, outputs: Tensor) -> Tensor:
        return calm(outputs)


@pytest.mark.parametrize("oracle", ["auto", "autograd"])
@pytest.mark.parametrize("optimiser", ["decay", "momentum", "clipped"])
@pytest.mark.parametrize("more", [[], [LocalAscent(0.3)], [LocalAscent(0.3), Drifts()]])
def test_a_term_counts_however_it_is_given(more, optimiser, oracle):
    local = SGD(**SGDS[optimiser])
    expected = run("rows", [Calms(), *more], "autograd", local=local)
    for term in (Calms, CalmsByHand, CalmsWithAGraph, CalmsOtherwise):
        found = run("rows", [term(), *more], oracle, local=local)
        close(found.w, expected.w)
    without = run("rows", more or "fedavg", oracle, local=local)
    assert not torch.allclose(found.w, without.w, rtol=1e-3)


@pytest.mark.parametrize("more", [[], [Calms()], [CalmsByHand()], [LocalAscent(0.3), Calms()]])
def test_terms_are_taken_by_hand(more, by_hand, by_autograd):
    for method in ([TrajectoryLoss(), *more], ff.Method("ntd", [*ff.fedntd().mechanisms, *more])):
        mine = run("rows", method)
        assert by_hand and not by_autograd
        same(mine, run("rows", method, "autograd"))
        by_autograd.clear()


def shrunk(model: FlatModel, share: float = 0.05) -> Tensor:
    return (
        0.5 * share * sum((p.square().sum() for p in model.parameters), torch.zeros((), dtype=torch.float64))
    )


def with_its_model(way: str, oracle: str, method: list[Mechanism], local: LocalOptimiser) -> Tensor:
    """The update of a client whose loss, or a term of it, looks at the weights themselves."""
    model = FlatModel(build("rows"), torch.float64)

    class Shrinks(Mechanism):
        def loss(self, step: Step, outputs: Tensor) -> Tensor:
            return shrunk(model)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        plain = F.cross_entropy(outputs, targets)
        return plain + shrunk(model) if way == "loss" else plain

    mechanisms = [*([Shrinks()] if way == "term" else []), *method]
    training = ClientRound(model, ff.Method("shrinking", mechanisms), local, loss, seed=0, oracle=oracle)
    start, shard = model.vector.clone(), Shard(*samples("rows", 14))
    uploads = [training.run(0, shard, Download(0, local.lr, start), {}) for _ in range(2)]
    assert uploads[0].update.equal(uploads[1].update)
    return uploads[0].update


@pytest.mark.parametrize("way", ["term", "loss"])
def test_a_loss_of_the_weights_themselves_counts(way, by_autograd):
    """Left to autograd in every round, from its first gradient on: there it is weight decay."""
    decayed = with_its_model("none", "autograd", [], SGD(weight_decay=0.05))
    by_autograd.clear()
    close(with_its_model(way, "auto", [], SGD()), decayed)
    assert len(by_autograd) == 2 * 6
    for mechanisms in ([LocalAscent(0.3)], [CalmsByHand()], [Calms(), LocalAscent(0.3), Drifts()]):
        mine, other = (with_its_model(way, oracle, mechanisms, SGD()) for oracle in ("auto", "autograd"))
        close(mine, other)


# -- what is left to autograd ------------------------------------------------------------------------


class Own(nn.Module):
    """Uses its layer's weights a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) @ self.layer.weight


class OwnSequence(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def linear(inputs: int = FEATURES, outputs: int = FEATURES) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def between(*middle: nn.Module) -> nn.Sequential:
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


def second_name(layer: int) -> nn.Module:
    model = between(nn.ReLU())
    model.also = model[layer].weight  # and comes before all others
    return model


UNFIT: dict[str, Callable[[], nn.Module]] = {
    "a forward of its own": Own,
    "a sequence of its own": lambda: OwnSequence(linear(), nn.ReLU(), linear()),
    "a layer of its own": lambda: nn.Sequential(OwnLinear(FEATURES, FEATURES), nn.ReLU(), linear()),
    "no sequence": linear,
    "a sequence in it": lambda: between(nn.Sequential(nn.ReLU())),
    "tied weights": lambda: tied("weight"),
    "tied biases": lambda: tied("bias"),
    "a layer twice": repeated,
    "a later layer with a second name": lambda: second_name(2),
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
def test_models_that_are_left_to_autograd(model):
    module = UNFIT[model]()
    assert isinstance(make_oracle("auto", FlatModel(module), F.cross_entropy), Autograd)
    assert Dense.of(FlatModel(module), F.cross_entropy) is None


def test_autograd_on_request():
    model = FlatModel(build("rows"))
    assert isinstance(make_oracle("auto", model, F.cross_entropy), Dense)
    assert isinstance(make_oracle("autograd", model, F.cross_entropy), Autograd)


@pytest.mark.parametrize("oracle", ["auto", "autograd"])
def test_a_run_asks_the_oracle_that_it_is_told(oracle, by_hand, by_autograd):
    local = ff.LocalSGD(lr=0.1, steps=2, batch_size=None)
    ff.train(ff.Federation([samples("rows")]), build("rows"), "fedsam", local, rounds=1, oracle=oracle)
    assert (len(by_hand), len(by_autograd)) == ((4, 0) if oracle == "auto" else (0, 4))


@pytest.mark.parametrize("method", ["fedsam", "fedasam"])
@pytest.mark.parametrize("part", [0, 2])
def test_a_layer_with_a_second_name(part, method):
    module = build("rows")
    module.also = module[part].weight
    x, y = samples("rows", 14)
    local = ff.LocalSGD(lr=0.1, steps=1, batch_size=None)
    mine = train(module, [Shard(x, y)], method, "auto", local, rounds=1)
    plain_run = train(build("rows"), [Shard(x, y)], method, "auto", local, rounds=1)
    if method == "fedsam":  # FedASAM goes by names
        torch.testing.assert_close(mine.w.sort().values, plain_run.w.sort().values, rtol=1e-9, atol=1e-10)
    same(mine, train(module, [Shard(x, y)], method, "autograd", local, rounds=1))


def taken_by_hand(model: FlatModel) -> bool:
    oracle = Dense.of(model, F.cross_entropy)
    assert oracle is not None
    oracle.begin(None)
    x = torch.zeros(2, FEATURES, dtype=model.vector.dtype)
    found = oracle.gradient(Point(model.layout.flat(model.vector)), x, torch.tensor([0, 1]), None)
    return isinstance(found, DenseGradient)


HOOKS = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
]


@pytest.mark.filterwarnings("ignore:Full backward hook")  # of a first layer, whose inputs have no gradient
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("part", [None, 0, 1, 2, 3])
def test_not_by_hand_while_a_hook_looks_on(hook, part):
    model = FlatModel(nn.Sequential(nn.Flatten(), linear(), nn.ReLU(), linear()))
    watched = model.module if part is None else model.module[part]
    assert taken_by_hand(model)
    handle = getattr(watched, hook)(lambda *_: None)
    assert not taken_by_hand(model)
    handle.remove()
    assert taken_by_hand(model)


def test_not_by_hand_under_other_eyes():
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not taken_by_hand(FlatModel(build("rows")))
    finally:
        handle.remove()
    model = FlatModel(build("rows"))
    model.parameters[0].register_hook(lambda gradient: 0 * gradient)
    assert not taken_by_hand(model), "a parameter's own hook"
    model = FlatModel(build("rows"))
    model.module[1].forward = torch.tanh
    assert not taken_by_hand(model), "a layer with a forward of its own alone"
    model = FlatModel(build("rows"))
    assert not is_watched(model)
    model.parameters[1].requires_grad_(False)
    assert is_watched(model), "frozen for a while"


def test_hooks_are_called_and_then_no_longer(by_hand):
    model, seen = FlatModel(build("rows"), torch.float64), []
    handles = [
        model.module[1].register_forward_hook(lambda *_: seen.append("forward")),
        model.module[1].register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    training = ClientRound(model, ff.fedsam(), SGD(epochs=1), F.cross_entropy, seed=0)
    start, shard = model.vector.clone(), Shard(*samples("rows", 14))
    watched = training.run(0, shard, Download(0, 0.1, start), {})
    assert seen.count("backward") == 6 and seen.count("forward") >= 6 and not by_hand
    for handle in handles:
        handle.remove()
    alone = training.run(0, shard, Download(0, 0.1, start), {})
    assert len(seen) == 12 and len(by_hand) == 6
    close(watched.update, alone.update)


def test_samples_that_are_left_to_autograd():
    def kind(name: str, x: Tensor) -> type:
        oracle, _, w = made("dense", build(name), lambda outputs, targets: outputs.sum())
        return type(oracle.gradient(Point(w), x.double(), torch.empty(0), None))

    assert kind("images", torch.ones(4, *IMAGE)) is kind("images", torch.ones(4, FEATURES)) is DenseGradient
    assert kind("rows", torch.ones(4, FEATURES)) is DenseGradient
    assert kind("rows", torch.ones(4, 2, FEATURES)) is not DenseGradient, "several rows a sample"
    assert kind("rows", torch.ones(FEATURES)) is not DenseGradient, "one sample alone"
    assert kind("rows", torch.ones(4, FEATURES).requires_grad_()) is not DenseGradient


# -- mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedgmt"])
def test_samples_to_be_left_out(method):
    x, y = samples("rows", 14)
    ignored = y.clone()
    ignored[3] = -100
    for targets in (y, ignored):
        runs = [train(build("rows"), [Shard(x, targets)], method, oracle) for oracle in ("auto", "autograd")]
        same(*runs)
    assert not torch.allclose(runs[0].w, train(build("rows"), [Shard(x, y)], method).w)


@pytest.mark.parametrize("method", ["fedavg", "fedsam"])
def test_a_label_without_an_output_is_the_same_mistake(method):
    x, y = samples("rows", 14)
    mistakes = []
    for oracle in ("auto", "autograd"):
        with pytest.raises(ff.FedflatError, match="Has the model an output for every class") as mistake:
            train(network(16, CLASSES - 1).double(), [Shard(x, y)], method, oracle)
        mistakes.append(str(mistake.value))
    assert mistakes[0] == mistakes[1]


class Stumbles(Mechanism):
    """Falls in a step of the first round, after its gradient."""

    def direction(self, step: Step, d: Tensor) -> None:
        if step.local.round == 0 and step.index == 2:
            raise RuntimeError("stumbled")


@pytest.mark.parametrize("oracle", ["auto", "autograd"])
def test_a_round_that_failed_leaves_no_trace(oracle):
    method = ff.Method("stumbling", [LocalAscent(0.1), TrajectoryLoss(), Stumbles()])
    shard = Shard(*samples("rows", 14))

    def training() -> ClientRound:
        model = FlatModel(build("rows"), torch.float64)
        return ClientRound(model, method, SGD(momentum=0.5), F.cross_entropy, seed=0, oracle=oracle)

    def upload(training: ClientRound, round: int) -> ff.Upload:
        start = torch.linspace(-0.1, 0.1, training.model.size, dtype=torch.float64)
        return training.run(3, shard, Download(round, 0.1, start, {"ema": 2 * start}), {})

    stumbled = training()
    with pytest.raises(ff.FedflatError, match=r"client 3, round 0: .* in step 2 .*stumbled"):
        upload(stumbled, 0)
    for _ in range(2):
        after, fresh = upload(stumbled, 1), upload(training(), 1)
        assert after.loss == fresh.loss > 0
        assert after.update.equal(fresh.update)


class AscendsLate(Mechanism):
    """Moves the point where there is none to be moved."""

    def direction(self, step: Step, d: Tensor) -> None:
        step.ascend(0.1)


class AscendsInItsLoss(Mechanism):
    def loss(self, step: Step, outputs: Tensor) -> float:
        step.ascend(0.1)
        return 0.0


@pytest.mark.parametrize("oracle", ["auto", "autograd"])
@pytest.mark.parametrize("late", [AscendsLate(), AscendsInItsLoss()])
@pytest.mark.parametrize("before", [[], [ASCENT]])
def test_an_ascent_outside_a_shift_is_a_mistake(late, before, oracle):
    with pytest.raises(ff.FedflatError, match="The point is moved in a mechanism's hook `shift`"):
        run("rows", [*before, late], oracle)
