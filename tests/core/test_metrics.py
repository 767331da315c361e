"""Metrics against scikit-learn and numpy, however the batches of a data set are shared out."""

import itertools
import pickle
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    brier_score_loss,
    confusion_matrix,
    f1_score,
    log_loss,
    mean_absolute_error,
    mean_squared_error,
    precision_score,
    r2_score,
    recall_score,
    roc_auc_score,
    top_k_accuracy_score,
)
from torch import Tensor, nn

import fedflat as ff
from fedflat.core import evaluation
from fedflat.core.evaluation import batches_in, evaluate, score_batches
from fedflat.core.flat import FlatModel
from fedflat.core.metrics import METRICS, STANDARD, BatchOutputs, Counting, FunctionMetric, InOrder, Metrics
from fedflat.data.federation import Shard

CLASSES = 4


class AsItIs(nn.Module):
    """A model whose outputs are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "BATCH", 7)


def shared_out(metrics: Metrics, data, loss, chance: random.Random) -> dict:
    """Score batches in random shares, each of which travels, and merge them in a random order and grouping."""
    model = FlatModel(AsItIs(), torch.float64)
    numbers = list(range(batches_in(data)))
    chance.shuffle(numbers)
    cuts = sorted(chance.choices(range(len(numbers) + 1), k=chance.randrange(5)))
    shares = [numbers[a:b] for a, b in zip([0, *cuts], [*cuts, len(numbers)], strict=True)]
    scored = [pickle.loads(pickle.dumps(score_batches(model, None, data, loss, metrics, s))) for s in shares]
    while len(scored) > 1:
        scored.insert(
            chance.randrange(len(scored) - 1),
            metrics.merge(*(scored.pop(chance.randrange(len(scored))) for _ in range(2))),
        )
    return metrics.compute(scored[0])


def same(one: dict, other: dict) -> bool:
    """Bit for bit; NaN is itself."""
    return repr(one) == repr(other)


@st.composite
def predictions(draw):
    count = draw(st.integers(1, 60))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    outputs = torch.randn(count, CLASSES, generator=rng, dtype=torch.float64)
    if draw(st.booleans()):
        outputs = outputs.round()  # ties
    present = draw(st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=CLASSES, unique=True))
    targets = torch.tensor(present)[torch.randint(len(present), (count,), generator=rng)]
    return outputs, targets, torch.randint(3, (count,), generator=rng)


# -- against others --------------------------------------------------------------------------------


@settings(deadline=None)
@given(predictions(), st.randoms(use_true_random=False))
def test_accuracies_and_loss_are_those_of_scikit_learn_in_any_split(case, chance):
    outputs, targets, groups = case
    data = Shard(outputs, targets, groups=groups)
    found = evaluate(FlatModel(AsItIs(), torch.float64), None, data, F.cross_entropy)
    assert same(found, shared_out(Metrics(), data, F.cross_entropy, chance))
    y, guessed, owners = targets.numpy(), outputs.numpy().argmax(1), groups.numpy()
    assert found["accuracy"] == accuracy_score(y, guessed)
    recall = recall_score(y, guessed, labels=range(CLASSES), average=None, zero_division=np.nan)
    np.testing.assert_array_equal(found["accuracy_by_class"], recall)
    for number, share in enumerate(found["accuracy_by_group"]):
        own = owners == number
        np.testing.assert_equal(share, accuracy_score(y[own], guessed[own]) if own.any() else np.nan)
    chances = torch.softmax(outputs, 1).numpy()
    assert found["loss"] == pytest.approx(log_loss(y, chances, labels=range(CLASSES)), rel=1e-12)


def test_the_order_of_floats_is_that_of_the_batches():
    """Sums of floats depend on their order: these are not one sum in another order."""
    outputs = torch.randn(70, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 50
    data = Shard(outputs, torch.arange(70) % 3)
    whole = evaluate(FlatModel(AsItIs(), torch.float64), None, data, F.cross_entropy)
    sums = [F.cross_entropy(*data.batch(7 * n, 7)).item() * 7 for n in range(10)]
    assert len({sum(random.Random(n).sample(sums, 10)) for n in range(50)}) > 1
    assert whole["loss"] == sum(sums) / 70
    for seed in range(50):
        assert same(whole, shared_out(Metrics(), data, F.cross_entropy, random.Random(seed)))


# -- metrics by name -------------------------------------------------------------------------------

RATES = {"precision": precision_score, "recall": recall_score, "f1": f1_score}
CLASSIFYING = [
    *("accuracy", "balanced-accuracy", "base-rate", "confusion", "class-counts", "log-loss", "brier"),
    *("calibration-error", "auroc", "average-precision", "top-1", "top-2", "top-9"),
    *(f"{rate}{average}" for rate in RATES for average in ("", "-macro", "-micro", "-by-class")),
]


def found_in_any_split(names, outputs: Tensor, targets: Tensor, loss, chance: random.Random) -> dict:
    """The values, of which every split over shares gives the same bits."""
    data, metrics = Shard(outputs, targets), Metrics(names)
    found = evaluate(FlatModel(AsItIs(), torch.float64), None, data, loss, metrics)
    assert same(found, shared_out(metrics, data, loss, chance))
    return found


def calibration_error(chances: np.ndarray, y: np.ndarray) -> float:
    """Bin by bin, as Guo et al. define it."""
    confidence, right = chances.max(1), chances.argmax(1) == y
    edges, total = np.linspace(0, 1, 16), 0.0
    for low, high in itertools.pairwise(edges):
        own = (confidence > low) & (confidence <= high)
        if own.any():
            total += own.mean() * abs(right[own].mean() - confidence[own].mean())
    return total


def is_close(found, expected) -> None:
    np.testing.assert_allclose(
        np.array(found, dtype=float), np.array(expected, dtype=float), rtol=1e-9, atol=1e-12
    )


@settings(deadline=None)
@given(predictions(), st.randoms(use_true_random=False))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_metrics_of_several_classes_are_those_of_scikit_learn(case, chance):
    outputs, targets, _ = case
    found = found_in_any_split(CLASSIFYING, outputs, targets, F.cross_entropy, chance)
    y, guessed, chances = targets.numpy(), outputs.numpy().argmax(1), torch.softmax(outputs, 1).numpy()
    is_close(found["balanced-accuracy"], balanced_accuracy_score(y, guessed))
    is_close(found["base-rate"], np.bincount(y).max() / len(y))
    assert found["confusion"] == confusion_matrix(y, guessed, labels=range(CLASSES)).tolist()
    assert found["class-counts"] == {
        "predicted": np.bincount(guessed, minlength=CLASSES).tolist(),
        "actual": np.bincount(y, minlength=CLASSES).tolist(),
    }
    for name, score in RATES.items():
        for average in ("macro", "micro"):
            is_close(found[f"{name}-{average}"], score(y, guessed, average=average, zero_division=0))
        assert found[name] == found[f"{name}-macro"]
        each = score(y, guessed, labels=range(CLASSES), average=None, zero_division=0)
        there = np.isin(range(CLASSES), [*y, *guessed])
        is_close(found[f"{name}-by-class"], np.where(there, each, np.nan))
    is_close(found["log-loss"], log_loss(y, chances, labels=range(CLASSES)))
    is_close(found["brier"], np.square(chances - np.eye(CLASSES)[y]).sum(1).mean())
    is_close(found["calibration-error"], calibration_error(chances, y))
    for k in (1, 2, 9):
        is_close(found[f"top-{k}"], top_k_accuracy_score(y, outputs, k=k, labels=range(CLASSES)))
    present = [c for c in range(CLASSES) if (y == c).sum() > 0]
    is_close(
        found["average-precision"], np.mean([average_precision_score(y == c, chances[:, c]) for c in present])
    )
    if len(present) > 1:
        is_close(found["auroc"], np.mean([roc_auc_score(y == c, chances[:, c]) for c in present]))
    else:
        assert found["auroc"] is None
    if len(present) == CLASSES:
        is_close(found["auroc"], roc_auc_score(y, chances, multi_class="ovr"))


@st.composite
def binary(draw):
    count = draw(st.integers(1, 60))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    z = torch.randn(count, 1, generator=rng, dtype=torch.float64)
    if draw(st.booleans()):
        z = z.round()  # ties
    return z, (torch.rand(count, generator=rng) < draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))).long()


@settings(deadline=None)
@given(binary(), st.randoms(use_true_random=False))
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_metrics_of_two_classes_are_those_of_scikit_learn(columns, case, chance):
    z, targets = case
    outputs = z if columns == 1 else torch.cat([torch.full_like(z, 0.25), z + 0.25], dim=1)
    loss = F.cross_entropy if columns == 2 else lambda z, y: z.square().mean()
    found = found_in_any_split(CLASSIFYING, outputs, targets, loss, chance)
    y, scores = targets.numpy(), (outputs[:, -1] - (0.25 if columns == 2 else 0)).numpy()
    guessed, p = (scores > 0).astype(int), 1 / (1 + np.exp(-scores))
    is_close(found["accuracy"], accuracy_score(y, guessed))
    assert found["confusion"] == confusion_matrix(y, guessed, labels=[0, 1]).tolist()
    for name, score in RATES.items():
        is_close(found[name], score(y, guessed, zero_division=0))
        is_close(found[f"{name}-macro"], score(y, guessed, average="macro", zero_division=0))
    is_close(found["log-loss"], log_loss(y, p, labels=[0, 1]))
    is_close(found["brier"], brier_score_loss(y, p, pos_label=1))
    if len(set(y)) == 2:
        is_close(found["auroc"], roc_auc_score(y, scores))
        is_close(found["average-precision"], average_precision_score(y, scores))
    else:
        assert found["auroc"] is None
        assert found["average-precision"] == (1.0 if y.all() else None)


@settings(deadline=None)
@given(predictions(), st.integers(0, 10**6), st.randoms(use_true_random=False))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_metrics_of_several_labels_are_those_of_scikit_learn(case, seed, chance):
    outputs, _, _ = case
    rng = torch.Generator().manual_seed(seed)
    targets = (torch.rand(outputs.shape, generator=rng) < torch.tensor([0.0, 0.2, 0.5, 1.0])).double()
    found = found_in_any_split(CLASSIFYING, outputs, targets, F.binary_cross_entropy_with_logits, chance)
    y, guessed = targets.numpy().astype(int), (outputs > 0).numpy().astype(int)
    is_close(found["accuracy"], accuracy_score(y, guessed))
    for name, score in RATES.items():
        for average in ("macro", "micro"):
            is_close(found[f"{name}-{average}"], score(y, guessed, average=average, zero_division=0))
        is_close(found[f"{name}-by-class"], score(y, guessed, average=None, zero_division=0))
        assert found[name] == found[f"{name}-macro"]
    p = torch.sigmoid(outputs).numpy()
    is_close(found["log-loss"], log_loss(y.ravel(), p.ravel(), labels=[0, 1]))
    is_close(found["brier"], np.square(p - y).mean())
    both = [c for c in range(CLASSES) if 0 < y[:, c].sum() < len(y)]
    some = [c for c in range(CLASSES) if y[:, c].sum() > 0]
    for name, score, those in (
        ("auroc", roc_auc_score, both),
        ("average-precision", average_precision_score, some),
    ):
        expected = np.mean([score(y[:, c], p[:, c]) for c in those]) if those else np.nan
        is_close(found[name], expected)
    for name in ("confusion", "balanced-accuracy", "base-rate", "top-1", "class-counts"):
        assert found[name] is None


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 3), st.sampled_from([0.0, 1.0]), st.integers(0, 10**6))
@pytest.mark.parametrize("loss", [F.mse_loss, nn.HuberLoss()])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
def test_metrics_of_numbers_are_those_of_scikit_learn(loss, count, columns, spread, seed):
    rng = torch.Generator().manual_seed(seed)
    outputs = torch.randn(count, columns, generator=rng, dtype=torch.float64)
    targets = 1e3 + spread * torch.randn(count, columns, generator=rng, dtype=torch.float64)
    found = found_in_any_split(
        ["mse", "mae", "r2", "auroc", "f1"], outputs, targets, loss, random.Random(seed)
    )
    is_close(found["mse"], mean_squared_error(targets, outputs))
    is_close(found["mae"], mean_absolute_error(targets, outputs))
    is_close(found["r2"], r2_score(targets, outputs) if count > 1 else np.nan)
    assert found["auroc"] is None and found["f1"] is None


def test_numbers_in_one_column_are_compared_row_by_row():
    z, y = torch.tensor([[1.0], [2.0], [4.0]]).double(), torch.tensor([1.0, 1.0, 1.0]).double()
    found = evaluate(
        FlatModel(AsItIs(), torch.float64), None, Shard(z, y), F.mse_loss, Metrics(["mae", "r2"])
    )
    assert found == {"mae": 4 / 3, "r2": 0.0}


# -- degenerate inputs -----------------------------------------------------------------------------


def score(outputs: Tensor, targets: Tensor, loss=F.cross_entropy, **more) -> dict:
    return evaluate(FlatModel(AsItIs(), torch.float64), None, Shard(outputs, targets, **more), loss)


def test_one_sample():
    found = score(torch.tensor([[0.0, 1.0]], dtype=torch.float64), torch.tensor([1]))
    assert found["accuracy"] == 1.0
    np.testing.assert_array_equal(found["accuracy_by_class"], [np.nan, 1.0])
    assert found["accuracy_by_group"] is None


def test_labels_without_an_output_count_as_wrong():
    """Only in a later batch, so that its counts are longer."""
    outputs = torch.eye(2, dtype=torch.float64).repeat(8, 1)
    targets = torch.tensor([0, 1] * 7 + [3, 1])
    found = score(outputs, targets, loss=lambda z, y: F.cross_entropy(z, y.clamp(max=1)))
    assert found["accuracy"] == 15 / 16
    np.testing.assert_array_equal(found["accuracy_by_class"], [1.0, 1.0, np.nan, 0.0])


def test_targets_of_more_dimensions():
    """A class for every position of a text, and the group of the sample for all of them."""
    rng = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(20, 3, 5, generator=rng).double(), torch.randint(3, (20, 5), generator=rng)
    groups = torch.arange(20) % 2
    found = score(outputs, targets, groups=groups)
    hits = (outputs.argmax(1) == targets).numpy()
    assert found["accuracy"] == hits.mean()
    assert found["accuracy_by_group"] == [hits[groups == g].mean() for g in (0, 1)]
    assert found["accuracy_by_class"] == [hits[targets.numpy() == c].mean() for c in range(3)]


def test_numbers_have_a_loss_only():
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = score(x, x + 2, loss=F.mse_loss, groups=torch.arange(30) % 2)
    assert found == {"loss": pytest.approx(4.0), **dict.fromkeys(STANDARD[1:])}


@pytest.mark.parametrize(
    ("loss", "known"),
    [
        (F.binary_cross_entropy_with_logits, True),
        (partial(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor(2.0)), True),
        (nn.BCEWithLogitsLoss(), True),
        (F.mse_loss, False),
    ],
)
def test_floats_are_classes_for_the_loss_of_a_logit_only(loss, known):
    z = torch.randn(20, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.randint(2, (20, 1), generator=torch.Generator().manual_seed(1)).double()
    expected = accuracy_score(y.numpy(), z.numpy() > 0) if known else None
    assert score(z, y, loss=loss)["accuracy"] == expected


def test_one_batch_without_classes_is_a_data_set_without():
    """The only number that is no class is in the last batch."""
    z = torch.randn(20, dtype=torch.float64)
    y = torch.tensor([0, 1] * 9 + [1, 2])
    found = score(z, y, loss=lambda z, y: F.mse_loss(z, y.double()))
    assert found["accuracy"] is None and found["accuracy_by_class"] is None and found["loss"] > 0


def test_nothing_scored_has_no_value():
    assert Metrics().compute({}) == dict.fromkeys(STANDARD)
    assert Metrics().merge({}, {}) == {}


# -- metrics of one's own --------------------------------------------------------------------------


class OwnAuroc(InOrder):
    """Keeps all scores and labels."""

    name = "own auroc"

    def keep(self, batch: BatchOutputs):
        return batch.outputs[:, 1].tolist(), batch.targets.tolist()

    def combine(self, kept):
        return roc_auc_score(
            [y for _, labels in kept for y in labels], [s for scores, _ in kept for s in scores]
        )


class Confusion(Counting):
    """Keeps counts."""

    name = "confusion"

    def score(self, batch: BatchOutputs):
        return confusion_matrix(batch.targets, batch.predicted, labels=[0, 1]).tolist()

    def compute(self, score):
        return score


@pytest.mark.parametrize("seed", range(5))
def test_metrics_of_ones_own(seed, monkeypatch):
    rng = torch.Generator().manual_seed(seed)
    outputs, targets = torch.randn(50, 2, generator=rng).double(), torch.randint(2, (50,), generator=rng)
    monkeypatch.setitem(METRICS, "own auroc", OwnAuroc())
    own = FunctionMetric(lambda z, y: z[y == 1].max(), "largest")
    metrics, data = Metrics(["own auroc", Confusion(), "accuracy", own]), Shard(outputs, targets)
    found = evaluate(FlatModel(AsItIs(), torch.float64), None, data, F.cross_entropy, metrics)
    assert found == {
        "own auroc": roc_auc_score(targets, outputs[:, 1]),
        "confusion": confusion_matrix(targets, outputs.argmax(1)).tolist(),
        "accuracy": accuracy_score(targets, outputs.argmax(1)),
        "largest": outputs[targets == 1].max().item(),
    }
    assert same(found, shared_out(metrics, data, F.cross_entropy, random.Random(seed)))


def test_metrics_by_name():
    assert list(METRICS) == [metric.name for metric in METRICS.values()]
    with pytest.raises(ff.FedflatError, match=r"There is no metric 'acuracy'. Did you mean 'accuracy'"):
        Metrics(["acuracy"])
    for wrong in ("top-0", "top-k", {"top": 5}, 3):
        with pytest.raises(ff.FedflatError, match="metric"):
            Metrics([wrong])
    assert all(name in Metrics(["top_5", "Balanced_Accuracy"]) for name in ("top-5", "balanced-accuracy"))
