"""SAM's ascent past large linear layers, against moving them."""

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings, strategies as st
from test_chain import (
    CLASSES,
    CLIMBING,
    OPTIMISERS,
    Calms,
    CalmsByHand,
    CalmsInTwo,
    Climbs,
    Creeps,
    Hesitates,
    OwnLinear,
    OwnSequence,
    counting,
    near,
    same,
    samples,
    watcher,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune, spectral_norm

import fedflat as ff
from fedflat import detours as module_of_detours
from fedflat.data.federation import Shard
from fedflat.detours import SMALLEST, Detours
from fedflat.local import Local, Step
from fedflat.local_training import LocalTraining
from fedflat.mechanism import Mechanism
from fedflat.mechanisms import AdaptiveAscent, LocalAscent
from fedflat.messages import Download, Upload

IMAGE, BATCH = (1, 8, 8), 5
STEPS = 2 * 2 * 3
"""of a run: clients, rounds, batches"""


def large(inputs: int = 256, outputs: int = 256, bias: bool = True) -> nn.Linear:
    assert inputs * outputs >= SMALLEST
    return nn.Linear(inputs, outputs, bias)


def images(*parts: nn.Module, classes: bool = True) -> nn.Sequential:
    """A convolution, and a large layer or more behind it."""
    last = [nn.Linear(256, CLASSES)] if classes else []
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), *parts, *last)


def turned() -> nn.Sequential:
    model = images(large(), nn.ReLU())
    model[3].weight.data = model[3].weight.data.mT.contiguous().mT
    return model


def frozen(model: nn.Sequential, part: int, name: str | None = None) -> nn.Sequential:
    for other, p in model[part].named_parameters():
        p.requires_grad = name not in (None, other)
    return model


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "bias": lambda: images(large(), nn.ReLU()),
    "no bias": lambda: images(large(bias=False), nn.ReLU()),
    "two": lambda: images(large(bias=False), nn.Tanh(), large(256, 300), nn.ReLU(), nn.Linear(300, 256)),
    "three": lambda: images(large(), nn.GELU(), large(), nn.Identity(), large(bias=False), nn.Sigmoid()),
    "dropout": lambda: images(nn.Dropout(0.2), large(), nn.ReLU(), nn.Dropout(0.5)),
    "a large one last": lambda: images(large(256, 300), classes=False),
    "a large one first": lambda: nn.Sequential(
        nn.Flatten(), large(64, 1024), nn.Tanh(), nn.Linear(1024, CLASSES)
    ),
    "convolution not trained": lambda: frozen(images(large(), nn.Tanh()), 0),
    "normalised": lambda: nn.Sequential(nn.BatchNorm2d(1), *images(large(), nn.ReLU())),
    "turned in memory": turned,
}
IN_PLACE: dict[str, Callable[[], nn.Sequential]] = {
    "relu": lambda: images(large(), nn.ReLU(inplace=True)),
    "dropout": lambda: images(large(), nn.Dropout(0.5, inplace=True)),
    "another": lambda: images(large(), nn.LeakyReLU(inplace=True)),
    "later": lambda: images(large(), nn.Identity(), nn.ReLU(inplace=True)),
    "between": lambda: images(large(), nn.ReLU(inplace=True), large(), nn.Tanh()),
    "at first": lambda: nn.Sequential(
        nn.Flatten(), large(64, 1024), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(1024, CLASSES)
    ),
}
NOTHING_ELSE: dict[str, Callable[[], nn.Sequential]] = {
    "one": lambda: nn.Sequential(nn.Flatten(), large(64, 1024), nn.Tanh()),
    "two": lambda: nn.Sequential(nn.Flatten(), large(64, 1024), nn.Tanh(), large(1024, 64, bias=False)),
    "convolution not trained": lambda: frozen(images(large(), nn.Tanh(), classes=False), 0),
}


def train(
    build: Callable[[], nn.Module],
    method: str | ff.Method | list[Mechanism],
    batch_size: int = BATCH,
    number: int = 14,
    dtype: torch.dtype = torch.float64,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    **local,
) -> ff.Run:
    """A run that is the same every time."""
    torch.manual_seed(1)
    return ff.train(
        ff.Federation([samples(number, IMAGE, seed) for seed in range(2)]),
        build(),
        method,
        rounds=2,
        local=ff.LocalSGD(lr=0.1, batch_size=batch_size, **local),
        dtype=dtype,
        loss=loss,
    )


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """Second passes past a layer."""
    return counting(monkeypatch, Detours, "forward_again")


@pytest.fixture
def plainly(monkeypatch) -> Callable[[], None]:
    """Lets runs move all layers."""
    return lambda: monkeypatch.setattr(Detours, "of", lambda model: None)


# -- whole runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", CLIMBING)
@pytest.mark.parametrize("model", MODELS)
def test_the_same_run_as_the_plain_way(model, method, taken, plainly):
    quick = train(MODELS[model], method, weight_decay=0.01)
    assert len(taken) == STEPS, "every step of every client"
    plainly()
    plain = train(MODELS[model], method, weight_decay=0.01)
    assert len(taken) == STEPS
    same(quick, plain)
    if model == "normalised":
        near(quick.server.buffers, plain.server.buffers)


@pytest.mark.parametrize("method", ["fedsam", "fedgamma"])
@pytest.mark.parametrize("model", ["cnn", "lenet"])
def test_the_same_run_of_the_papers_networks(model, method, taken, plainly):
    def trained() -> ff.Run:
        federation = ff.Federation([samples(8, (1, 16, 16), seed) for seed in range(2)])
        local = ff.LocalSGD(lr=0.1, batch_size=4)
        return ff.train(federation, model, method, local, rounds=1, dtype=torch.float64)

    quick = trained()
    assert len(taken) == 4
    plainly()
    same(quick, trained())


@pytest.mark.parametrize("model", IN_PLACE)
def test_what_comes_next_may_work_in_place(model, plainly):
    quick = train(IN_PLACE[model], "fedsam")
    plainly()
    same(quick, train(IN_PLACE[model], "fedsam"))


def test_a_loss_may_change_outputs_in_place(plainly):
    losses = [lambda z, y: F.cross_entropy(z.mul_(2), y), lambda z, y: F.cross_entropy(2 * z, y)]
    quick = [train(MODELS["a large one last"], "fedsam", loss=loss) for loss in losses]
    same(*quick)
    plainly()
    same(quick[0], train(MODELS["a large one last"], "fedsam", loss=losses[0]))


@pytest.mark.parametrize("method", ["fedsam", "fedspeed"])
@pytest.mark.parametrize("model", NOTHING_ELSE)
def test_nothing_but_large_layers(model, method, plainly):
    quick = train(NOTHING_ELSE[model], method)
    plainly()
    same(quick, train(NOTHING_ELSE[model], method))


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("method", ["fedsam", "fedgamma"])
def test_the_same_run_with_other_optimisers(method, optimiser, taken, plainly):
    quick = train(MODELS["bias"], method, **OPTIMISERS[optimiser])
    assert len(taken) == STEPS
    plainly()
    same(quick, train(MODELS["bias"], method, **OPTIMISERS[optimiser]))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("number", [1, 6])
def test_batches_of_one(number, normalize, taken, plainly):
    ascent = [LocalAscent(0.2, normalize=normalize)]
    quick = train(MODELS["two"], ascent, number=number)
    assert taken
    plainly()
    same(quick, train(MODELS["two"], ascent, number=number))


def test_the_same_run_in_single_precision(taken, plainly):
    quick = train(MODELS["two"], "fedsam", dtype=torch.float32)
    assert len(taken) == STEPS
    plainly()
    plain = train(MODELS["two"], "fedsam", dtype=torch.float32)
    torch.testing.assert_close(quick.server.w, plain.server.w, rtol=1e-4, atol=1e-6)


def test_the_ascent_counts():
    """Else the runs above would compare less than they say."""
    runs = [train(MODELS["two"], [LocalAscent(rho)]).server.w for rho in (0.0, 0.05, 0.3)]
    assert not any(torch.allclose(one, other, rtol=1e-4) for one, other in pairwise(runs))


def words(sparse: bool) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(11, 16, sparse=sparse), nn.Flatten(), large(128, 512), nn.Tanh(), nn.Linear(512, CLASSES)
    )


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_words_whose_gradient_is_sparse(normalize, sparse, plainly):
    def trained() -> ff.Run:
        torch.manual_seed(1)
        inputs, targets = torch.randint(11, (14, 8)), torch.arange(14) % CLASSES
        local = ff.LocalSGD(lr=0.1, batch_size=BATCH)
        method = [LocalAscent(0.3, normalize=normalize)]
        return ff.train(
            ff.Federation([(inputs, targets)]), words(sparse), method, local, rounds=2, dtype=torch.float64
        )

    quick = trained()
    plainly()
    same(quick, trained())


# -- one ascent ------------------------------------------------------------------------------------


@st.composite
def networks(draw: st.DrawFn) -> nn.Sequential:
    widths = draw(st.lists(st.integers(1, 9), min_size=2, max_size=4))
    torch.manual_seed(draw(st.integers(0, 99)))
    parts: list[nn.Module] = []
    if draw(st.booleans()):
        parts += [nn.Conv1d(1, 1, 1), nn.Tanh()]
    parts.append(nn.Flatten())
    for inputs, outputs in pairwise(widths):
        parts.append(nn.Linear(inputs, outputs, draw(st.booleans())))
        parts += draw(st.sampled_from([[], [nn.Tanh()], [nn.ReLU()], [nn.ReLU(True)], [nn.GELU()]]))
    return nn.Sequential(*parts).double()


@settings(deadline=None, max_examples=100)
@given(
    networks(), st.sampled_from([1, 10, 30]), st.integers(1, 9), st.floats(0, 2), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_the_point_is_where_autograd_leads(module, smallest, number, rho, normalize, seed):
    features = next(part for part in module if isinstance(part, nn.Linear)).in_features
    x = samples(number, (1, features), seed)[0]
    y = torch.arange(number) % module(x).shape[1]
    named = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    loss = F.cross_entropy(functional_call(module, named, (x,)), y)
    gradients = torch.autograd.grad(loss, list(named.values()))
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    scale = rho if not normalize else rho / norm if norm > 1e-12 else 0.0
    point = {n: v.detach() + scale * g for (n, v), g in zip(named.items(), gradients, strict=True)}

    model = ff.FlatModel(module, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_of_detours, "SMALLEST", smallest)
        detours = Detours.of(model)
    assume(detours is not None)
    assert sorted(detours.own + detours.others) == list(range(len(named)))
    count = len(model.parameters)
    found = model.gradients(F.cross_entropy(detours.forward(x), y), also=detours.outputs)
    assert all((found[index] is None) is (index in detours.own) for index in range(count))
    assume(detours.climb(rho, normalize, found[:count], found[count:]))
    assert detours.scale == pytest.approx(float(scale), rel=1e-9)
    for index in detours.others:
        model.parameters[index].data.add_(found[index], alpha=detours.scale)
    again = detours.forward_again(x)
    near(again.detach(), functional_call(module, point, (x,)))

    there = {name: value.requires_grad_() for name, value in point.items()}
    expected = torch.autograd.grad(
        F.cross_entropy(functional_call(module, there, (x,)), y), list(there.values())
    )
    for gradient, other in zip(model.gradients(F.cross_entropy(again, y)), expected, strict=True):
        near(gradient, other)
    for index, move in zip(detours.own, detours.moves(), strict=True):
        model.parameters[index].data.add_(move, alpha=detours.scale)
    for p, expected in zip(model.parameters, point.values(), strict=True):
        near(p.detach(), expected.detach())


# -- what it is not for ----------------------------------------------------------------------------


class Around(nn.Module):
    """A module that is no sequence."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def tied(name: str) -> nn.Sequential:
    model = images(large(), nn.Tanh(), large(), nn.Tanh())
    setattr(model[5], name, getattr(model[3], name))
    return model


def shared_with_a_small_one() -> nn.Sequential:
    model = images(large(), nn.Tanh(), nn.Linear(256, 16), nn.Linear(16, 256))
    model[6].bias = model[3].bias
    return model


def repeated() -> nn.Sequential:
    layer = large()
    return images(layer, nn.Tanh(), layer, nn.Tanh())


def hidden(around: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    """The same layer once more, within another part."""
    layer = large()
    return images(layer, nn.Tanh(), around(layer), nn.Tanh())


def listening(hook: str, part: int | None) -> nn.Sequential:
    model = images(large(), nn.Tanh())
    getattr(model if part is None else model[part], hook)(lambda *_: None)
    return model


def with_its_own_forward() -> nn.Sequential:
    model = images(large(), nn.Tanh())
    model[3].forward = torch.tanh
    return model


UNFIT: dict[str, Callable[[], nn.Module]] = {
    "no sequence": lambda: Around(images(large(), nn.Tanh())),
    "a sequence of its own": lambda: OwnSequence(*images(large(), nn.Tanh())),
    "within another part": lambda: nn.Sequential(*images(nn.Sequential(large()), nn.Tanh())),
    "a layer of its own": lambda: images(OwnLinear(256, 256), nn.Tanh()),
    "a small layer": lambda: images(nn.Linear(256, 255), nn.Linear(255, 256)),
    "several rows a sample": lambda: nn.Sequential(nn.Linear(8, 2**13), nn.Flatten(), nn.Linear(2**16, 3)),
    "rows nobody knows": lambda: images(nn.Unflatten(1, (1, 256)), large(), nn.Flatten()),
    "not trained": lambda: frozen(images(large(), nn.Tanh()), 3),
    "weights not trained": lambda: frozen(images(large(), nn.Tanh()), 3, "weight"),
    "bias not trained": lambda: frozen(images(large(), nn.Tanh()), 3, "bias"),
    "tied weights": lambda: tied("weight"),
    "tied biases": lambda: tied("bias"),
    "a bias shared with a small one": shared_with_a_small_one,
    "used twice": repeated,
    "used again in a sequence": lambda: hidden(lambda layer: nn.Sequential(layer)),
    "used again in a module": lambda: hidden(Around),
    "weights made of others": lambda: images(spectral_norm(large()), nn.Tanh()),
    "weights made of others, in the new way": lambda: images(
        parametrizations.weight_norm(large()), nn.Tanh()
    ),
    "a forward of its own": with_its_own_forward,
    "a hook on the model": lambda: listening("register_forward_hook", None),
    "a hook on the layer": lambda: listening("register_forward_hook", 3),
    "a hook before the layer": lambda: listening("register_forward_pre_hook", 3),
    "a hook on the way back": lambda: listening("register_full_backward_hook", 3),
    "a hook on another": lambda: listening("register_forward_hook", 0),
}


@pytest.mark.parametrize("model", UNFIT)
def test_models_it_is_not_for(model, taken, plainly):
    if model == "several rows a sample":
        torch.manual_seed(1)
        detours = Detours.of(ff.FlatModel(UNFIT[model]()))
        assert detours is not None and detours.own == [2, 3], "the second layer's alone"
        return
    run = train(UNFIT[model], "fedsam")
    assert not taken
    plainly()
    same(run, train(UNFIT[model], "fedsam"))


def test_weights_left_out():
    assert Detours.of(ff.FlatModel(images(prune.random_unstructured(large(), "weight", 0.5)))) is None


def test_parameters_that_somebody_watches():
    model, x = ff.FlatModel(images(large(), nn.Tanh())), torch.empty(2, *IMAGE)
    detours = Detours.of(model)
    assert detours is not None and detours.pay(x)
    handle = model.parameters[0].register_hook(lambda gradient: 0 * gradient)
    assert not detours.pay(x)
    handle.remove()
    assert detours.pay(x)
    model.parameters[2].requires_grad = False
    assert not detours.pay(x)


def test_batches_for_which_it_pays(taken, plainly):
    detours = Detours.of(ff.FlatModel(MODELS["two"]()))
    assert detours is not None
    assert detours.pay(torch.empty(128, *IMAGE)) and not detours.pay(torch.empty(129, *IMAGE))
    mixed = train(MODELS["two"], "fedsam", batch_size=130, number=133)
    assert len(taken) == 2 * 2, "the batches of 3, not those of 130"
    plainly()
    same(mixed, train(MODELS["two"], "fedsam", batch_size=130, number=133))


@pytest.mark.parametrize("term", [Calms(), CalmsByHand(), CalmsInTwo()], ids=lambda term: term.name)
def test_terms_of_the_loss_want_every_gradient(term, taken, plainly):
    run = train(MODELS["bias"], [term, LocalAscent(0.3)])
    assert not taken
    same(run, train(MODELS["bias"], [Calms(), LocalAscent(0.3)]))
    plainly()
    same(run, train(MODELS["bias"], [term, LocalAscent(0.3)]))


# -- beside others ---------------------------------------------------------------------------------


class Strolls(Mechanism):
    """Moves the point on, from wherever it is, and asks for a gradient there."""

    def shift(self, step: Step) -> None:
        step.move(torch.ones_like(step.w), 0.001)
        step.move(step.gradient(), 0.1)


@pytest.mark.parametrize("hook", ["shift", "outputs", "direction", "gradient", "model"])
@pytest.mark.parametrize("model", ["two", "a large one first"])
def test_a_mechanism_that_asks_sees_the_whole_point(model, hook, taken, plainly):
    points = []
    for _ in range(2):
        watching, seen = watcher(hook)
        points.append(seen)
        run = train(MODELS[model], [LocalAscent(0.3), watching])
        points.append([run.server.w])
        assert len(seen) == STEPS
        assert len(taken) == (0 if hook in ("shift", "outputs") else STEPS), "the layers catch up"
        plainly()
    for mine, other in zip(points[0] + points[1], points[2] + points[3], strict=True):
        near(mine, other)


@pytest.mark.parametrize("other", [Strolls(), Creeps(), AdaptiveAscent(0.2)])
@pytest.mark.parametrize("climbs", ["before", "after", "before and after", "twice after"])
def test_other_moves_before_and_after(other, climbs, taken, plainly):
    ascent, again = LocalAscent(0.3), LocalAscent(0.2, normalize=False)
    mechanisms = {
        "before": [ascent, other],
        "after": [other, ascent],
        "before and after": [ascent, other, again],
        "twice after": [other, ascent, again],
    }[climbs]
    quick = train(MODELS["two"], mechanisms)
    assert len(taken) == (0 if climbs == "before" else STEPS)
    plainly()
    same(quick, train(MODELS["two"], mechanisms))


def test_a_step_without_a_climb_after_one_with(taken, plainly):
    quick = train(MODELS["bias"], [Hesitates()])
    assert len(taken) == 2 * 2
    plainly()
    same(quick, train(MODELS["bias"], [Hesitates()]))


class Calls(Mechanism):
    """Looks at the model when the round is over."""

    def end(self, local: Local) -> dict[str, Tensor]:
        for p, expected in zip(local.model.parameters, local.model.split(local.w), strict=True):
            assert torch.equal(p, expected)
            assert p.data_ptr() == expected.data_ptr()
        ended.append(local.client)
        return {}


ended: list[int] = []


def test_the_model_is_at_the_iterate_in_the_end(taken):
    ended.clear()
    train(MODELS["two"], [LocalAscent(0.3), Calls()])
    assert taken and len(ended) == 4


# -- where gradients cancel ------------------------------------------------------------------------


def test_a_gradient_that_cancels_is_climbed_along_all_the_same(taken, plainly):
    """Two samples whose shares of the large layer's gradient are opposite but for a tenth of a millionth."""
    x = torch.ones(2, *IMAGE) * torch.tensor([1.0, 1.0 + 1e-7]).view(2, 1, 1, 1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), large(64, 1024, bias=False), nn.Tanh(), nn.Linear(1024, 2))
    model[3].weight.data[1] = model[3].weight.data[0] + 0.01
    model[3].bias.data.zero_()
    model[1].weight.data.zero_()

    def trained() -> Tensor:
        federation = ff.Federation([(x, torch.tensor([0, 1]))])
        local = ff.LocalSGD(lr=0.1, batch_size=2, steps=1)
        return ff.train(federation, copy.deepcopy(model), ff.fedsam(rho=0.5), local, rounds=1).server.w

    quick = trained()
    assert not taken, "not past the layer, where rounding would decide"
    plainly()
    torch.testing.assert_close(quick, trained())


@pytest.fixture
def cancelling(monkeypatch) -> list[str]:
    """Ascents past layers, all of which seem to cancel."""
    seen = counting(monkeypatch, Detours, "climb")
    climb = Detours.climb
    monkeypatch.setattr(Detours, "climb", lambda *given: climb(*given) and False)
    return seen


CANCELLING: dict[str, list[Mechanism]] = {
    "alone": [LocalAscent(0.3)],
    "not normalised": [LocalAscent(0.3, normalize=False)],
    "after a move": [Strolls(), LocalAscent(0.3)],
    "before a move": [LocalAscent(0.3), Creeps()],
    "twice": [LocalAscent(0.3), LocalAscent(0.2)],
    "beside a gradient that is kept": [LocalAscent(0.1, mix=0.5), LocalAscent(0.3)],
}


@pytest.mark.parametrize("mechanisms", CANCELLING)
@pytest.mark.parametrize("model", ["two", "a large one first"])
def test_the_plain_way_when_shares_cancel(model, mechanisms, taken, cancelling, plainly):
    fallen_back = train(MODELS[model], CANCELLING[mechanisms])
    assert cancelling and not taken
    plainly()
    same(fallen_back, train(MODELS[model], CANCELLING[mechanisms]))


# -- one client ------------------------------------------------------------------------------------


class Trips(nn.Module):
    """Falls in one of its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("tripped")
        return x.clone()


class Stumbles(Mechanism):
    """Falls in the second step of the first round, after its gradient."""

    def direction(self, step: Step, d: Tensor) -> None:
        if step.local.round == 0 and step.index == 1:
            raise RuntimeError("stumbled")


def training_of(method: list[Mechanism]) -> LocalTraining:
    torch.manual_seed(1)
    model = ff.FlatModel(images(large(), nn.ReLU(), Trips()), dtype=torch.float64)
    sgd = ff.LocalSGD(lr=0.1, batch_size=BATCH)
    return LocalTraining(model, ff.as_method(method), sgd, F.cross_entropy, seed=0)


def round_of(training: LocalTraining, round: int = 1) -> Upload:
    start = torch.linspace(-0.1, 0.1, training.model.size, dtype=torch.float64)
    return training.run(3, Shard(*samples(14, IMAGE)), Download(round, 0.1, start), {})


def stands_on_its_vector(training: LocalTraining) -> None:
    assert training.model.vector is training.away
    for p, view in zip(training.model.parameters, training.away_views, strict=True):
        assert p.data_ptr() == view.data_ptr() and p.stride() == view.stride()
        assert p.requires_grad and p.is_leaf


def test_parameters_are_views_of_the_models_vector_again(taken):
    training = training_of([LocalAscent(0.3)])
    for round in range(2):
        round_of(training, round)
        stands_on_its_vector(training)
    assert len(taken) == 6


@pytest.mark.parametrize("which", [1, 2, 3, 4, 6])
def test_a_pass_that_fails_leaves_the_model_usable(which, taken):
    training = training_of([LocalAscent(0.3)])
    training.model.module[5].left = which
    with pytest.raises(ff.FedflatError, match="tripped"):
        round_of(training)
    assert len(taken) == which // 2
    stands_on_its_vector(training)
    after, fresh = round_of(training), round_of(training_of([LocalAscent(0.3)]))
    assert torch.equal(after.update, fresh.update) and after.loss == fresh.loss
    stands_on_its_vector(training)


def test_a_hook_that_fails_leaves_the_model_usable(taken):
    method = [LocalAscent(0.3), Stumbles()]
    training = training_of(method)
    with pytest.raises(ff.FedflatError, match="stumbled"):
        round_of(training, round=0)
    assert len(taken) == 2
    stands_on_its_vector(training)
    after, fresh = round_of(training), round_of(training_of(method))
    assert torch.equal(after.update, fresh.update) and after.loss == fresh.loss


def test_climbing_without_a_shift_is_a_mistake():
    training = training_of([Climbs()])
    with pytest.raises(ff.FedflatError, match="The point is moved in a mechanism's hook `shift`"):
        round_of(training)
    stands_on_its_vector(training)
