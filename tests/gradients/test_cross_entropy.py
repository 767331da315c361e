"""The cross-entropy of a client's round, prepared by epoch, against torch's own."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fedflat.gradients.cross_entropy import AT_ONCE, CLASSES as MOST_CLASSES, CrossEntropy
from hypothesis import given, settings, strategies as st
from test_chain import BATCH, CLASSES, STEPS, Listens, build, counting, heard, same, samples, train
from torch import Tensor, nn

import fedflat as ff
from fedflat.client.round import ClientRound
from fedflat.client.step import Step
from fedflat.core.messages import Download, Upload
from fedflat.data.federation import Shard
from fedflat.methods.mechanism import Mechanism


@pytest.fixture
def counted(monkeypatch) -> list[str]:
    """Losses that are summed up later."""
    return counting(monkeypatch, CrossEntropy, "count")


@pytest.fixture
def plainly(monkeypatch) -> Callable[[], None]:
    """Lets runs take torch's cross-entropy."""
    return lambda: monkeypatch.setattr(CrossEntropy, "takes", lambda self, outputs: False)


# -- one epoch -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 40), st.integers(1, 45), st.integers(1, 6), st.sampled_from([0.1, 3.0, 100.0]),
    st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_losses_and_gradients_are_those_of_torch(number, size, classes, spread, single, seed):
    draw = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if single else torch.float64
    near = partial(torch.testing.assert_close, rtol=1e-4 if single else 1e-10, atol=1e-6 if single else 1e-13)
    entropy, total = CrossEntropy(classes, torch.empty(0, dtype=dtype)), 0.0
    for _ in range(2):
        outputs = spread * torch.randn(number, classes, generator=draw, dtype=dtype)
        targets = torch.randint(classes, (number,), generator=draw)
        entropy.next_epoch(targets, size)
        for index, (z, y) in enumerate(zip(outputs.split(size), targets.split(size), strict=True)):
            z.requires_grad_()
            loss = F.cross_entropy(z, y)
            (gradient,) = torch.autograd.grad(loss, z)
            entropy.next_batch(index)
            assert entropy.takes(z.detach())
            logs, delta = entropy.differentiate(z.detach())
            assert delta.dtype == dtype
            near(delta, gradient)
            entropy.differentiate(z.detach() + 1)  # of which nobody says that it counts
            entropy.count(logs)
            total += loss.item()
    assert entropy.take_sum() == pytest.approx(total, rel=1e-5 if single else 1e-12, abs=1e-5)
    assert entropy.take_sum() == 0


@pytest.mark.parametrize("batches", [1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE, 2 * AT_ONCE + 3])
def test_sums_of_many_batches(batches):
    outputs, targets = torch.randn(2 * batches - 1, CLASSES).double(), torch.arange(2 * batches - 1) % CLASSES
    entropy = CrossEntropy(CLASSES, outputs)
    entropy.next_epoch(targets, 2)
    total = 0.0
    for index, (z, y) in enumerate(zip(outputs.split(2), targets.split(2), strict=True)):
        entropy.next_batch(index)
        entropy.count(entropy.differentiate(z)[0])
        total += F.cross_entropy(z, y).item()
    assert entropy.take_sum() == pytest.approx(total, rel=1e-12)
    assert entropy.take_sum() == 0


def test_targets_stay_as_they_are():
    targets = torch.tensor([2, 0, 1, 1, 2])
    entropy = CrossEntropy(CLASSES, torch.empty(0))
    for _ in range(2):
        entropy.next_epoch(targets, 2)
        entropy.next_batch(2)
        close = partial(torch.testing.assert_close, rtol=0, atol=1e-7)
        close(entropy.differentiate(torch.zeros(1, CLASSES))[1], torch.tensor([[1 / 3, 1 / 3, -2 / 3]]))
    assert targets.tolist() == [2, 0, 1, 1, 2]


OTHERS = {
    "some ignored": torch.tensor([0, -100, 2, 1]),
    "negative": torch.tensor([0, -1, 2, 1]),
    "too large": torch.tensor([0, CLASSES, 2, 1]),
    "short": torch.tensor([0, 1, 2, 1], dtype=torch.int32),
    "bytes": torch.tensor([0, 1, 2, 1], dtype=torch.uint8),
    "numbers": torch.tensor([0.0, 1.0, 2.0, 1.0]),
    "probabilities": torch.eye(CLASSES)[[0, 1, 2, 1]],
    "a row each": torch.tensor([[0], [1], [2], [1]]),
}


@pytest.mark.parametrize("others", OTHERS)
def test_targets_it_is_not_for(others):
    entropy, outputs = CrossEntropy(CLASSES, torch.empty(0)), torch.zeros(2, CLASSES)
    assert not entropy.takes(outputs), "before the first epoch"
    for _ in range(2):
        entropy.next_epoch(torch.tensor([0, 1, 2, 1]), 2)
        for number in range(2):
            entropy.next_batch(number)
            assert entropy.takes(outputs)
        entropy.next_epoch(OTHERS[others], 2)
        for number in range(2):
            entropy.next_batch(number)
            assert not entropy.takes(outputs)


def test_outputs_it_is_not_for():
    entropy = CrossEntropy(CLASSES, torch.empty(0))
    entropy.next_epoch(torch.tensor([0, 1, 2]), 2)
    assert entropy.takes(torch.zeros(2, CLASSES))
    assert not entropy.takes(torch.zeros(3, CLASSES))
    assert not entropy.takes(torch.zeros(2, CLASSES + 1))
    assert not entropy.takes(torch.zeros(2, CLASSES, 1))
    entropy.next_batch(1)
    assert entropy.takes(torch.zeros(1, CLASSES)) and not entropy.takes(torch.zeros(2, CLASSES))


# -- whole runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedgmt"])
@pytest.mark.parametrize("batch_size", [1, BATCH, 14, None])
def test_the_same_run_as_with_torchs(method, batch_size, counted, plainly):
    quick = train("rows", method, batch_size=batch_size)
    steps = int(quick.total("forward")) // (1 if method == "fedavg" else 2)
    assert len(counted) == steps
    plainly()
    same(quick, train("rows", method, batch_size=batch_size))
    assert len(counted) == steps


def run_of(steps: int | None, batch_size: int, method: str = "fedavg", width: int = CLASSES) -> ff.Run:
    torch.manual_seed(0)
    clients = [samples(number, seed=number) for number in (11, 14)]
    local = ff.LocalSGD(lr=0.1, steps=steps, batch_size=batch_size)
    model = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, width))
    return ff.train(ff.Federation(clients), model, method, local, rounds=2, dtype=torch.float64)


@pytest.mark.parametrize(("steps", "batch_size"), [(1, 4), (2, 4), (3, 4), (7, 4), (AT_ONCE + 9, 4), (70, 1)])
def test_less_than_an_epoch_and_many(steps, batch_size, counted, plainly):
    quick = run_of(steps, batch_size)
    assert len(counted) == 2 * 2 * steps
    plainly()
    same(quick, run_of(steps, batch_size))


@pytest.mark.parametrize(("width", "on"), [(MOST_CLASSES, True), (MOST_CLASSES + 1, False)])
def test_many_classes(width, on, counted, plainly):
    quick = run_of(3, 4, width=width)
    assert bool(counted) is on
    plainly()
    same(quick, run_of(3, 4, width=width))


def test_not_for_other_losses(counted):
    local = ff.LocalSGD(lr=0.1, batch_size=BATCH)
    for loss in (nn.CrossEntropyLoss(), lambda z, y: F.cross_entropy(z, y)):
        ff.train(ff.Federation([samples(14)]), build("rows"), "fedavg", local, rounds=1, loss=loss)
    assert not counted


@pytest.mark.parametrize("method", ["fedavg", "fedsam"])
def test_a_label_without_an_output_is_the_same_mistake(method, plainly):
    mistakes = []
    for _ in range(2):
        with pytest.raises(ff.FedflatError, match="Has the model an output for every class") as mistake:
            run_of(None, 4, method, width=CLASSES - 1)
        mistakes.append(str(mistake.value))
        plainly()
    assert mistakes[0] == mistakes[1]


def test_rounds_in_which_a_hook_listens(counted, plainly):
    heard.clear()
    quick = train("rows", [Listens()])
    assert len(heard) == len(counted) == STEPS // 2
    plainly()
    same(quick, train("rows", [Listens()]))


class Relabels(Mechanism):
    """Has other targets in mind, in every step."""

    def shift(self, step: Step) -> None:
        step.targets = (step.targets + 1) % CLASSES


def test_targets_that_a_mechanism_replaces(plainly):
    quick = train("rows", [Relabels()])
    plainly()
    same(quick, train("rows", [Relabels()]))


# -- one client ------------------------------------------------------------------------------------


class Stumbles(Mechanism):
    """Falls in a step of the first round, after its gradient."""

    at: int = 2

    def direction(self, step: Step, d: Tensor) -> None:
        if step.local.round == 0 and step.index == self.at:
            raise RuntimeError("stumbled")


def training_of(method: ff.Method) -> ClientRound:
    model = ff.FlatModel(build("rows"), dtype=torch.float64)
    local = ff.LocalSGD(lr=0.1, batch_size=2, epochs=12)
    return ClientRound(model, method, local, F.cross_entropy, seed=0)


def round_of(training: ClientRound, round: int, targets: Tensor | None = None) -> Upload:
    x, y = samples(14)
    start = torch.ones(training.model.size, dtype=torch.float64) / 50
    return training.run(3, Shard(x, y if targets is None else targets), Download(round, 0.1, start), {})


@pytest.mark.parametrize("at", [0, 2, AT_ONCE, AT_ONCE + 5])
def test_a_round_that_failed_does_not_count(at):
    method = ff.Method("stumbling", [Stumbles(at)])
    training = training_of(method)
    with pytest.raises(ff.FedflatError, match="stumbled"):
        round_of(training, 0)
    after, fresh = round_of(training, 1), round_of(training_of(method), 1)
    assert after.loss == fresh.loss > 0
    assert torch.equal(after.update, fresh.update)


def test_rounds_do_not_count_twice():
    training = training_of(ff.METHODS["fedavg"]())
    losses = [round_of(training, 1).loss for _ in range(3)]
    assert losses[0] == losses[1] == losses[2] > 0


@pytest.mark.parametrize("method", ["fedavg", "fedsam"])
def test_samples_to_be_left_out(method, counted, plainly):
    targets = samples(14)[1]
    targets[3] = -100
    uploads = []
    for which in (targets, targets.clamp(min=0)):
        uploads.append(round_of(training_of(ff.METHODS[method]()), 0, which))
        assert bool(counted) is (which is not targets)
    plainly()
    for mine, which in zip(uploads, (targets, targets.clamp(min=0)), strict=True):
        other = round_of(training_of(ff.METHODS[method]()), 0, which)
        torch.testing.assert_close(mine.update, other.update, rtol=1e-10, atol=1e-12, equal_nan=True)
        assert mine.loss == pytest.approx(other.loss, rel=1e-12, nan_ok=True)
    assert uploads[0].loss != uploads[1].loss
