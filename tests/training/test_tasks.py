"""Tasks, losses by name and the monitored metric, from a run to its tables."""

import json
import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score, r2_score, roc_auc_score
from torch import Tensor, nn

import fedflat as ff
from fedflat.core.monitor import Monitor
from fedflat.experiments.compare import compare, find_runs, table
from fedflat.training.losses import LOSSES, make_loss, parse_loss

RNG = torch.Generator().manual_seed(0)
SLOPE = torch.tensor([1.0, -2.0, 0.5])


def numbers(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 3, generator=RNG)
    return x, x @ SLOPE + 0.1 * torch.randn(count, generator=RNG)


def labelled(count: int, share: float = 0.1) -> tuple[Tensor, Tensor]:
    y = (torch.rand(count, generator=RNG) < share).long()
    return torch.randn(count, 3, generator=RNG) + y[:, None] * torch.tensor([1.0, 0.0, -1.0]), y


def several(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 3, generator=RNG)
    return x, torch.stack([x[:, 0] > 0, x[:, 1] > 0.5, x.sum(1) > 0, x[:, 2] > 1], dim=1).float()


NUMBERS = ff.Federation([numbers(n) for n in (30, 50, 20)], test=numbers(1300))
LABELLED = ff.Federation([labelled(n) for n in (60, 90, 50)], test=labelled(1300))
SEVERAL = ff.Federation([several(n) for n in (30, 50, 20)], test=several(1300))


def train(federation: ff.Federation, method="fedavg", model="mlp", **more) -> ff.Run:
    local = more.pop("local", ff.LocalSGD(lr=0.05, epochs=2, batch_size=10))
    return ff.train(federation, model, method, local, rounds=more.pop("rounds", 3), **more)


def outputs(run: ff.Run, federation: ff.Federation) -> np.ndarray:
    with torch.no_grad():
        return run.model(federation.test.inputs).numpy()


# -- tasks -----------------------------------------------------------------------------------------


def test_floats_are_regression():
    with pytest.warns(UserWarning, match=r"numbers, not classes: the task is regression.*squared error"):
        run = train(NUMBERS)
    row, y = run.history[-1], NUMBERS.test.targets.numpy()
    found = outputs(run, NUMBERS)
    assert found.shape == (1300, 1)
    assert row["accuracy"] is None and row["client_accuracy"] is None
    assert row["metrics"]["r2"] == pytest.approx(r2_score(y, found[:, 0]), abs=1e-6)
    assert row["loss"] == pytest.approx(row["metrics"]["mse"], rel=1e-5)
    assert row["metrics"]["r2"] > 0.8
    assert run.monitor == Monitor("r2", True, False) and run.monitored[-1] == row["metrics"]["r2"]


def test_columns_of_0_and_1_are_labels():
    with pytest.warns(UserWarning, match="4 columns of 0 and 1: the task is multi-label"):
        run = train(SEVERAL)
    found, y = outputs(run, SEVERAL), SEVERAL.test.targets.numpy()
    metrics = run.history[-1]["metrics"]
    assert metrics["f1"] == pytest.approx(f1_score(y, found > 0, average="macro"))
    assert metrics["auroc"] == pytest.approx(roc_auc_score(y, found, average="macro"))
    assert run.monitor.name == "f1"
    assert run.accuracy == ((found > 0) == (y > 0)).all(1).mean()


def test_two_classes_have_a_base_rate_auroc_and_f1_beside_accuracy():
    run = train(LABELLED)
    y, found = LABELLED.test.targets.numpy(), outputs(run, LABELLED)
    metrics = run.history[-1]["metrics"]
    assert list(metrics) == ["base-rate", "auroc", "f1"]
    assert metrics["base-rate"] == (y == 0).mean()
    assert metrics["auroc"] == pytest.approx(roc_auc_score(y, found[:, 1] - found[:, 0]))
    assert run.monitor == Monitor()


def test_ten_balanced_classes_have_accuracy_alone():
    assert all("metrics" not in row for row in tiny.train("fedavg", "inprocess", rounds=1).history)


def test_probabilities_of_classes_stay_classification():
    x, y = labelled(40)
    federation = ff.Federation([(x, F.one_hot(y, 3).float())], test=(x, F.one_hot(y, 3).float()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(federation, rounds=1).loss is F.cross_entropy


def test_a_model_that_says_one_class_only_is_named():
    rare = ff.Federation([labelled(60, 0.05)], test=labelled(300, 0.05))
    with pytest.warns(UserWarning, match=r"predicts class 0 for every test sample.*weights=balanced") as told:
        train(rare, local=ff.LocalSGD(lr=1e-4, epochs=1), model=_always(0), rounds=2)
    assert len([w for w in told if "every test sample" in str(w.message)]) == 1


def _always(label: int) -> nn.Module:
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    model.bias.data = 5.0 * F.one_hot(torch.tensor(label), 2)
    return model


# -- losses ----------------------------------------------------------------------------------------

Z, Y = torch.randn(20, 3, generator=RNG), torch.arange(20) % 3
THREE = ff.Federation([(torch.zeros(6, 2), torch.tensor([0, 0, 0, 1, 1, 2]))])
WEIGHTS = torch.tensor([6 / 9, 6 / 6, 6 / 3])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cross-entropy", lambda: F.cross_entropy(Z, Y)),
        ("cross-entropy(label_smoothing=0.1)", lambda: F.cross_entropy(Z, Y, label_smoothing=0.1)),
        ("cross_entropy(weights=balanced)", lambda: F.cross_entropy(Z, Y, WEIGHTS)),
        ("focal(gamma=0)", lambda: F.cross_entropy(Z, Y)),
        ("focal(gamma=0, weights=balanced)", lambda: F.cross_entropy(Z, Y, WEIGHTS)),
        ("focal", lambda: (-((1 - Z.softmax(1)) ** 2) * Z.log_softmax(1))[range(20), Y].mean()),
    ],
)
def test_losses_of_classes(text, expected):
    loss, said = make_loss(text, "auto", THREE)
    torch.testing.assert_close(loss(Z, Y), expected())
    assert not said and (loss is F.cross_entropy) == (text == "cross-entropy")


@pytest.mark.parametrize("text", ["bce", "focal(gamma=0)"])
def test_one_logit_is_two_classes(text):
    z, y = Z[:, :1], Y.clamp(max=1)
    both = torch.cat([torch.zeros_like(z), z], dim=1)
    loss, _ = make_loss(text, "auto", LABELLED)
    for outputs in (z, z[:, 0], both):
        torch.testing.assert_close(loss(outputs, y), F.cross_entropy(both, y))


@pytest.mark.parametrize(
    ("text", "expected"), [("mse", F.mse_loss), ("mae", F.l1_loss), ("huber(delta=0.5)", None)]
)
def test_losses_of_numbers_compare_row_by_row(text, expected):
    z, y = Z[:, :1], Z[:, 1]
    loss, _ = make_loss(text, "auto", NUMBERS)
    wanted = F.huber_loss(z[:, 0], y, delta=0.5) if expected is None else expected(z[:, 0], y)
    torch.testing.assert_close(loss(z, y), wanted)
    with pytest.raises(ff.FedflatError, match="one output for every target"):
        loss(Z, y)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"loss": "crossentropy"}, "There is no loss 'crossentropy'. Did you mean 'cross-entropy'"),
        ({"loss": "focal(gama=1)"}, "The loss focal has no parameter 'gama'. Did you mean 'gamma'"),
        ({"loss": "focal(gamma=-1)"}, "gamma must be at least 0"),
        ({"loss": "mse(delta=1)"}, "has no parameters"),
        ({"loss": "cross-entropy(weights=3)"}, "weights are balanced"),
        ({"loss": "mse + mae"}, "write one"),
        ({"loss": "mse("}, "write one"),
        (
            {"loss": "mse", "task": "classification"},
            "mse is not one for classification: choose cross-entropy",
        ),
        ({"loss": 3}, "loss must be a name"),
        ({"monitor": "confusion"}, "confusion is no number"),
        ({"monitor": "base-rate"}, "base-rate is no number"),
        ({"metrics": ["aurok"]}, "There is no metric 'aurok'. Did you mean 'auroc'"),
        ({"task": "regresion"}, "task must be"),
    ],
)
def test_mistakes(given, says):
    with pytest.raises(ff.FedflatError, match=says):
        train(LABELLED, **given)


def test_every_loss_trains_and_is_known():
    for name in LOSSES:
        federation = NUMBERS if name in ("mse", "mae", "huber") else LABELLED
        assert parse_loss(name) == (name, {})
        run = train(federation, loss=name, rounds=1)
        assert np.isfinite(run.history[-1]["loss"])


def test_a_task_that_is_named_holds_for_a_loss_of_ones_own():
    run = train(NUMBERS, loss=lambda z, y: (z[:, 0] - y).abs().mean(), task="regression")
    assert run.history[-1]["loss"] == pytest.approx(run.history[-1]["metrics"]["mae"], rel=1e-5)


# -- methods ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("federation", "task"), [(NUMBERS, "regression"), (SEVERAL, "multi-label")])
@pytest.mark.filterwarnings("ignore:The targets are")
def test_fedntd_says_at_once_that_there_is_no_true_class(federation, task):
    began = []
    with pytest.raises(ff.FedflatError, match=f"{task} has no true class"):
        train(federation, "fedntd", on_round=began.append, engine=_Never())
    with pytest.raises(ff.FedflatError, match="two classes"):
        train(LABELLED, "fedntd", engine=_Never())


class _Never(ff.InProcess):
    def open(self, job) -> None:
        raise AssertionError("it must not begin")


@pytest.mark.parametrize("term", [ff.TrajectoryLoss, ff.OwnTrajectoryLoss])
@pytest.mark.parametrize("oracle", ["auto", "autograd"])
def test_distillation_of_numbers_is_a_squared_distance(term, oracle):
    """Two full steps of one client, against autograd of the whole loss."""
    federation = ff.Federation([numbers(12)])
    x, y = federation.client(0).stored()
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    run = train(
        federation,
        term(gamma=0.7, alpha=0.5),
        model,
        local=ff.LocalSGD(lr=0.1, epochs=2, batch_size=None),
        rounds=1,
        loss="mse",
        oracle=oracle,
    )
    teacher = model(x).detach()
    for _ in range(2):
        z = model(x)
        loss = (z[:, 0] - y).square().mean() + 0.7 * (z - teacher).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.data -= 0.1 * grad
    for mine, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_distillation_of_labels_is_that_of_each_logit():
    term = ff.TrajectoryLoss(gamma=0.7, tau=2.5)
    teacher, z = torch.randn(2, 6, 4, generator=RNG, dtype=torch.float64)
    z.requires_grad_()
    p, q = torch.sigmoid(teacher / 2.5), torch.sigmoid(z / 2.5)
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    (expected,) = torch.autograd.grad(0.7 * 2.5**2 * kl.mean(), z)
    vector, scale = term.pull_each(term.soften_each(teacher), z.detach())
    torch.testing.assert_close(scale * vector, expected)
    weights = [train(SEVERAL, ff.fedgmt(gamma=gamma), task="multi-label").server.w for gamma in (0.0, 5.0)]
    assert (weights[0] - weights[1]).abs().max() > 1e-4


# -- engines and resuming --------------------------------------------------------------------------


def largest(outputs: Tensor, targets: Tensor) -> float:
    return float(outputs.max())


MANY = ["auroc", "f1", "recall-by-class", "confusion", "log-loss", "brier", "calibration-error", largest]


def test_every_engine_and_a_resumed_run_have_equal_numbers(tmp_path: Path):
    more = {"metrics": MANY, "monitor": "log-loss"}
    one = tiny.train("fedavg", "inprocess", **more)
    tiny.same(one, tiny.train("fedavg", "workers:2", **more))
    tiny.train("fedavg", "workers:2", rounds=2, out=tmp_path / "run", **more)
    tiny.same(one, tiny.train("fedavg", "inprocess", out=tmp_path / "run", resume=True, **more))
    read = ff.read_metrics(tmp_path / "run")
    assert [row["metrics"] for row in read] == [row["metrics"] for row in one.history]
    assert set(read[0]["metrics"]) == {*MANY[:-1], "largest"}
    with torch.no_grad():
        assert read[-1]["metrics"]["largest"] == pytest.approx(
            one.model(tiny.federation().test.inputs).max().item()
        )


def test_a_value_that_is_no_number_is_none(tmp_path: Path):
    own = ff.FunctionMetric(lambda z, y: [float("nan"), 1.0], "odd", larger_is_better=None)
    tiny.train("fedavg", "inprocess", rounds=1, out=tmp_path / "run", metrics=[own])
    assert ff.read_metrics(tmp_path / "run")[0]["metrics"] == {"odd": [None, 1.0]}


# -- the monitored metric --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("monitored")
    for method in ("fedavg", "fedsam"):
        train(NUMBERS, method, loss="mse", monitor="mae", out=place / method, rounds=4)
    return place


def test_compare_goes_by_the_monitored_metric(two_runs: Path):
    values = [[row["metrics"]["mae"] for row in ff.read_metrics(run)] for run in find_runs([two_runs])]
    target = sorted(values[0])[1] + 1e-9
    groups = compare(find_runs([two_runs]), last=2, target=target)
    for group, those in zip(groups, values, strict=True):
        assert group.last == (pytest.approx(np.mean(those[-2:])), None)
        assert group.best == (min(those), None)
        first = next((n for n, value in enumerate(those) if value <= target), None)
        assert group.rounds_to == (None if first is None else (first + 1, None))
    head, rows = table(groups, 2, target)
    assert head[3] == "mean absolute error, last 2" and head[7] == f"rounds to {target:.4g}"
    assert float(rows[0][3]) == pytest.approx(np.mean(values[0][-2:]), rel=1e-3)


def test_figures_and_the_report_go_by_the_monitored_metric(two_runs: Path):
    from fedflat.figures import cost_to_target, learning_curves
    from fedflat.report.content import Content

    (axes,) = learning_curves([two_runs]).axes
    assert axes.get_ylabel() == "test mean absolute error"
    drawn = sorted(line.get_ydata()[-1] for line in axes.get_lines())
    ends = sorted(ff.read_metrics(run)[-1]["metrics"]["mae"] for run in find_runs([two_runs]))
    np.testing.assert_allclose(drawn, ends)
    assert learning_curves([two_runs], "r2").axes[0].get_ylabel() == "test R²"
    assert "mean absolute error" in cost_to_target([two_runs]).axes[0].get_xlabel()
    page = Content([two_runs]).page()
    assert page["monitor"] == {
        **{"name": "mae", "larger_is_better": False, "share": False},
        **{"title": "mean absolute error", "key": "metrics.mae"},
    }
    assert page["runs"][0]["series"]["metrics.mae"][-1] == pytest.approx(drawn[0], rel=0.5)


def test_runs_by_different_metrics_say_which(two_runs: Path, tmp_path: Path):
    from fedflat.figures import learning_curves

    train(LABELLED, out=tmp_path / "run")
    places = [two_runs / "fedavg", tmp_path / "run"]
    head, rows = table(compare(find_runs(places)), 10, None)
    assert head[3] == "monitored metric, last 10"
    assert rows[0][0].endswith(", mean absolute error") and rows[1][0].endswith(", accuracy")
    with pytest.raises(ff.FedflatError, match="different metrics"):
        learning_curves(places)


def test_a_study_makes_a_smaller_error_better(tmp_path: Path):
    pytest.importorskip("optuna")
    from fedflat.experiments.tune import parse_range, tune

    content = {
        "dataset": "digits", "clients": 4, "participation": 4, "rounds": 1, "method": "fedavg", "monitor": "log-loss",
    }  # fmt: skip
    ends = []

    class Watcher:
        def round(self, *news):
            pass

        def finished(self, trial, value, settings):
            ends.append(value)

    found = tune(content, {"local.lr": parse_range("0.0001,0.1")}, None, tmp_path, watcher=Watcher())
    assert found.settings == {"local.lr": 0.1}
    assert found.validation == min(ends) > 0 and max(ends) > found.validation
    best = json.loads((tmp_path / "best.json").read_text())
    assert (best["monitor"], best["validation"]) == ("log-loss", found.validation)


def test_the_command_line_shows_the_monitored_metric(tmp_path: Path):
    def run(*words: str) -> str:
        command = [sys.executable, "-m", "fedflat", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=_environment())
        assert done.returncode == 0, done.stderr
        return done.stdout

    quick = ["--clients", "4", "--participation", "everyone", "--rounds", "2", "--epochs", "1"]
    options = ["--metric", "auroc", "--metric", "confusion", "--metric", "top-5", "--monitor", "log-loss"]
    out = run("run", "-m", "fedavg", *quick, *options, "--out", str(tmp_path / "run"))
    assert "log loss" in out and "AUROC" in out and "top-5" in out and "accuracy" in out
    row = ff.read_metrics(tmp_path / "run")[-1]
    assert f"{row['metrics']['auroc']:.4g}" in out and f"{row['metrics']['log-loss']:.4g}" in out
    assert np.array(row["metrics"]["confusion"]).shape == (10, 10)
    shown = run("compare", str(tmp_path / "run"), "--target", "100")
    assert "log loss, last 10" in " ".join(shown.split()) or "log loss" in shown


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "COLUMNS": "200"}


def test_the_order_of_shares_does_not_matter():
    """Ranks and sums of a whole test set, scored by one worker, by two, and by three."""
    seeds = random.Random(0).sample(range(100), 2)
    for seed in seeds:
        runs = [tiny.train("fedavg", f"workers:{n}", rounds=1, metrics=MANY, seed=seed) for n in (2, 3)]
        assert runs[0].history[-1]["metrics"] == runs[1].history[-1]["metrics"]
