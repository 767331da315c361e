"""Models that change their input in place leave the samples alone, and train as if they copied it first."""

from itertools import pairwise

import pytest
import torch
from tiny import same
from torch import nn

import fedflat as ff
from fedflat.core.evaluation import evaluate
from fedflat.flatness.embedding import penultimate_features
from fedflat.flatness.surface import Surface


class Doubling(nn.Module):
    """Doubles its input, in place."""

    def forward(self, x):
        return x.mul_(2)


class Unseen(nn.Module):
    """Doubles its input in a way that no version counter sees."""

    def forward(self, x):
        x.data.mul_(2)
        return x


class ByNumpy(nn.Module):
    def forward(self, x):
        values = x.detach().numpy()
        values *= 2
        return x


class Copying(nn.Module):
    def forward(self, x):
        return x.clone()


class Sometimes(nn.Module):
    """Writes from the third pass on."""

    def __init__(self):
        super().__init__()
        self.passes, self.inner = 0, nn.Linear(5, 3)

    def forward(self, x):
        self.passes += 1
        return self.inner(x.mul_(2) if self.passes > 2 else x)


FIRST = {
    "doubling": Doubling,
    "unseen": Unseen,
    "numpy": ByNumpy,
    "relu": lambda: nn.ReLU(inplace=True),
    "dropout": lambda: nn.Dropout(0.3, inplace=True),  # which writes in training alone
}


def network(first, copying):
    torch.manual_seed(3)
    rest = [FIRST[first](), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*([Copying()] if copying else [nn.Identity()]), *rest)


def samples():
    rng = torch.Generator().manual_seed(0)
    return torch.randn(48, 5, generator=rng), torch.randint(3, (48,), generator=rng)


def federation(shared=False):
    """Clients with arrays of their own, or with rows of one that they share; and all inputs."""
    x, y = samples()
    parts = [x[first:last].clone() for first, last in pairwise((0, 5, 24, 36, 48))]
    labels = torch.split(y, [len(part) for part in parts])
    test = (parts[-1], labels[-1])
    if shared:
        rows = [range(5), range(5, 24), range(24, 36)]
        return ff.Federation.from_indices((x, y), rows, test), [x, parts[-1]]
    return ff.Federation(list(zip(parts[:-1], labels[:-1], strict=True)), test), parts


def untouched(inputs):
    wanted = samples()[0]
    return torch.cat(inputs)[:36].equal(wanted[:36]) and inputs[-1].equal(wanted[36:])


def train(method, first, copying, shared, batch_size, **more):
    data, inputs = federation(shared)
    run = ff.train(
        data,
        network(first, copying),
        method,
        local=ff.LocalSGD(lr=0.1, epochs=2, batch_size=batch_size),
        rounds=2,
        **more,
    )
    assert untouched(inputs), "the samples themselves were changed"
    return run


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedgmt"])
@pytest.mark.parametrize(("shared", "batch_size"), [(False, None), (False, 4), (True, 4)])
def test_training_is_that_of_a_model_that_copies_its_input(method, first, shared, batch_size):
    same(*(train(method, first, copying, shared, batch_size) for copying in (False, True)))


def test_workers_train_as_the_process_itself_does():
    ours = train("fedgmt", "doubling", False, True, 4, engine=ff.Workers(2))
    same(ours, train("fedgmt", "doubling", True, True, 4))


def test_flatness_is_that_of_a_model_that_copies_its_input():
    data, inputs = federation()
    surfaces = [Surface(network("doubling", copying), data.client(1)) for copying in (False, True)]
    vector = torch.ones(1, surfaces[0].size)
    found = [(s.value(), *s.value_and_gradient(), s.hessian_times(vector)) for s in surfaces]
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    features = [penultimate_features(s.model, data.client(1)) for s in surfaces]
    assert (features[0] == features[1]).all()
    assert untouched(inputs)


def test_evaluation_hands_out_copies():
    """Even to a model that is found out too late, and to a loss that changes labels."""
    (x, y), damaged = samples(), []

    class Later(nn.Linear):
        def forward(self, given):
            damaged.append(given)
            if len(damaged) > 1:
                given.data.zero_()
            return super().forward(given)

    def loss(outputs, targets):
        value = nn.functional.cross_entropy(outputs, targets)
        targets.zero_()
        return value

    inputs, labels = x.clone(), y.clone()
    model = ff.FlatModel(Later(5, 3))
    for _ in range(3):
        evaluate(model, model.vector, ff.Federation([(inputs, labels)]).client(0), loss)
    assert len(damaged) == 3
    assert inputs.equal(x) and labels.equal(y)


def test_a_model_that_writes_only_later_is_refused():
    data, _ = federation()
    with pytest.raises(ff.FedflatError, match=r"Sometimes changes some of its inputs in place.*x.clone"):
        ff.train(data, Sometimes(), "fedavg", local=ff.LocalSGD(lr=0.1, batch_size=4), rounds=1)
