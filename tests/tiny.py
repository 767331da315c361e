"""A tiny experiment that every engine must give the same bits for."""

import sys
import time
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

import fedflat as ff
from fedflat.core.evaluation import evaluate
from fedflat.core.flat import FlatModel
from fedflat.core.metrics import BatchOutputs, InOrder, Metrics
from fedflat.engines.base import Engine, Job


def federation(seed: int = 0) -> ff.Federation:
    """Clients of very different sizes, so that the order of work is not the order of clients."""
    rng = torch.Generator().manual_seed(seed)
    sizes = [5, 40, 12, 30, 7, 21]
    clients = [
        (torch.randn(n, 6, generator=rng) + i, torch.randint(3, (n,), generator=rng))
        for i, n in enumerate(sizes)
    ]
    test = (torch.randn(2500, 6, generator=rng), torch.randint(3, (2500,), generator=rng))
    result = ff.Federation(clients, test)
    result.set_test_groups(
        torch.arange(2500) % 7 // 3, ("north", "east", "west")
    )  # three, three and one of seven
    return result


def network(norm: bool = False, dropout: bool = False) -> nn.Module:
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Dropout(0.3 * dropout), nn.Linear(8, 3))


def train(
    method: str,
    engine: object,
    rounds: int = 5,
    module: nn.Module | None = None,
    momentum: float = 0.5,
    **more,
) -> ff.Run:
    return ff.train(
        federation(),
        module or network(dropout=True),
        method,
        local=ff.LocalSGD(lr=0.1, momentum=momentum, weight_decay=1e-3, epochs=2, batch_size=8),
        rounds=rounds,
        engine=engine,
        **{"participation": 4, **more},
    )


def same(a: ff.Run, b: ff.Run) -> None:
    assert a.server.w.equal(b.server.w)
    timeless = [[{k: v for k, v in row.items() if k != "seconds"} for row in run.history] for run in (a, b)]
    assert timeless[0] == timeless[1]
    assert a.clients.clients() == b.clients.clients()
    for client in a.clients.clients():
        ours, theirs = a.clients.get(client), b.clients.get(client)
        assert ours.keys() == theirs.keys()
        assert all(ours[name].equal(theirs[name]) for name in ours)


class Entropy(InOrder):
    """A metric of a test's own: the mean entropy of what the model says."""

    name = "entropy"

    def keep(self, batch: BatchOutputs) -> list[float]:
        return torch.distributions.Categorical(logits=batch.outputs).entropy().tolist()

    def combine(self, kept) -> float:
        return sum(value for batch in kept for value in batch)


def score_twice(engine: Engine) -> None:
    """Have two models tested that change at once; their scores must be those of one process."""
    model = FlatModel(network(norm=True))
    metrics = Metrics(["accuracy", Entropy(), "loss", "accuracy_by_group"])
    job = Job(federation(), model, ff.fedavg(), ff.LocalSGD(), F.cross_entropy, 0, "average", metrics=metrics)
    w, buffers = model.vector.clone(), model.read_buffers()
    points = [(w + 0.1 * n, buffers + 0.2 * n) for n in (1, 2)]
    expected = []
    for point, statistics in points:
        model.write_buffers(statistics)
        expected.append(evaluate(model, point, job.federation.test, F.cross_entropy, metrics))
    assert expected[0] != expected[1]
    engine.open(job)
    try:
        for (point, statistics), score in zip(points, expected, strict=True):
            future = engine.evaluate(point, statistics)
            point.zero_(), statistics.zero_()
            assert future.result() == score == future.result()
            assert future.done()
    finally:
        engine.close()


class Slow(nn.Module):
    """Long enough to be killed while it works."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return self.inner(x)


def send_with_their_classes(tests: ModuleType) -> None:
    """Have Ray treat a module of tests, and this one, as it treats a script: actors cannot import them."""
    from ray import cloudpickle

    for module in (tests, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)
