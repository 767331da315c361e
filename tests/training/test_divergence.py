"""Models that are no longer finite: the run ends with a sentence and the last finite one, or the round is undone."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from test_experiments import Fedflat
from test_identities import train_small
from test_reference import SCHEDULE
from test_training import STATEFUL, same_run
from torch import nn

import fedflat as ff
from fedflat.core.finite import likely_cause
from fedflat.core.messages import Upload
from fedflat.engines.inprocess import InProcess
from fedflat.experiments.run import is_done
from fedflat.training.record import RoundRecord

SAMPLES = 100


def slope(w: float) -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, w)
    return model


def line(**given: Any) -> ff.Run:
    """Full-batch gradient descent on (w − 0)² in single precision, where the step multiplies w by 1 − 2 lr."""
    x, y = torch.ones(SAMPLES, 1), torch.zeros(SAMPLES, 1)
    options = {"rounds": 60, "local": ff.LocalSGD(lr=5.0, steps=1, batch_size=None), "seed": 0, **given}
    return ff.train(ff.Federation([(x, y)], test=(x, y)), slope(1.0), loss=F.mse_loss, **options)


def before_overflow(lr: float) -> tuple[int, float]:
    """The round in which samples times the update overflow, and w before it, in numpy."""
    w = np.float32(1.0)
    with np.errstate(over="ignore"):
        for round in range(100):
            update = -np.float32(lr) * np.float32(2.0) * w
            if not np.isfinite(update * np.float32(SAMPLES)):
                return round, float(w)
            w = w + update
    raise AssertionError("it does not overflow")


def test_a_run_ends_with_the_last_finite_model(tmp_path: Path):
    round, w = before_overflow(5.0)
    with pytest.raises(
        ff.Diverged, match=rf"^round {round}: the model .*lr=5 is probably too high"
    ) as caught:
        line(out=tmp_path)
    assert caught.value.run.model.weight.item() == pytest.approx(w, rel=1e-3)  # 37 roundings
    assert len(caught.value.run.history) == round
    kept = load_file(tmp_path / "last_finite.safetensors")["weight"]
    assert kept.equal(caught.value.run.model.weight.detach())
    assert str(tmp_path / "last_finite.safetensors") in str(caught.value)
    assert not (tmp_path / "model.safetensors").exists() and not is_done(tmp_path)
    about = json.loads((tmp_path / "run.json").read_text())
    assert "finished" not in about and about["diverged"].startswith(f"round {round}: ")


def test_a_diverged_run_ends_in_the_same_round_when_it_is_gone_on_with(tmp_path: Path):
    for _ in range(2):
        with pytest.raises(ff.Diverged, match=rf"^round {before_overflow(5.0)[0]}: "):
            line(out=tmp_path, checkpoint_every=2, resume=True)
    assert (tmp_path / "last_finite.safetensors").exists()


def test_a_run_that_recovers_is_finished_and_has_no_other_model(tmp_path: Path):
    """The learning rate falls while rounds are undone."""
    local = ff.LocalSGD(lr=5.0, lr_decay=0.4, steps=1, batch_size=None)
    w = np.float32(1e36)
    with np.errstate(over="ignore"):
        for round in range(9):
            update = -np.float32(5.0 * 0.4**round) * np.float32(2.0) * w
            w = w + update if np.isfinite(update * np.float32(SAMPLES)) else w
    federation = ff.Federation([(torch.ones(SAMPLES, 1), torch.zeros(SAMPLES, 1))])
    options: dict[str, Any] = {"local": local, "rounds": 9, "loss": F.mse_loss, "out": tmp_path}
    with pytest.raises(ff.Diverged, match=r"^round 0: .*on_divergence='restore'"):
        ff.train(federation, slope(1e36), **options)
    run = ff.train(federation, slope(1e36), on_divergence="restore", resume=True, **options)
    assert run.model.weight.item() == pytest.approx(float(w), rel=1e-5)
    lost = [bool(row["undone"]) for row in run.history]
    assert lost == sorted(lost, reverse=True) and 0 < sum(lost) < 9
    assert is_done(tmp_path) and not (tmp_path / "last_finite.safetensors").exists()


class Exploding(InProcess):
    """Makes the uploads of some rounds so long that their sums overflow."""

    def __init__(self, *rounds: int) -> None:
        self.rounds = rounds

    def uploads(self, clients: Any, download: Any, state: Any) -> Iterator[Upload]:
        for upload in super().uploads(clients, download, state):
            if upload.round in self.rounds:
                for vector in (upload.update, *upload.vectors.values()):
                    vector.fill_(1e308)
            yield upload


@pytest.mark.parametrize("method", ["fedavg", *STATEFUL])
def test_an_undone_round_is_as_if_nobody_had_taken_part(method: str):
    run = train_small(method, engine=Exploding(2), on_divergence="restore")
    away = [active if t != 2 else [] for t, active in enumerate(SCHEDULE)]
    other = train_small(method, away)
    assert same_run(run, other)
    assert run.server.scalars() == other.server.scalars()
    assert [bool(row["undone"]) for row in run.history] == [t == 2 for t in range(len(SCHEDULE))]
    for client in other.server.per_client.clients():
        ours, theirs = run.server.of(client), other.server.of(client)
        assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def test_a_run_that_never_recovers_ends(tmp_path: Path):
    with pytest.raises(ff.Diverged, match=r"^round 9: .*10 rounds in a row came to nothing") as caught:
        line(engine=Exploding(*range(50)), on_divergence="restore", dtype=torch.float64, rounds=50)
    assert caught.value.run.model.weight.item() == 1.0
    assert len(caught.value.run.history) == 9
    # the count goes on where the run was stopped
    options: dict[str, Any] = {"engine": Exploding(*range(50)), "on_divergence": "restore", "rounds": 50}
    options |= {"dtype": torch.float64, "out": tmp_path, "local": ff.LocalSGD(lr=0.1)}
    rounds = iter(range(50))
    line(**options, stop=lambda: next(rounds) == 4)
    with pytest.raises(ff.Diverged, match=r"^round 9: .*10 rounds in a row"):
        line(**options, resume=True)


@pytest.mark.parametrize("rounds", [2, 8])
def test_rounds_without_a_finite_upload_end_the_run(rounds: int):
    """Data that holds NaN: after three rounds, or when there were no more."""
    x, y = torch.full((8, 1), math.nan), torch.zeros(8, dtype=torch.long)
    with (
        pytest.warns(UserWarning, match="fill or drop"),
        pytest.raises(ff.Diverged, match=rf"^round {min(rounds, 3) - 1}: every upload .*data of client 0"),
    ):
        ff.train(ff.Federation([(x, y)]), nn.Linear(1, 2), rounds=rounds)


def test_what_is_kept_beside_the_model_must_be_finite():
    class Runaway(ff.Mechanism):
        name = "runaway"

        def server_state(self, w: torch.Tensor) -> dict[str, Any]:
            return {"least": math.inf, "grown": 1e300}

        def finish(self, server: Any) -> None:
            server["grown"] = server["grown"] * 1e4

    with pytest.raises(ff.Diverged, match=r"^round 2: .*'grown' would hold NaN or infinite"):
        line(method=Runaway(), local=ff.LocalSGD(lr=0.1))  # `least` was infinite from the start


def test_a_model_that_is_not_finite_from_the_start():
    with pytest.raises(ff.FedflatError, match="before the first round") as caught:
        ff.train(ff.federate("digits", clients=3), _spoiled_mlp(), rounds=1)
    assert not isinstance(caught.value, ff.Diverged)


def _spoiled_mlp() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with torch.no_grad():
        model[1].bias[3] = math.inf
    return model


@pytest.mark.parametrize("losses", [[1e200, 3e200], [1e308, 1e308], [math.inf, 1.0], [math.nan, 2.0]])
def test_huge_losses_are_summed_up_without_a_deviation(losses: list[float]):
    record = RoundRecord(0, [], server=None)  # type: ignore[arg-type]
    record.sum_up([(loss, 5.0) for loss in losses], {})
    assert record.train_loss_std is None
    assert record.train_loss == pytest.approx(np.mean(losses), nan_ok=True) or math.isinf(
        record.train_loss or 0
    )


@pytest.mark.parametrize("lr", [1e-45, 1e45])
def test_learning_rates_that_single_precision_cannot_hold(lr: float):
    with pytest.raises(ff.FedflatError, match=r"lr.*float32"):
        line(local=ff.LocalSGD(lr=lr))
    run = line(local=ff.LocalSGD(lr=1e-45), method="fedwmsam", dtype=torch.float64, rounds=2)
    assert run.server.w.isfinite().all()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", ff.METHODS)
def test_no_method_fails_where_losses_explode(method: str):
    """Whatever becomes of the run, it is a model or one sentence."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator)
    federation = ff.Federation([(x, torch.arange(30) % 3), (2 * x, torch.arange(30) % 3)])
    for lr in (1e6, 1e150):
        local = ff.LocalSGD(lr=lr, steps=2, batch_size=10)
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        try:
            run = ff.train(federation, model, method, local, rounds=4, dtype=torch.float64)
        except ff.Diverged as problem:
            run = problem.run
        assert run.server.w.isfinite().all()


def test_the_likely_cause():
    assert "Client 7 had a training loss of 1e+30" in likely_cause(0.1, {3: 0.5, 7: 1e30, 9: 2.0})
    assert "Client 7 had a training loss of nan" in likely_cause(0.1, {3: 0.5, 7: math.nan})
    for losses in ({}, {1: 1e30}, {1: 1e30, 2: 1e29}, {1: math.nan, 2: math.nan}):
        assert "lr=0.1 is probably too high" in likely_cause(0.1, losses)


# -- on the command line -------------------------------------------------------------------------------

DIGITS = ("--rounds", "4", "--epochs", "1", "--clients", "4", "--participation", "2")


def test_exit_code_3(fedflat: Fedflat, tmp_path: Path):
    code, _, said = fedflat("run", "--method", "fedavg", *DIGITS, "--lr", "1e30", "--out", tmp_path / "a")
    assert code == 3, said
    assert said.startswith("Error: round 2: every upload holds NaN") and said.count("\n") == 1
    assert not is_done(tmp_path / "a")
    assert all(v.isfinite().all() for v in load_file(tmp_path / "a" / "last_finite.safetensors").values())
    code, _, said = fedflat("resume", tmp_path / "a")
    assert code == 3 and "round 2: every upload" in said


def test_other_runs_go_on(fedflat: Fedflat, tmp_path: Path):
    methods = ("--method", "server-step(lr=1e300)", "--method", "fedavg", *DIGITS)
    code, printed, said = fedflat("run", *methods, "--set", "dtype=float64", "--out", tmp_path / "two")
    assert code == 3, said
    done = {path.parent.name for path in (tmp_path / "two").rglob("model.safetensors")}
    assert done == {"fedavg"}
    assert "diverged: round" in said and "fedavg" in printed.lower()
