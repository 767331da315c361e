"""`train()`: what a run depends on, its arithmetic, its guard against bad uploads, and what it leaves behind."""

import contextlib
import copy
import json
import math
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from test_identities import assert_same, client_gradient, few, train_small, trajectory
from test_reference import SCHEDULE, SHAPE, SIZES, network, problem
from torch import Tensor, nn

import fedflat as ff
from fedflat.core.messages import Download, Upload
from fedflat.engines.inprocess import InProcess
from fedflat.server.server import Server
from fedflat.server.uploads import RejectedUpload

STATEFUL = [
    "scaffold",
    "feddyn",
    "fedsmoo",
    "fedlesam",
    "fedgf",
    "fedgmt",
    "fedgmt_v2",
    "fedwmsam",
    "fednsam_s",
]


def deep(seed: int = 0) -> nn.Module:
    """A float32 network with normalisation statistics and dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(SHAPE[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, SHAPE[2])
        )


def train_deep(method: str, **given) -> ff.Run:
    """Mini-batches of a network with dropout, in float32."""
    local = ff.LocalSGD(lr=0.1, momentum=0.5, epochs=2, batch_size=7)  # leaves no batch of a single sample
    return train_small(method, **{"model": deep(), "dtype": torch.float32, "local": local, **given})


def same_run(a: ff.Run, b: ff.Run) -> bool:
    """Bit for bit: the model, its buffers and what every client keeps."""
    if a.clients.clients() != b.clients.clients() or not torch.equal(a.server.w, b.server.w):
        return False
    mine, theirs = a.model.state_dict(), b.model.state_dict()
    kept = [(a.clients.get(c), b.clients.get(c)) for c in a.clients.clients()]
    pairs = [(mine, theirs), *kept]
    return all(x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in pairs)


# -- what a run depends on -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedgmt", "fedwmsam"])
def test_a_run_depends_on_its_seed_alone(method):
    runs = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        np.random.seed(noise)
        runs.append(train_deep(method, seed=5))
    assert same_run(*runs)
    assert not same_run(runs[0], train_deep(method, seed=6))


def test_every_random_thing_depends_on_the_seed():
    """Dropout alone, batches alone, participation alone, initial weights alone."""
    clients, _ = problem()
    full = ff.LocalSGD(lr=0.1, epochs=2, batch_size=None)
    federation = ff.Federation(clients)
    plain = nn.Linear(SHAPE[0], SHAPE[2])
    cases = {
        "dropout": {"model": nn.Sequential(nn.Dropout(0.5), plain), "local": full},
        "batches": {"model": plain, "local": ff.LocalSGD(lr=0.1, epochs=2, batch_size=4)},
        "participation": {"model": plain, "local": full, "participation": 2},
        "weights": {"model": "mlp", "local": full},
    }
    for name, case in cases.items():
        a, b, again = (ff.train(federation, rounds=3, seed=seed, **case) for seed in (0, 1, 0))
        assert torch.equal(a.server.w, again.server.w), name
        assert not torch.equal(a.server.w, b.server.w), name
    nothing = {"model": plain, "local": full, "rounds": 3}
    a, b = (ff.train(federation, seed=seed, **nothing) for seed in (0, 1))
    assert torch.equal(a.server.w, b.server.w)


class Backwards:
    """Runs the clients of a round in reverse, each on a model of its own; yields uploads in client order."""

    def open(self, job) -> None:
        self.job, self.module = job, copy.deepcopy(job.model.module)

    def uploads(self, clients, download, state) -> Iterator[Upload]:
        done = {}
        for client in reversed(clients):
            job = self.job
            model = ff.FlatModel(copy.deepcopy(self.module), job.model.vector.dtype)
            training = job.client_round(model)
            done[client] = training.run(
                client, job.federation.client(client), download(client), state(client)
            )
        for client in clients:
            yield done[client]

    def close(self) -> None:
        self.module = None


@pytest.mark.parametrize("method", ff.METHODS)
def test_the_order_of_clients_does_not_matter(method):
    assert same_run(train_deep(method), train_deep(method, engine=Backwards()))


@pytest.mark.parametrize("policy", ["local", "server", "reset"])
def test_the_order_of_clients_does_not_matter_for_buffers(policy):
    assert same_run(
        train_deep("fedgmt", buffers=policy), train_deep("fedgmt", buffers=policy, engine=Backwards())
    )


def test_global_generators_are_left_alone():
    federation, local = ff.Federation(problem()[0]), ff.LocalSGD(batch_size=7)
    module = deep()
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    ff.train(federation, module, "fedgmt", local=local, rounds=2, participation=2)
    ff.train(federation, "mlp", "fedsam", local=local, rounds=2, participation=ff.Bernoulli(0.5))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_given_module_is_the_start_and_stays(dtype):
    module = deep(seed=4).eval()
    before = copy.deepcopy(module.state_dict())
    starts = []

    def note(round: ff.RoundRecord) -> None:
        starts.append(round.server.w - round.server.step)

    run = train_deep("fedavg", model=module, dtype=dtype, on_round=note)
    given = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    torch.testing.assert_close(starts[0], given.to(dtype))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not module.training
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    trained = torch.cat([p.detach().reshape(-1) for p in run.model.parameters()])
    assert torch.equal(trained, run.server.w)
    assert (trained - given).abs().max() > 1e-3
    assert run.model is not module


# -- participation -------------------------------------------------------------------------------------


@given(clients=st.integers(1, 40), share=st.floats(0, 1), seed=st.integers(0, 2**40))
@few
def test_uniform_draws_without_replacement(clients, share, seed):
    count = max(1, round(share * clients))
    draws = [ff.Uniform(count).choose(t, clients, seed) for t in range(20)]
    for drawn in draws:
        assert drawn == sorted(set(drawn))
        assert len(drawn) == count
        assert 0 <= drawn[0] <= drawn[-1] < clients
    assert draws == [ff.Uniform(count).choose(t, clients, seed) for t in range(20)]


def test_uniform_is_uniform():
    rounds = 3000
    counts = Counter(c for t in range(rounds) for c in ff.Uniform(3).choose(t, 10, 0))
    deviation = math.sqrt(rounds * 0.3 * 0.7)
    assert all(abs(counts[c] - 0.3 * rounds) < 4 * deviation for c in range(10))


def test_bernoulli_statistics():
    """Mean and variance of a binomial number, and the same chance for everybody."""
    rounds, clients, p = 3000, 20, 0.3
    draws = [ff.Bernoulli(p).choose(t, clients, 1) for t in range(rounds)]
    sizes = np.array([len(drawn) for drawn in draws])
    assert abs(sizes.mean() - clients * p) < 4 * math.sqrt(clients * p * (1 - p) / rounds)
    assert sizes.var() == pytest.approx(clients * p * (1 - p), rel=0.1)
    counts = Counter(c for drawn in draws for c in drawn)
    assert all(abs(counts[c] - p * rounds) < 4 * math.sqrt(rounds * p * (1 - p)) for c in range(clients))
    assert all(drawn == sorted(drawn) for drawn in draws)
    assert ff.Bernoulli(1.0).choose(0, 5, 0) == ff.Everyone().choose(0, 5, 0) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("participation", "complaint"),
    [
        (ff.Uniform(6), "cannot draw 6 of 5"),
        (6, "cannot draw 6 of 5"),
        (ff.Uniform(0), "from 1 to 5"),
        (ff.Uniform(-1), "from 1 to 5"),
        (ff.Uniform(2.5), "2.5"),
        (ff.Bernoulli(0), r"\(0, 1\]"),
        (ff.Bernoulli(1.5), r"\(0, 1\]"),
        (ff.Bernoulli(math.nan), r"\(0, 1\]"),
        (ff.Schedule([[0]]), "1 rounds, 2 are asked for"),
        (ff.Schedule([[0], [5]]), r"round 1 is \[5\]; name clients from 0 to 4"),
        (ff.Schedule([[0, -1], [1]]), r"round 0 is \[0, -1\]"),
        (ff.Schedule([[0], [1, 1]]), "at most once"),
    ],
    ids=str,
)
def test_impossible_participation(participation, complaint):
    with pytest.raises(ff.FedflatError, match=complaint):
        ff.train(ff.Federation(problem()[0]), participation=participation, rounds=2)


def test_a_schedule_is_followed():
    run = train_small("fedavg", [[3, 0], [2], [4, 1, 0]])
    assert [row["clients"] for row in run.history] == [[0, 3], [2], [0, 1, 4]]


# -- the local optimiser -------------------------------------------------------------------------------

SEEN: list[Tensor] = []
"""the samples of every batch that a `Watching` module has seen in training"""


class Watching(nn.Linear):
    """A linear model that notes which samples it is given: their number is in the first column."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            SEEN.append(x[:, 0].round().long())
        return super().forward(x / x.new_tensor([100.0, 1, 1]))


def watched(samples: int) -> tuple[Tensor, Tensor, Watching]:
    SEEN.clear()
    rng = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 3, dtype=torch.float64, generator=rng)
    x[:, 0] = torch.arange(samples)
    module = Watching(3, 4).double()
    with torch.no_grad():
        module.weight.copy_(torch.randn(4, 3, generator=rng))
    return x, torch.arange(samples) % 4, module


@given(
    samples=st.integers(1, 23),
    batch_size=st.none() | st.integers(1, 9),
    epochs=st.integers(1, 3),
    momentum=st.sampled_from([0.0, 0.7]),
    weight_decay=st.sampled_from([0.0, 0.05]),
    lr_decay=st.sampled_from([1.0, 0.8]),
    clip_norm=st.none() | st.floats(0.05, 1.0),
)
@settings(few, max_examples=25)
def test_local_sgd_is_torchs(samples, batch_size, epochs, momentum, weight_decay, lr_decay, clip_norm):
    """The same batches through torch.optim.SGD, a new optimiser every round."""
    x, y, module = watched(samples)
    sgd = ff.LocalSGD(
        lr=0.3,
        momentum=momentum,
        weight_decay=weight_decay,
        lr_decay=lr_decay,
        epochs=epochs,
        batch_size=batch_size,
        clip_norm=clip_norm,
    )
    run = ff.train(ff.Federation([(x, y)]), module, local=sgd, rounds=3, dtype=torch.float64)
    batches = list(SEEN)
    per_epoch = math.ceil(samples / (batch_size or samples))
    assert len(batches) == 3 * epochs * per_epoch == run.total("steps")
    for first in range(0, len(batches), per_epoch):
        epoch = batches[first : first + per_epoch]
        assert sorted(torch.cat(epoch).tolist()) == list(range(samples))
        assert all(len(batch) == (batch_size or samples) for batch in epoch[:-1])

    for t in range(3):
        optimiser = torch.optim.SGD(
            module.parameters(), lr=0.3 * lr_decay**t, momentum=momentum, weight_decay=weight_decay
        )
        for rows in batches[t * epochs * per_epoch : (t + 1) * epochs * per_epoch]:
            optimiser.zero_grad()
            F.cross_entropy(module(x[rows]), y[rows]).backward()
            norm = torch.cat([p.grad.reshape(-1) for p in module.parameters()]).norm()
            if clip_norm is not None and norm > clip_norm:
                for p in module.parameters():
                    p.grad.mul_(clip_norm / norm)
            optimiser.step()
    for trained, expected in zip(run.model.parameters(), module.parameters(), strict=True):
        assert_same(trained, expected)
    assert [row["lr"] for row in run.history] == pytest.approx([0.3 * lr_decay**t for t in range(3)])


def test_epochs_are_shuffled_anew():
    x, y, module = watched(12)
    ff.train(ff.Federation([(x, y)]), module, local=ff.LocalSGD(epochs=2, batch_size=4), rounds=2)
    epochs = [tuple(torch.cat(SEEN[first : first + 3]).tolist()) for first in range(0, 12, 3)]
    assert len(set(epochs)) == 4


@pytest.mark.parametrize(("steps", "batch_size"), [(1, 4), (5, 4), (7, None), (4, 100)])
def test_a_fixed_number_of_steps(steps, batch_size):
    x, y, module = watched(10)
    sgd = ff.LocalSGD(steps=steps, batch_size=batch_size)
    assert (
        ff.train(ff.Federation([(x, y)]), module, local=sgd, rounds=1, dtype=torch.float64).total("steps")
        == steps
    )
    sizes = [4, 4, 2] if batch_size == 4 else [10]
    assert [len(batch) for batch in SEEN] == (sizes * steps)[:steps]


def test_every_client_has_its_own_number_of_steps():
    run = train_small("fedavg", [[i] for i in range(5)], local=ff.LocalSGD(epochs=3, batch_size=4))
    assert [row["steps"] for row in run.history] == [3 * math.ceil(n / 4) for n in SIZES]


@pytest.mark.parametrize("stage", ["direction", "gradient"])
def test_clipping_before_and_after_corrections(stage):
    """FedProx on one client: the pull is clipped with the gradient, or added to the clipped gradient."""
    mu, lr, bound = 2.0, 0.4, 0.5
    local = ff.LocalSGD(lr=lr, steps=4, batch_size=None, clip_norm=bound, clip_stage=stage, weight_decay=0.1)
    run = train_small(ff.fedprox(mu=mu), [[0]], local=local)

    def clip(d: Tensor) -> Tensor:
        clipped.append(bool(d.norm() > bound))
        return d * (bound / d.norm()) if d.norm() > bound else d

    clipped: list[bool] = []
    start = x = torch.from_numpy(problem()[1])
    for _ in range(4):
        g, pull = client_gradient(0, x), mu * (x - start)
        d = clip(g + pull) if stage == "direction" else clip(g) + pull
        x = x - lr * (d + 0.1 * x)
    assert any(clipped)
    assert_same(run.server.w, x)


def test_clipping_what_a_momentum_is_blended_into():
    """FedCM on one client, with FedProx's pull: `d = α g + (1 − α) G + μ (x − start)` is clipped, decay is not."""
    alpha, mu, lr, bound, decay = 0.4, 0.5, 0.4, 0.3, 0.1
    local = ff.LocalSGD(lr=lr, steps=4, batch_size=None, clip_norm=bound, weight_decay=decay)
    run = train_small(ff.as_method(f"fedcm(alpha={alpha}) + proximal(mu={mu})"), [[0], [0], [0]], local=local)

    clipped: list[bool] = []
    x = torch.from_numpy(problem()[1])
    momentum = torch.zeros_like(x)
    for _ in range(3):
        start = x
        for _ in range(4):
            d = alpha * client_gradient(0, x) + (1 - alpha) * momentum + mu * (x - start)
            clipped.append(bool(d.norm() > bound))
            x = x - lr * (d * min(1.0, bound / float(d.norm())) + decay * x)
        momentum = (start - x) / (4 * lr)
    assert any(clipped) and not all(clipped)
    assert_same(run.server.w, x)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"lr": 0}, "lr must be above 0"),
        ({"lr": -0.1}, "lr must be above 0"),
        ({"lr": "0.1"}, "lr must be a number"),
        ({"lr": math.nan}, "lr must be"),
        ({"momentum": 1}, "momentum must be"),
        ({"momentum": -0.1}, "momentum must be"),
        ({"weight_decay": -1}, "weight_decay must be"),
        ({"epochs": 0}, "epochs must be"),
        ({"epochs": 1.5}, "epochs must be a whole number"),
        ({"epochs": True}, "epochs must be a number"),
        ({"epochs": math.inf}, "epochs must be a whole number"),
        ({"steps": 0}, "steps must be"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"batch_size": 2.5}, "batch_size must be a whole number"),
        ({"lr_decay": 0}, "lr_decay must be"),
        ({"lr_decay": 1.1}, "lr_decay must be"),
        ({"clip_norm": 0}, "clip_norm must be"),
        ({"clip_stage": "loss"}, "clip_stage must be 'direction' or 'gradient', not 'loss'"),
        ({"epochs": 2, "steps": 3}, "epochs or steps, not both"),
    ],
    ids=str,
)
def test_impossible_local_settings(wrong, complaint):
    with pytest.raises(ff.FedflatError, match=f"LocalSGD: .*{complaint}|LocalSGD: give {complaint}"):
        ff.LocalSGD(**wrong)


@pytest.mark.parametrize("whole", [{"batch_size": 4.0}, {"steps": 3.0}, {"epochs": 2.0}], ids=str)
def test_whole_numbers_may_be_written_with_a_point(whole):
    integers = {name: int(value) for name, value in whole.items()}
    a, b = (trajectory("fedavg", local=ff.LocalSGD(**given)) for given in (whole, integers))
    assert torch.equal(a, b)


# -- one round by hand ---------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("server_lr", [1.0, 0.6])
def test_one_round_by_hand(weighting, server_lr):
    one_step = ff.LocalSGD(lr=0.3, steps=1, batch_size=None)
    active = [0, 2, 4]
    w0, w1 = trajectory(ff.fedavg(server_lr), [active], local=one_step, weighting=weighting)
    parts = torch.tensor([SIZES[i] if weighting == "samples" else 1 for i in active]).double()
    gradients = torch.stack([client_gradient(i, w0) for i in active])
    assert_same(w1, w0 - server_lr * 0.3 * (parts / parts.sum()) @ gradients)


def test_training_loss_by_hand():
    """The mean over a client's steps of the loss before each step, weighted like the updates."""
    clients, w0 = problem()
    run = train_small("fedavg", [[1, 3]], local=ff.LocalSGD(lr=0.3, steps=2, batch_size=None))
    expected = 0.0
    for i in (1, 3):
        x, y = (torch.from_numpy(a) for a in clients[i])
        first = torch.from_numpy(w0)
        second = first - 0.3 * client_gradient(i, first)
        losses = [F.cross_entropy(network(w.numpy())(x), y).item() for w in (first, second)]
        expected += SIZES[i] / (SIZES[1] + SIZES[3]) * sum(losses) / 2
    assert run.history[0]["train_loss"] == pytest.approx(expected, rel=1e-12)


def test_shared_arrays_and_own_arrays_are_the_same_federation():
    clients, w0 = problem()
    x, y = (np.concatenate([pair[k] for pair in clients]) for k in (0, 1))
    ends = np.cumsum(SIZES)
    rows = [np.arange(end - n, end) for n, end in zip(SIZES, ends, strict=True)]
    shared = ff.Federation.from_indices((x, y), rows)
    assert shared.sizes == ff.Federation(clients).sizes == list(SIZES)
    options = {"local": ff.LocalSGD(epochs=2, batch_size=4), "rounds": 3, "dtype": torch.float64}
    a, b = (ff.train(f, network(w0), "fedgmt", **options) for f in (shared, ff.Federation(clients)))
    assert torch.equal(a.server.w, b.server.w)


def test_targets_may_be_numbers():
    x, y = torch.randn(8, 2, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)
    module = nn.Linear(2, 1).double()
    run = ff.train(
        ff.Federation([(x, y)], test=(x, y)),
        module,
        local=ff.LocalSGD(lr=0.1, batch_size=None),
        rounds=1,
        loss=F.mse_loss,
        dtype=torch.float64,
    )
    F.mse_loss(module(x), y).backward()
    assert_same(run.model.weight, module.weight - 0.1 * module.weight.grad)
    assert run.accuracy is None
    assert run.history[0]["loss"] == pytest.approx(F.mse_loss(run.model(x), y).item())


# -- evaluation ----------------------------------------------------------------------------------------


class Watched(InProcess):
    """Remembers what was sent and returned, round by round."""

    def __init__(self) -> None:
        self.rounds: list[list[tuple[Download, Upload]]] = []

    def uploads(self, clients, download, state) -> Iterator[Upload]:
        self.rounds.append([])
        sent: dict[int, Download] = {}

        def noted(client: int) -> Download:
            sent[client] = download(client)
            return sent[client]

        for upload in super().uploads(clients, noted, state):
            self.rounds[-1].append((sent[upload.client], upload))
            yield upload


def score(w: Tensor, data: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    """Loss and accuracy with nothing of the package."""
    x, y = (torch.from_numpy(a) for a in data)
    with torch.no_grad():
        outputs = network(w.numpy())(x)
    return F.cross_entropy(outputs, y).item(), (outputs.argmax(1) == y).double().mean().item()


@pytest.mark.parametrize("method", ["fedavg", "feddyn", "fedgmt", "fedacg", "fedavgm"])
@pytest.mark.parametrize("evaluate", ["server", "average"])
def test_what_is_evaluated(method, evaluate):
    """The next model to be broadcast, or where the clients' mean stands."""
    clients, w0 = problem()
    engine, servers = Watched(), []
    run = ff.train(
        ff.Federation(clients, test=clients[4]),
        network(w0),
        method,
        local=ff.LocalSGD(lr=0.3, epochs=3, batch_size=None),
        participation=ff.Schedule(SCHEDULE),
        rounds=len(SCHEDULE),
        evaluate=evaluate,
        engine=engine,
        dtype=torch.float64,
        on_round=lambda r: servers.append(r.server.w.clone()),
    )
    differences = []
    for row, exchanged, w in zip(run.history, engine.rounds, servers, strict=True):
        samples = sum(upload.samples for _, upload in exchanged)
        average = exchanged[0][0].start + sum(u.samples / samples * u.update for _, u in exchanged)
        loss, accuracy = score(w if evaluate == "server" else average, clients[4])
        assert (row["loss"], row["accuracy"]) == pytest.approx((loss, accuracy), rel=1e-10)
        differences.append((average - w).abs().max().item())
    # FedACG's look-ahead plus the mean update is its next model
    assert (max(differences) < 1e-12) == (method in ("fedavg", "fedacg"))
    assert run.accuracy == run.history[-1]["accuracy"]


def test_the_average_after_feddyns_first_round_is_fedproxs_model():
    clients, w0 = problem()
    options = {"local": ff.LocalSGD(lr=0.3, epochs=3, batch_size=None), "rounds": 1, "dtype": torch.float64}
    federation = ff.Federation(clients, test=clients[0])
    dyn, prox = (
        ff.train(federation, network(w0), method, evaluate="average", **options)
        for method in (ff.feddyn(beta=4), ff.fedprox(mu=1 / 4))
    )
    assert dyn.history[0]["loss"] == pytest.approx(prox.history[0]["loss"], rel=1e-12)


@pytest.mark.parametrize(("every", "evaluated"), [(1, [0, 1, 2, 3, 4]), (2, [1, 3, 4]), (5, [4]), (100, [4])])
def test_eval_every(every, evaluated):
    clients, w0 = problem()
    run = ff.train(ff.Federation(clients, test=clients[0]), network(w0), rounds=5, eval_every=every)
    assert [row["index"] for row in run.history if row["accuracy"] is not None] == evaluated
    assert [row["index"] for row in run.history if row["loss"] is not None] == evaluated


def test_without_a_test_set_nothing_is_evaluated():
    run = train_small("fedavg")
    assert run.accuracy is None
    assert all(row["loss"] is None and row["accuracy"] is None for row in run.history)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"weighting": "sample"}, "weighting must be 'samples' or 'uniform', not 'sample'"),
        ({"evaluate": "mean"}, "evaluate must be 'server' or 'average', not 'mean'"),
        ({"buffers": "avg"}, "buffers must be 'average' or .*, not 'avg'"),
        ({"on_bad_upload": "ignore"}, "on_bad_upload must be 'skip' or 'stop', not 'ignore'"),
        ({"engine": "in-process"}, "engine 'in-process'.*Did you mean 'inprocess'"),
        ({"model": "mpl"}, "model 'mpl'.*Did you mean 'mlp'"),
        ({"method": "fedsamm"}, "Did you mean 'fedsam'"),
        ({"rounds": 0}, "rounds must be at least 1, not 0"),
        ({"eval_every": 0}, "eval_every must be at least 1, not 0"),
        ({"local": 0.1}, r"^local must be LocalSGD\(lr=..., epochs=...\), not 0.1\.$"),
        ({"model": nn.Linear}, r"^model is the class Linear; give one that is made: Linear\(...\)\.$"),
        ({"model": 3}, r"^model must be a name or an nn.Module, not 3\.$"),
        ({"method": ff.fedsam}, r"^fedsam is not a method yet; call it: fedsam\(...\)\.$"),
        ({"method": [ff.LocalAscent]}, r"^LocalAscent is not a method yet; call it: LocalAscent\(...\)\.$"),
        ({"participation": [0, 1]}, r"^participation must be a number of clients, .* not \[0, 1\]\.$"),
        ({"resume": True}, r"^resume=True: name the directory"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_arguments(wrong, complaint):
    with pytest.raises(ff.FedflatError, match=complaint):
        ff.train(ff.Federation(problem()[0]), **{"rounds": 1, **wrong})


def test_a_mistyped_name_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match=r"no attribute 'fedsamm'\. Did you mean 'fedsam'\?$"):
        ff.fedsamm  # noqa: B018


# -- bad uploads ---------------------------------------------------------------------------------------


def spoiled_clients(value: float, *spoiled: int) -> ff.Federation:
    clients, _ = problem()
    for i in spoiled:
        clients[i][0][0, 0] = value
    return ff.Federation(clients)


def train_spoiled(
    method: str, federation: ff.Federation, schedule: list[list[int]] = SCHEDULE, **given
) -> ff.Run:
    options = {"local": ff.LocalSGD(lr=0.2, epochs=2, batch_size=None), "rounds": len(schedule), **given}
    return ff.train(
        federation,
        network(problem()[1]),
        method,
        participation=ff.Schedule(schedule),
        dtype=torch.float64,
        **options,
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("method", ["fedavg", *STATEFUL])
def test_clients_with_spoiled_data_are_left_out(method, value):
    """As if they had not taken part: the same models bit for bit, and nothing is kept of them."""
    run = train_spoiled(method, spoiled_clients(value, 2, 3))
    without = [[c for c in active if c not in (2, 3)] for active in SCHEDULE]
    assert same_run(run, train_spoiled(method, ff.Federation(problem()[0]), without))
    assert run.server.w.isfinite().all()
    for t, row in enumerate(run.history):
        assert row["clients"] == without[t]
        bad = [c for c in SCHEDULE[t] if c in (2, 3)]
        assert len(row["rejected"]) == len(bad)
        for client, sentence in zip(bad, row["rejected"], strict=True):
            assert f"client {client}, round {t}:" in sentence
            assert "NaN or infinite" in sentence
    assert run.clients.get(2) == run.clients.get(3) == {}
    assert run.server.per_client.get(2) == {}


def test_a_bad_upload_can_stop_the_run():
    with pytest.raises(RejectedUpload, match=r"client 3, round 1:.*NaN") as caught:
        train_spoiled("fedavg", spoiled_clients(math.nan, 3), on_bad_upload="stop")
    assert isinstance(caught.value, ff.FedflatError)


class Spoiling(InProcess):
    """Spoils the upload of one client in one round."""

    def __init__(self, client: int, round: int) -> None:
        self.place = (client, round)

    def uploads(self, clients, download, state) -> Iterator[Upload]:
        for upload in super().uploads(clients, download, state):
            if (upload.client, upload.round) == self.place:
                upload.update[-1] = math.nan
            yield upload


@pytest.mark.parametrize("method", ["fedavg", *STATEFUL])
def test_one_bad_upload_is_as_if_the_client_had_been_away(method):
    """What the client kept from its rounds before is what it starts with the next time."""
    run = train_small(method, engine=Spoiling(client=2, round=2))
    without = [active if t != 2 else [0, 3] for t, active in enumerate(SCHEDULE)]
    assert same_run(run, train_small(method, without))
    assert [len(row["rejected"]) for row in run.history] == [0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("method", ff.METHODS)
def test_a_round_without_good_uploads_changes_nothing(method):
    """Neither an empty round nor one whose only client is spoiled."""
    federation = spoiled_clients(math.nan, 3)
    plain = train_spoiled(method, federation, [[0, 1], [1, 2], [0, 4]])
    empty = train_spoiled(method, federation, [[0, 1], [], [1, 2], [0, 4]])
    spoiled = train_spoiled(method, federation, [[0, 1], [3], [1, 2], [0, 4]])
    assert same_run(plain, empty)
    assert same_run(plain, spoiled)
    for run in (empty, spoiled):
        assert run.history[1]["clients"] == []
        assert run.history[1]["train_loss"] is None
        assert run.history[1]["scalars"] == run.history[0]["scalars"]
    assert len(spoiled.history[1]["rejected"]) == 1


def test_rounds_that_bernoulli_leaves_empty():
    clients, w0 = problem()
    run = ff.train(
        ff.Federation(clients, test=clients[0]),
        network(w0),
        "fedgmt",
        participation=ff.Bernoulli(1e-9),
        rounds=3,
        dtype=torch.float64,
    )
    assert torch.equal(run.server.w, torch.from_numpy(w0))
    assert [row["clients"] for row in run.history] == [[], [], []]
    assert run.history[2]["loss"] == pytest.approx(score(torch.from_numpy(w0), clients[0])[0])


SIZE = 6


def upload(**changes) -> Upload:
    """A good upload for SCAFFOLD, and what is wrong with it."""
    ones = torch.ones(SIZE, dtype=torch.float64)
    good = {"client": 1, "round": 0, "samples": 5, "steps": 2, "update": ones, "vectors": {"control": -ones}}
    return Upload(**{**good, **changes})


def vector(*values: float, size: int = SIZE, dtype: torch.dtype = torch.float64) -> Tensor:
    result = torch.ones(size, dtype=dtype)
    result[: len(values)] = torch.tensor(values)
    return result


BAD_UPLOADS = {
    "long update": ({"update": vector(size=SIZE + 1)}, "'update' has shape (7,), expected (6,)"),
    "matrix": ({"update": vector().view(2, 3)}, "'update' has shape (2, 3)"),
    "scalar": ({"update": torch.tensor(1.0).double()}, "'update' has shape ()"),
    "list": ({"update": [1.0] * SIZE}, "'update' has shape list"),
    "nothing": ({"update": None}, "'update' has shape NoneType"),
    "short vector": ({"vectors": {"control": vector(size=SIZE - 1)}}, "'control' has shape (5,)"),
    "missing vector": ({"vectors": {}}, "lacks 'control', which SCAFFOLD needs"),
    "unknown vector": ({"vectors": {"control": vector(), "dual": vector()}}, "holds 'dual', which SCAFFOLD"),
    "float32": ({"update": vector(dtype=torch.float32)}, "type torch.float32, expected torch.float64"),
    "integers": ({"update": vector(dtype=torch.int64)}, "type torch.int64"),
    "nan": ({"update": vector(math.nan)}, "'update' holds NaN or infinite values"),
    "inf": ({"update": vector(math.inf)}, "'update' holds NaN or infinite values"),
    "two infs": ({"update": vector(math.inf, -math.inf)}, "'update' holds NaN or infinite values"),
    "nan in vector": ({"vectors": {"control": vector(math.nan)}}, "'control' holds NaN or infinite values"),
    "no samples": ({"samples": 0}, "0 samples"),
    "negative samples": ({"samples": -5}, "-5 samples"),
    "nan samples": ({"samples": math.nan}, "samples"),
    "infinite samples": ({"samples": math.inf}, "samples"),
    "no steps": ({"steps": 0}, "0 steps"),
    "nan steps": ({"steps": math.nan}, "steps"),
    "nan buffers": ({"buffers": vector(math.nan, size=2)}, "buffers"),
    "short buffers": ({"buffers": vector(size=1)}, "buffers"),
    "long buffers": ({"buffers": vector(size=3)}, "buffers"),
}


@pytest.mark.parametrize(("changes", "reason"), BAD_UPLOADS.values(), ids=BAD_UPLOADS)
def test_the_server_refuses_and_keeps_no_trace(changes, reason):
    def opened() -> Server:
        server = Server(vector(2, 3), ff.scaffold(), clients=3, buffers=torch.zeros(2).double())
        server.open(0, lr=0.1)
        return server

    def close_after(server: Server, *uploads: Upload) -> list[Tensor]:
        for good in uploads:
            server.receive(good)
        server.close()
        return [server.w, server["control"], server.buffers]

    rest = [upload(client=c, samples=c + 1, buffers=vector(c, c + 1, size=2)) for c in (0, 2)]
    server = opened()
    server.receive(rest[0])
    with pytest.raises(RejectedUpload) as caught:
        server.receive(upload(**{"buffers": vector(size=2), **changes}))
    assert str(caught.value).startswith("client 1, round 0: ")
    assert reason in str(caught.value)
    assert server.accepted == 1
    expected = close_after(opened(), *rest)
    for ours, theirs in zip(close_after(server, rest[1]), expected, strict=True):
        assert torch.equal(ours, theirs)

    alone = opened()
    with pytest.raises(RejectedUpload):
        alone.receive(upload(**{"buffers": vector(size=2), **changes}))
    for ours, before in zip(close_after(alone), close_after(opened()), strict=True):
        assert torch.equal(ours, before)


def test_an_upload_without_buffers_does_not_dilute_the_others():
    server = Server(vector(), ff.fedavg(), clients=2, buffers=torch.zeros(2).double())
    server.open(0, lr=0.1)
    server.receive(upload(client=0, vectors={}, buffers=vector(4, 6, size=2)))
    with contextlib.suppress(RejectedUpload):
        server.receive(upload(client=1, vectors={}, buffers=None))
    server.close()
    assert server.buffers.tolist() == [4, 6]


def test_large_finite_values_are_not_refused():
    """The sum overflows, the entries do not."""
    server = Server(torch.zeros(4), ff.fedavg(), clients=2)
    server.open(0, lr=0.1)
    server.receive(Upload(client=0, round=0, samples=1, steps=1, update=torch.full((4,), 3e38)))
    server.close()
    assert torch.equal(server.w, torch.full((4,), 3e38))


# -- buffers -------------------------------------------------------------------------------------------


def normalised() -> nn.Module:
    """Its statistics are those of the inputs, whatever the weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(SHAPE[0], momentum=0.2), nn.Linear(SHAPE[0], SHAPE[2])).double()


def statistics(client: int, old: Tensor, steps: int) -> Tensor:
    """Running mean, variance and count of a client after full-batch steps, by hand."""
    x = torch.from_numpy(problem()[0][client][0])
    batch = torch.cat([x.mean(0), x.var(0, unbiased=True)])
    for _ in range(steps):
        old = torch.cat([0.8 * old[:-1] + 0.2 * batch, old[-1:] + 1])
    return old


INITIAL = torch.cat([torch.zeros(SHAPE[0]), torch.ones(SHAPE[0]), torch.zeros(1)]).double()


def buffers_of(module: nn.Module) -> Tensor:
    norm = module[0]
    return torch.cat([norm.running_mean, norm.running_var, norm.num_batches_tracked.view(1)])


def train_normalised(policy: str, method: str = "fedavg", **given) -> ff.Run:
    local = ff.LocalSGD(lr=0.1, steps=2, batch_size=None)
    return train_small(method, [[0, 1], [1, 3]], model=normalised(), local=local, buffers=policy, **given)


def mean_statistics(active: list[int], old: Tensor, weights: list[int]) -> Tensor:
    new = torch.stack([statistics(i, old, 2) for i in active])
    parts = torch.tensor(weights).double()
    return (parts / parts.sum()) @ new


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_averaged_buffers(weighting):
    run = train_normalised("average", weighting=weighting)
    weights = [[SIZES[0], SIZES[1]], [SIZES[1], SIZES[3]]] if weighting == "samples" else [[1, 1], [1, 1]]
    expected = mean_statistics([1, 3], mean_statistics([0, 1], INITIAL, weights[0]), weights[1])
    assert_same(run.server.buffers, expected)
    assert_same(buffers_of(run.model), expected)
    assert run.model[0].num_batches_tracked.item() == 4


def test_buffers_of_the_server_stay():
    run = train_normalised("server")
    assert torch.equal(buffers_of(run.model), INITIAL)
    assert run.clients.clients() == []


def test_local_buffers_stay_with_the_clients():
    run = train_normalised("local")
    assert torch.equal(buffers_of(run.model), INITIAL)
    for client, rounds in ((0, 1), (1, 2), (3, 1)):
        assert_same(run.clients.get(client)["buffers"], statistics(client, INITIAL, 2 * rounds))
    assert run.clients.clients() == [0, 1, 3]


def test_reset_buffers_forget_the_rounds_before():
    run = train_normalised("reset")
    assert_same(buffers_of(run.model), mean_statistics([1, 3], INITIAL, [SIZES[1], SIZES[3]]))


@pytest.mark.parametrize("method", ["fedgmt", "fedgmt_v2", "fedntd", "fedprox", "scaffold"])
def test_teachers_leave_the_statistics_alone(method):
    """A teacher's forward pass is in evaluation mode."""
    assert_same(
        buffers_of(train_normalised("average", method).model), buffers_of(train_normalised("average").model)
    )


def test_buffers_are_never_corrected():
    """Server momentum, duals and server learning rates act on parameters only."""
    plain = buffers_of(train_normalised("average").model)
    for method in ("fedavgm", "feddyn", "fedavg(server_lr=0.5)", "fedacg"):
        assert_same(buffers_of(train_normalised("average", method).model), plain)


def test_evaluation_uses_the_servers_buffers():
    clients, _ = problem()
    run = ff.train(ff.Federation(clients, test=clients[2]), normalised(), rounds=2, dtype=torch.float64)
    x, y = (torch.from_numpy(a) for a in clients[2])
    assert not run.model.training
    assert run.history[-1]["loss"] == pytest.approx(F.cross_entropy(run.model(x), y).item(), rel=1e-12)


def test_buffers_travel_and_are_counted():
    run = train_normalised("average")
    size, buffers = run.server.w.numel(), len(INITIAL)
    assert run.history[1]["bytes_up"] == 2 * 8 * (size + buffers)
    assert run.history[1]["bytes_down"] == 2 * 8 * (size + buffers)
    assert run.history[1]["vectors_up"] == 2


# -- what a run leaves on disk -------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SHAPE[0], SHAPE[0]), nn.Linear(SHAPE[0], SHAPE[0])
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def strictly(line: str) -> dict:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize("make", [deep, normalised, Tied, lambda: network(problem()[1])])
def test_a_run_on_disk(make, tmp_path):
    clients, _ = problem()
    out = tmp_path / "new" / "run"
    run = ff.train(
        ff.Federation(clients, test=clients[0]),
        make(),
        "fedgf",
        participation=2,
        rounds=3,
        eval_every=2,
        out=out,
    )
    rows = [strictly(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows == run.history
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert strictly((out / "run.json").read_text())["method"] == "FedGF"

    loaded = make().float()
    missing, unknown = loaded.load_state_dict(load_file(out / "model.safetensors"), strict=False)
    assert not unknown
    assert set(missing) <= {"first.weight", "second.weight"}
    x = torch.from_numpy(clients[1][0]).float()
    assert torch.equal(loaded.eval()(x), run.model(x))


def test_a_directory_holds_one_run(tmp_path):
    train_small("fedavg", SCHEDULE[:1], out=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"run.json", "metrics.jsonl", "model.safetensors"} <= {path.name for path in before}
    with pytest.raises(ff.FedflatError, match="already holds a run"):
        train_small("fedsam", SCHEDULE[:1], out=tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(ff.FedflatError, match="taken"):
        train_small("fedavg", SCHEDULE[:1], out=tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"


def test_rows_are_json_even_when_the_model_explodes(tmp_path):
    clients, w0 = problem()
    run = ff.train(
        ff.Federation(clients, test=clients[0]),
        network(w0),
        local=ff.LocalSGD(lr=1e30, steps=3, batch_size=None),
        rounds=2,
        on_divergence="restore",
        out=tmp_path,
    )
    assert torch.isfinite(run.server.w).all() and run.server.w.abs().max() > 1e20
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        strictly(line)


# -- federations ---------------------------------------------------------------------------------------

ROWS, LABELS = np.zeros((4, 2)), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: ff.Federation([]), "at least one client"),
        (lambda: ff.Federation([(ROWS, LABELS), (ROWS, LABELS[:3])]), "client 1 has 4 inputs but 3 targets"),
        (lambda: ff.Federation([(ROWS, LABELS), (ROWS[:0], LABELS[:0])]), "client 1 has no samples"),
        (lambda: ff.Federation([(ROWS, LABELS - 1)]), "client 0 has the label -1; labels start at 0"),
        (
            lambda: ff.Federation([(ROWS, LABELS), (np.zeros((4, 3)), LABELS)]),
            r"client 1 has samples of shape \(3,\)",
        ),
        (lambda: ff.Federation([(ROWS, LABELS)], test=(ROWS, LABELS[:1])), "the test set has 4 inputs but 1"),
        (lambda: ff.Federation([(ROWS, LABELS)], test=(np.zeros((4, 3)), LABELS)), r"test set.*shape \(3,\)"),
        (lambda: ff.Federation([(ROWS,)]), "client 0: give a pair"),
        (lambda: ff.Federation([(ROWS, LABELS, LABELS)]), "client 0: give a pair"),
        (lambda: ff.Federation([("x", "y")]), "client 0: the inputs are words"),
        (lambda: ff.Federation([(1.0, 2.0)]), "client 0"),
        (lambda: ff.Federation.from_indices((ROWS, LABELS), []), "at least one client"),
        (lambda: ff.Federation.from_indices((ROWS, LABELS), [[0, 1], []]), "client 1 has no samples"),
        (lambda: ff.Federation.from_indices((ROWS, LABELS), [[0], [1, 4]]), "client 1 asks for row 4 of 4"),
        (lambda: ff.Federation.from_indices((ROWS, LABELS), [[-1, 0]]), "client 0 asks for row -1 of 4"),
        (lambda: ff.Federation.from_indices((ROWS, LABELS), [[0.5, 1]]), "client 0"),
        (lambda: ff.Federation.from_indices((ROWS, LABELS), [LABELS == 1]), "client 0"),
    ],
)
def test_impossible_federations(make, complaint):
    with pytest.raises(ff.FedflatError, match=complaint):
        make()


def test_what_a_federation_knows():
    federation = ff.Federation([(ROWS, LABELS), (ROWS[:2], LABELS[:2] + 2)], test=(ROWS, LABELS + 4))
    assert len(federation) == 2
    assert federation.sizes == [4, 2]
    assert federation.sample_shape == (2,)
    assert federation.classes == 6
    inputs, targets = federation.union().stored()
    assert inputs.shape == (6, 2)
    assert targets.tolist() == [0, 1, 0, 1, 2, 3]
