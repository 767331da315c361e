"""A shift that is alike in every step: the iterate carried to the point, against moving the point in every step."""

import pytest
import torch
from torch import nn

import fedflat as ff
from fedflat.client.step import Step
from fedflat.methods.mechanism import Mechanism, Move

METHODS = ["fedlesam", "fedlesam_s", "fedlesam_d", "fednsam", "fednsam_s", "fednsam_d", "fedavg_nesterov"]
FEATURES, CLASSES = 6, 3


class Onlooker(Mechanism):
    """Changes nothing, but may look at the iterate in every step."""

    def direction(self, step: Step, d: torch.Tensor) -> None:
        step.w.sum()


class Aside(Mechanism):
    """`δ = 0.5` in every entry."""

    def steady_shift(self, local: ff.Local) -> Move:
        return torch.ones_like(local.start), 0.5


def train(method: str | ff.Method, dtype: torch.dtype = torch.float64, **local):
    draw = torch.Generator().manual_seed(0)
    clients = [
        (
            torch.randn(14, FEATURES, generator=draw, dtype=dtype),
            torch.randint(CLASSES, (14,), generator=draw),
        )
        for _ in range(3)
    ]
    torch.manual_seed(1)
    return ff.train(
        ff.Federation(clients, test=clients[0]),
        nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)),
        method,
        rounds=4,
        local=ff.LocalSGD(lr=0.1, epochs=2, batch_size=5, **local),
        dtype=dtype,
    )


@pytest.fixture
def moved(monkeypatch) -> list[int]:
    """The steps in which the point was moved."""
    seen: list[int] = []
    move = Step.move

    def noting(self: Step, *arguments, **more) -> None:
        seen.append(self.index)
        move(self, *arguments, **more)

    monkeypatch.setattr(Step, "move", noting)
    return seen


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("method", METHODS)
def test_same_numbers_as_moving_the_point(method, decay, moved):
    carried = train(method, weight_decay=decay)
    assert not moved
    stepwise = train(ff.Method("seen", [*ff.METHODS[method]().mechanisms, Onlooker()]), weight_decay=decay)
    assert moved
    assert torch.allclose(carried.server.w, stepwise.server.w, rtol=1e-11, atol=1e-13)
    assert not torch.allclose(carried.server.w, train("fedavg", weight_decay=decay).server.w, rtol=1e-3)
    for client in carried.clients.clients():
        ours, theirs = carried.clients.get(client), stepwise.clients.get(client)
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[name], theirs[name], rtol=1e-9, atol=1e-11) for name in ours)


@pytest.mark.parametrize("local", [{"momentum": 0.9}, {"clip_norm": 0.1}])
def test_steps_with_a_memory_or_a_limit_move_the_point(local, moved):
    """There the direction is not the gradient at the point and vectors alone."""
    train("fednsam", **local)
    assert moved


def test_beside_an_ascent_the_point_is_moved_in_every_step(moved):
    """FedSAM's own ascent starts where the extrapolation has led."""
    train("fedsam_nesterov")
    assert set(moved) == set(range(6))  # two epochs of three batches


def test_the_gradient_is_taken_aside():
    """One step of full batch from w: `w − η ∇f(w + δ)`, by autograd."""
    x, y = torch.randn(9, FEATURES, dtype=torch.float64), torch.arange(9) % CLASSES
    layer = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
    aside = [parameter.detach() + 0.5 for parameter in layer.parameters()]
    for parameter in aside:
        parameter.requires_grad_()
    gradients = torch.autograd.grad(nn.functional.cross_entropy(nn.functional.linear(x, *aside), y), aside)
    expected = [
        p.detach() - 0.1 * (g + 0.3 * p.detach()) for p, g in zip(layer.parameters(), gradients, strict=True)
    ]
    local = ff.LocalSGD(lr=0.1, steps=1, batch_size=None, weight_decay=0.3)
    run = ff.train(
        ff.Federation([(x, y)]), layer, [Aside()], rounds=1, local=local, participation=1, dtype=torch.float64
    )
    for parameter, wanted in zip(run.model.parameters(), expected, strict=True):
        assert torch.allclose(parameter, wanted, rtol=1e-12, atol=1e-14)


def test_what_no_gradient_reaches_stays_exactly():
    """Carrying there and back would leave roundings."""
    x, y = torch.randn(8, FEATURES), torch.arange(8) % CLASSES
    x[:, 0] = 0.0
    layer = nn.Linear(FEATURES, CLASSES)
    before = layer.weight.detach().clone()
    run = ff.train(
        ff.Federation([(x, y)]), layer, [Aside()], rounds=2, local=ff.LocalSGD(lr=0.1), participation=1
    )
    after = next(iter(run.model.parameters())).detach()
    assert after[:, 0].equal(before[:, 0])
    assert not after[:, 1].equal(before[:, 1])


def test_the_iterate_is_itself_again_at_the_end():
    class Looking(Mechanism):
        def end(self, local):
            assert torch.allclose(local.w, local.start + local.update, rtol=1e-12)
            assert local.w.sub(local.start).abs().max() < 0.4  # not half a unit aside
            return {}

    train(ff.Method("looking", [Aside(), Looking()]))
