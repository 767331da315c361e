"""What becomes of a module's buffers: masks and large whole numbers stay what they are, complex numbers and state
that nobody sends are refused, and results do not depend on who trains whom."""

import pytest
import torch
from tiny import federation, same, train
from torch import nn

import fedflat as ff
from fedflat.core.flat import FlatModel

IDS = [2**24 + 1, -(2**24) - 1, 2**53 + 1, -(2**62) - 12345, 2**63 - 1, -(2**63), 0, -1, 7]


class Masked(nn.Module):
    """A network with a mask of -inf, large numbers, a truth table, an odd constant, and BatchNorm."""

    LEAST = -torch.inf

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("mask", torch.tensor([0.0, self.LEAST, 0.0, 0.0, self.LEAST, 0.0, 0.0, 0.0]))
        self.register_buffer("ids", torch.tensor(IDS))
        self.register_buffer("few", torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32))
        self.register_buffer("truths", torch.tensor([True, False, True]))
        self.register_buffer("tenth", torch.tensor(0.1))

    def forward(self, x):
        return self.last(torch.softmax(self.norm(self.first(x)) + self.mask, dim=1))


CONSTANT = ("mask", "ids", "few", "truths", "tenth")


@pytest.mark.parametrize("buffers", ["average", "local", "server", "reset"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constants_pass_unchanged_and_statistics_are_averaged(buffers, dtype):
    run = train("fedsam", "inprocess", rounds=3, module=Masked(), buffers=buffers, dtype=dtype)
    assert not any(row.get("rejected") for row in run.history)
    wanted = Masked().to(dtype)
    for name in CONSTANT:
        assert getattr(run.model, name).equal(getattr(wanted, name)), name
    moved = not run.model.norm.running_mean.equal(wanted.norm.running_mean)
    assert moved == (buffers in ("average", "reset"))


@pytest.mark.parametrize(
    "more", [{"norm_bound": {"buffers": 1e-3}, "over_bound": "clip"}, {"aggregate": "median"}]
)
def test_constants_pass_what_limits_a_single_client(more):
    run = train("fedavg", "inprocess", rounds=2, module=Masked(), **more)
    assert not any(row.get("rejected") for row in run.history)
    for name in CONSTANT:
        assert getattr(run.model, name).equal(getattr(Masked(), name)), name


@pytest.mark.parametrize("noise", [0, 0.1])
@pytest.mark.parametrize("buffers", ["average", "reset"])
def test_noise_on_uploads_leaves_constants_and_statistics_alone(buffers, noise, recwarn):
    method = f"fedavg + private-uploads(clip=1, noise={noise})"
    run = train(method, "inprocess", rounds=2, module=Masked(), buffers=buffers)
    assert not any("NaN" in str(warning.message) for warning in recwarn)
    for name in CONSTANT:
        assert getattr(run.model, name).equal(getattr(Masked(), name)), name
    assert not run.model.norm.running_mean.equal(torch.zeros(8))


def test_private_statistics_that_are_spoiled_leave_as_they_were_received():
    """So that the average is that of a client whose statistics did not move, its constants among them."""
    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    data = ff.Federation([(x, y), (x * torch.nan, y)])
    method = "fedavg + private-uploads(clip=1, noise=0)"
    local = ff.LocalSGD(lr=0.1, steps=1, batch_size=None)
    with pytest.warns(UserWarning, match="buffers as received"):
        run = ff.train(data, Masked(), method, local, rounds=1)
    assert not run.history[0]["rejected"]
    before = Masked()
    for name in CONSTANT:
        assert getattr(run.model, name).equal(getattr(before, name)), name
    with torch.no_grad():
        mean = before.first(x).mean(dim=0)
    torch.testing.assert_close(
        run.model.norm.running_mean, 0.1 * mean / 2
    )  # momentum, and half of the clients


def test_every_engine_has_the_same_buffers(tmp_path):
    whole = train("fedgmt", "inprocess", rounds=4, module=Masked())
    workers = train("fedgmt", ff.Workers(2), rounds=4, module=Masked())
    same(whole, workers)
    train("fedgmt", "inprocess", rounds=2, module=Masked(), out=tmp_path)
    resumed = train("fedgmt", "inprocess", rounds=4, module=Masked(), out=tmp_path, resume=True)
    for other in (workers, resumed):
        assert other.server.buffers.equal(whole.server.buffers)
        for name, value in whole.model.state_dict().items():
            assert other.model.state_dict()[name].equal(value), name


def test_whole_numbers_survive_the_vector_and_averages_are_rounded():
    model = FlatModel(Masked())
    vector = model.read_buffers()
    assert vector.dtype == torch.float32
    model.module.ids.zero_(), model.module.few.zero_(), model.module.truths.zero_()
    model.write_buffers(vector)
    assert model.module.ids.tolist() == IDS
    assert model.module.few.tolist() == [2**31 - 1, -(2**31)]
    assert model.module.truths.tolist() == [True, False, True]
    model.module.ids.copy_(torch.tensor([10, -10, 2**30 + 2, 2**40, 0, 1, 3, 5, 6]))
    one = model.read_buffers()
    model.module.ids.copy_(torch.tensor([13, -20, 2**30 + 8, 2**40 + 2**20, 0, 2, 4, 5, -6]))
    model.write_buffers((one + 3 * model.read_buffers()) / 4)
    # a quarter of the first and three of the second
    wanted = [12, -18, 2**30 + 6, 2**40 + 3 * 2**18, 0, 2, 4, 5, -3]
    assert all(abs(a - b) <= 1 for a, b in zip(model.module.ids.tolist(), wanted, strict=True))


def test_vectors_of_an_earlier_version_are_read():
    model = FlatModel(Masked())
    old = torch.cat([b.to(torch.float32).reshape(-1) for b in model.module.buffers()])
    model.module.norm.running_mean.fill_(7)
    model.write_buffers(old)
    assert model.module.norm.running_mean.equal(torch.zeros(8))
    assert model.module.few.tolist()[1] == -(2**31)


def test_counters_of_batches_stay_exact():
    """Five batches a round at every client: the server's counter is five more, however large it is."""
    data = ff.Federation([(torch.randn(10, 3), torch.arange(10) % 2) for _ in range(3)])
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    module[0].num_batches_tracked.fill_(2**24 - 20)
    run = ff.train(data, module, "fedavg", local=ff.LocalSGD(lr=0.1, batch_size=2), rounds=3)
    assert run.model[0].num_batches_tracked.item() == 2**24 - 5
    assert len(FlatModel(module).read_buffers()) == 7  # two statistics of three, and the counter


class Remembering(nn.Module):
    """Replaces its buffer, in every pass in training, by a moving average."""

    def __init__(self, persistent):
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6), persistent=persistent)

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(dim=0)
        return self.inner(x - self.mean)


@pytest.mark.parametrize("engine", ["inprocess", ff.Workers(2)])
def test_state_that_is_not_sent_is_refused(engine):
    with pytest.raises(
        ff.FedflatError, match=r"Remembering changes its buffer 'mean' in training.*persistent=False"
    ):
        train("fedavg", engine, rounds=1, module=Remembering(persistent=False))


def test_a_buffer_that_the_module_replaces_is_sent_like_any_other():
    module = Remembering(persistent=True)
    here, there = (
        train("fedavg", engine, rounds=3, module=module) for engine in ("inprocess", ff.Workers(2))
    )
    same(here, there)
    assert here.server.buffers.equal(there.server.buffers)
    assert here.model.mean.equal(here.server.buffers)
    assert here.model.mean.abs().min() > 0


class Growing(nn.Module):
    """Has a table that grows when it is too short, and a constant; neither is persistent."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(6, 3)
        self.register_buffer("table", torch.zeros(1), persistent=False)
        self.register_buffer("gap", torch.tensor([float("nan"), 1.0]), persistent=False)

    def forward(self, x):
        if len(self.table) < len(x):
            self.table = torch.arange(float(len(x)))
        return self.inner(x + 0 * self.table[: len(x), None])


def test_tables_that_grow_and_constants_are_no_state():
    same(train("fedavg", "inprocess", module=Growing()), train("fedavg", ff.Workers(2), module=Growing()))


class Turning(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = nn.Linear(6, 3)
        value = torch.ones(3, dtype=torch.complex64)
        if kind == "parameter":
            self.turn = nn.Parameter(value)
        else:
            self.register_buffer("turn", value, persistent=kind == "buffer")

    def forward(self, x):
        return self.inner(x) * self.turn.real


@pytest.mark.parametrize("kind", ["parameter", "buffer", "table"])
def test_complex_numbers_are_refused(kind):
    with pytest.raises(
        ff.FedflatError, match=r"Turning has the complex (parameter|buffer) 'turn'.*view_as_real"
    ):
        ff.train(federation(), Turning(kind), "fedavg", rounds=1)


def held(value):
    """A network that keeps a tensor and does nothing with it."""
    network = nn.Sequential(nn.Linear(6, 3))
    network.register_buffer("kept", value)
    return network


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.eye(3).to_sparse(), "Sequential has the sparse buffer 'kept'.*to_dense"),
        (
            torch.tensor([1e300, 1.0], dtype=torch.float64),
            "numbers above 3.4e.38 in its buffer 'kept'.*float64",
        ),
        (torch.tensor([float("nan"), 1.0]), "NaN in a buffer before the first round"),
    ],
    ids=["sparse", "large", "nan"],
)
def test_buffers_that_cannot_travel_are_refused(value, says):
    with pytest.raises(ff.FedflatError, match=says):
        ff.train(federation(), held(value), "fedavg", rounds=1)


def test_large_numbers_travel_in_double_precision():
    value = torch.tensor([1e300, -torch.inf, 1 / 3], dtype=torch.float64)
    run = ff.train(federation(), held(value), "fedavg", rounds=2, dtype=torch.float64)
    assert run.model.kept.equal(value)


class Spoiling(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.register_buffer("level", torch.zeros(2))

    def forward(self, x):
        self.level[0] = torch.inf
        return self.inner(x)


def test_an_infinite_value_where_there_was_none_is_still_refused():
    with pytest.raises(ff.FedflatError, match="its buffers hold NaN or infinite values"):
        train("fedavg", "inprocess", rounds=1, module=Spoiling(), on_bad_upload="stop")
