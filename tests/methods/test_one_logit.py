"""A model with one output: the logit of class 1, which is a two-class model whose other logit is 0."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedflat as ff
from fedflat.core.evaluation import evaluate
from fedflat.core.flat import FlatModel

TESTS = 1500
"""More than one batch of an evaluation."""


def samples(count: int, seed: int, share: float = 0.5) -> tuple[Tensor, Tensor]:
    """Two noisy clouds; `share` of the samples is of class 1."""
    rng = torch.Generator().manual_seed(seed)
    y = (torch.rand(count, generator=rng) < share).long()
    x = torch.randn(count, 3, generator=rng, dtype=torch.float64)
    return x + (y[:, None] - 0.5) * torch.tensor([1.5, -1.0, 0.0]), y


CLIENTS = [samples(30, 1, 0.2), samples(45, 2, 0.9), samples(24, 3, 0.5)]
TEST = samples(TESTS, 4, 0.55)


class OneLogit(nn.Module):
    """A small network with one output per sample, in a column of its own or not."""

    def __init__(self, column: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.column = column

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x)
        return z if self.column else z.squeeze(1)


class TwoLogits(OneLogit):
    """The same network as a model of two classes."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x)
        return torch.cat([torch.zeros_like(z), z], dim=1)


def bernoulli(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs.reshape(-1), targets.reshape(-1).to(outputs.dtype))


def train(model: nn.Module, method: ff.Method, loss=bernoulli, engine="inprocess", **more) -> ff.Run:
    return ff.train(
        ff.Federation(CLIENTS, test=TEST),
        model,
        method,
        local=ff.LocalSGD(lr=0.3, epochs=2, batch_size=8),
        rounds=4,
        loss=loss,
        dtype=torch.float64,
        engine=engine,
        **more,
    )


def by_hand(model: nn.Module) -> tuple[float, list[float]]:
    """Accuracy, and accuracy by class, of a logit above 0."""
    with torch.no_grad():
        right = ((model(TEST[0]).reshape(-1) > 0) == (TEST[1] == 1)).numpy()
    return right.mean(), [right[TEST[1].numpy() == c].mean() for c in (0, 1)]


# -- accuracy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", [True, False])
@pytest.mark.parametrize("engine", ["inprocess", "workers:2"])
def test_a_single_logit_predicts_class_1_above_0(column, engine):
    run = train(OneLogit(column), ff.fedavg(), engine=engine)
    accuracy, by_class = by_hand(run.model)
    assert 0.75 < accuracy < 1
    assert run.accuracy == pytest.approx(accuracy, abs=1e-12)
    shares = np.array([[(y == c).double().mean() for c in (0, 1)] for _, y in CLIENTS])
    each = np.sort(shares @ by_class)
    told = run.history[-1]["client_accuracy"]
    assert told["mean"] == pytest.approx(each.mean(), abs=1e-6)
    assert told["worst_decile"] == pytest.approx(each[0], abs=1e-6)


@pytest.mark.parametrize(
    ("shape", "loss"),
    [
        ((-1, 1), F.binary_cross_entropy_with_logits),
        ((-1, 1), nn.BCEWithLogitsLoss()),
        ((-1,), F.binary_cross_entropy_with_logits),
    ],
)
def test_targets_of_the_bernoulli_loss_are_classes(shape, loss):
    """0 and 1 as floats, as torch's own loss wants them."""
    x, y = TEST[0], TEST[1].to(torch.float64).reshape(shape)
    model = OneLogit(column=len(shape) == 2)
    score = evaluate(FlatModel(model, torch.float64), None, ff.Federation([(x, y)]).client(0), loss)
    accuracy, by_class = by_hand(model.double())
    assert score["accuracy"] == pytest.approx(accuracy, abs=1e-12)
    assert score["accuracy_by_class"] == pytest.approx(by_class, abs=1e-12)


def test_a_column_of_labels_is_compared_row_by_row():
    data = ff.Federation([(TEST[0], TEST[1][:, None])]).client(0)
    model = OneLogit()
    score = evaluate(FlatModel(model, torch.float64), None, data, bernoulli)
    assert score["accuracy"] == pytest.approx(by_hand(model.double())[0], abs=1e-12)


@pytest.mark.parametrize(
    ("targets", "loss"),
    [
        (torch.arange(TESTS) % 3, lambda z, y: F.poisson_nll_loss(z.squeeze(1), y.to(z.dtype))),
        # the only label that is neither 0 nor 1 is in the second batch
        (torch.cat([torch.zeros(TESTS - 1).long(), torch.tensor([2])]), bernoulli),
        (torch.rand(TESTS, 1, dtype=torch.float64), F.binary_cross_entropy_with_logits),
        (TEST[1].double()[:, None], F.mse_loss),
        ((TEST[0] > 0).double(), lambda z, y: F.binary_cross_entropy_with_logits(z.expand_as(y), y)),
    ],
)
def test_without_two_classes_there_is_no_accuracy(targets, loss):
    """Counts, probabilities and numbers: one output says nothing about a class."""
    data = ff.Federation([(TEST[0], targets)]).client(0)
    score = evaluate(FlatModel(OneLogit(), torch.float64), None, data, loss)
    assert score["accuracy"] is None
    assert score["accuracy_by_class"] is None
    assert math.isfinite(score["loss"])


def test_the_only_class_of_cross_entropy_is_always_right():
    data = ff.Federation([(TEST[0], torch.zeros(TESTS, dtype=torch.int64))]).client(0)
    score = evaluate(FlatModel(OneLogit(), torch.float64), None, data, F.cross_entropy)
    assert score["accuracy"] == 1.0


# -- distillation ----------------------------------------------------------------------------------

TAUGHT = [ff.fedgmt, ff.fedgmt_v2]


@pytest.mark.parametrize("column", [True, False])
@pytest.mark.parametrize("method", TAUGHT)
def test_distillation_is_that_of_two_classes(method, column):
    """Cross-entropy of the logits (0, z) is the Bernoulli loss of z: the same runs, test by test."""
    chosen = method(gamma=2.0, tau=1.5)
    one, two = train(OneLogit(column), chosen), train(TwoLogits(), chosen, loss=F.cross_entropy)
    torch.testing.assert_close(one.server.w, two.server.w, rtol=1e-11, atol=1e-12)
    for mine, theirs in zip(one.history, two.history, strict=True):
        assert mine["accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-12)
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-10)
        assert mine["client_accuracy"] == pytest.approx(theirs["client_accuracy"], abs=1e-6)


@pytest.mark.parametrize("method", TAUGHT)
def test_the_weight_of_a_distillation_matters(method):
    models = [train(OneLogit(), method(gamma=gamma)).server.w for gamma in (0.0, 1.0, 10.0)]
    assert all((a - b).abs().max() > 1e-4 for a, b in pairwise(models))


@pytest.mark.parametrize("mechanism", [ff.TrajectoryLoss, ff.OwnTrajectoryLoss])
@pytest.mark.parametrize("shape", [(6, 1), (6,)])
def test_the_known_gradient_is_that_of_the_loss(mechanism, shape):
    """Of the term itself, by finite differences, in which the teacher's entropy is a constant."""
    term = mechanism(gamma=0.7, tau=2.5)
    rng = torch.Generator().manual_seed(0)
    teacher, z = (3 * torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(2))

    def divergence(logits: Tensor) -> Tensor:
        p, q = (torch.sigmoid(t.reshape(-1) / 2.5) for t in (teacher, logits))
        kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        return 0.7 * 2.5**2 * kl.mean()

    taught, h = term.soften(teacher), 1e-5
    moves = h * torch.eye(6, dtype=torch.float64).reshape(6, *shape)
    expected = torch.stack([(divergence(z + m) - divergence(z - m)) / (2 * h) for m in moves]).reshape(shape)
    direction, factor = term.pull(taught, z)
    torch.testing.assert_close(factor * direction, expected, rtol=1e-7, atol=1e-9)
    w = z.clone().requires_grad_()
    (found,) = torch.autograd.grad(term.distil(taught, w), w)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("model", [OneLogit(), OneLogit(column=False), TwoLogits()])
def test_fedntd_needs_a_third_class(model):
    with pytest.raises(ff.FedflatError) as caught:
        train(model, ff.fedntd(), loss=F.cross_entropy if isinstance(model, TwoLogits) else bernoulli)
    told = str(caught.value)
    assert "not-true-distillation" in told
    assert "two classes" in told
    assert "fedgmt" in told
    assert "\n" not in told
