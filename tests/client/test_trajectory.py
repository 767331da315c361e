"""`ff.local_trajectory`: the iterate after every step, of every method, against rounds that stop there."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedflat as ff
from fedflat.client.optimisers import LocalOptimiser
from fedflat.client.round import ClientRound
from fedflat.core.flat import FlatModel
from fedflat.core.messages import Download
from fedflat.training.record import RoundRecord

LR, STEPS = 0.1, 4
OPTIMISERS = {
    "sgd": {},
    "decay": {"weight_decay": 0.05},
    "momentum": {"momentum": 0.5},
    "clipped": {"clip_norm": 0.5},
    "falling": {"schedule": "exponential:0.9"},
}


def full_batches(steps: int, **more) -> ff.LocalSGD:
    """Every step takes the same samples, however many steps there are."""
    return ff.LocalSGD(lr=LR, batch_size=None, steps=steps, **more)


class Trained:
    """Some rounds of a method, and what its next round needs."""

    def __init__(self, method: str, local: LocalOptimiser, activation: type[nn.Module]) -> None:
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(6, 5), activation(), nn.Linear(5, 3)).double()
        draw = torch.Generator().manual_seed(0)
        x, y = torch.randn(12, 6, generator=draw).double(), torch.randint(3, (12,), generator=draw)
        federation = ff.Federation([(x, y), (x + 1, y)]).to(torch.float64, "cpu")
        self.received: dict[str, Tensor | float] = {}

        def look(record: RoundRecord) -> None:
            state = {name: value for name, value in record.server.state.items() if value is not None}
            self.received.update({**state, **record.server.download(0).values})

        run = ff.train(federation, module, method, local, rounds=3, dtype=torch.float64, on_round=look)
        self.method, self.model, self.start = ff.as_method(method), run.model, run.server.w.clone()
        self.shard, self.state = federation.client(0), run.clients.get(0)

    def path(self, local: LocalOptimiser, **more) -> list[Tensor]:
        return ff.local_trajectory(
            self.model, 0, self.shard, self.method, local, self.received, self.state, **more
        )

    def end(self, local: LocalOptimiser, round: int = 0) -> Tensor:
        """Where a round ends, from its update as it was trained (`end` may change what is uploaded)."""
        model = FlatModel.of(self.model)
        training = ClientRound(model, self.method, local, F.cross_entropy, seed=0, measured=True)
        download = Download(round, local.lr_in(round), self.start, dict(self.received), None)
        upload = training.run(0, self.shard, download, dict(self.state))
        return self.start + (upload.update if upload.trained is None else upload.trained)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh], ids=["by hand", "by autograd"])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("method", ff.METHODS)
def test_a_trajectory_has_the_iterate_of_every_step(method, optimiser, activation):
    """The k-th point is where a round of k steps ends: shifts of the point are no part of it."""
    more = OPTIMISERS[optimiser]
    trained = Trained(method, full_batches(STEPS, **more), activation)
    path = trained.path(full_batches(STEPS, **more), round=2)
    assert len(path) == STEPS + 1 and path[0].equal(trained.start)
    ends = [trained.start, *(trained.end(full_batches(k, **more), round=2) for k in range(1, STEPS + 1))]
    torch.testing.assert_close(torch.stack(path), torch.stack(ends), rtol=0, atol=1e-14)
    for (before, after), (start, stop) in zip(pairwise(path), pairwise(ends), strict=True):
        assert (after - before).norm().item() == pytest.approx((stop - start).norm().item(), rel=1e-9)
        assert (after - before).norm() > 1e-4


@pytest.mark.parametrize("method", ["fednsam", "fedlesam", "fedsam", "fedavg"])
def test_moves_are_as_long_as_steps(method):
    """A step is the learning rate times a gradient, and not the way to the point where that is taken."""
    trained = Trained(method, full_batches(STEPS), nn.Tanh)
    moves = [(b - a).norm().item() for a, b in pairwise(trained.path(full_batches(STEPS)))]
    gradient = FlatModel.of(trained.model).gradient(
        lambda module: F.cross_entropy(module(trained.shard.inputs), trained.shard.targets)
    )
    assert 0.3 < moves[0] / (LR * gradient.norm().item()) < 3
    assert 0 < max(moves) < 3 * min(moves)


def test_small_batches_and_other_optimisers():
    """The last point is where the round ends, also with batches that are drawn."""
    for local in (
        ff.LocalSGD(lr=LR, epochs=2, batch_size=5, momentum=0.5, nesterov=True),
        ff.LocalAdam(lr=0.01, epochs=2, batch_size=5, within="linear:0.2"),
        ff.LocalAdamW(lr=0.01, epochs=2, batch_size=5),
    ):
        trained = Trained("fedsam", local, nn.ReLU)
        path = trained.path(local)
        assert len(path) == 7
        torch.testing.assert_close(path[-1], trained.end(local), rtol=0, atol=1e-14)


def test_the_model_stays_as_it_is():
    trained = Trained("fednsam", full_batches(STEPS), nn.Tanh)
    model = FlatModel(trained.model, torch.float64)
    before = model.vector.clone()
    for _ in range(2):
        ff.local_trajectory(
            model, 0, trained.shard, trained.method, full_batches(STEPS), trained.received, trained.state
        )
        assert model.vector.equal(before)
        assert all(p.untyped_storage().data_ptr() == model.vector.untyped_storage().data_ptr()
                   for p in model.parameters)  # fmt: skip
