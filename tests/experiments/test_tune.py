"""A search for settings: what it is judged on, how it is interrupted and resumed, what it finds."""

import json
import math
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import yaml

import fedflat as ff
from fedflat.errors import FedflatError
from fedflat.experiments import tune as tuning
from fedflat.experiments.tune import Range, parse_range, tune
from fedflat.storage.metrics_file import read_metrics


def rows(count: int = 600) -> Iterator[str]:
    """A table that takes some training: three classes by angle, and noise."""
    draw = random.Random(0)
    for number in range(count):
        a, b = draw.gauss(0, 1), draw.gauss(0, 1)
        label = (
            int(3 * (math.atan2(b, a) / (2 * math.pi) + 0.5)) if draw.random() < 0.9 else draw.randrange(3)
        )
        yield f"{a:.3f},{b:.3f},{'xyz'[number % 3]},{min(label, 2)}"


CSV = "\n".join(["a,b,owner,label", *rows()])
TINY = {
    "method": "fedavg",
    "rounds": 3,
    "target": "label",
    "client_column": "owner",
    "participation": "everyone",
    "validation": 0.2,
    "local": {"steps": 2, "batch_size": 8},
}


def tiny(place: Path) -> dict[str, Any]:
    """The smallest experiment that settings make a difference for."""
    (place / "data.csv").write_text(CSV)
    return {**TINY, "dataset": str(place / "data.csv")}


def read_study(out: Path) -> list[tuple[Any, ...]]:
    """Everything that a study says of its trials."""
    study = optuna.load_study(study_name="fedflat", storage=f"sqlite:///{out / 'study.db'}")
    return [(t.number, t.state.name, t.params, t.value, t.intermediate_values) for t in study.trials]


def read_numbers(out: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of all trials, without what a clock says."""
    return {
        run.name: [{**row, "seconds": 0} for row in read_metrics(run)] for run in sorted(out.glob("trial-*"))
    }


LR = {"local.lr": parse_range("0.0001:5.0:log")}


def test_ranges():
    assert parse_range("0.01:1:log") == Range(0.01, 1, True)
    assert parse_range("1:5") == Range(1, 5, False)
    assert parse_range("1,5,10").choices == (1, 5, 10)
    for wrong in ("1", "1:0", "0:1:log", "a:b", "1:2:lin"):
        with pytest.raises(FedflatError, match="write"):
            parse_range(wrong)


# -- the validation part -----------------------------------------------------------------------------


def numbered(*sizes: int) -> ff.Federation:
    """Clients whose samples are all different."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    rows = [torch.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return ff.Federation(
        [(r[:, None].float(), r % 2) for r in rows], (torch.full((9, 1), -1.0), torch.ones(9).long())
    )


def test_every_client_gives_a_part_of_its_own_samples_and_keeps_the_rest():
    federation = numbered(1, 2, 30, 100)
    shared = ff.Federation.from_indices(
        federation.union().stored(),
        torch.split(torch.arange(133), federation.sizes),
        federation.test.stored(),
    )
    for whole in (federation, shared):
        held = whole.with_validation(0.1, seed=3)
        assert held.sizes == [1, 1, 27, 90]
        part, targets = held.test.stored()
        assert (part.flatten().long() % 2).equal(targets)
        own = [set(held.client(i).stored()[0].flatten().tolist()) for i in range(4)]
        out = set(part.flatten().tolist())
        for i, kept in enumerate(own):
            before = set(whole.client(i).stored()[0].flatten().tolist())
            assert kept < before or i == 0
            assert before - kept == out & before
        assert len(out) == 0 + 1 + 3 + 10
        assert whole.sizes == [1, 2, 30, 100] and len(whole.test) == 9
        again, other = whole.with_validation(0.1, seed=3), whole.with_validation(0.1, seed=4)
        assert again.test.stored()[0].equal(part) and not other.test.stored()[0].equal(part)
    assert (
        shared.with_validation(0.1, 3)
        .test.stored()[0]
        .equal(federation.with_validation(0.1, 3).test.stored()[0])
    )


def test_no_client_with_two_samples():
    with pytest.raises(FedflatError, match="no client has two samples"):
        numbered(1, 1).with_validation(0.5, 0)


@pytest.mark.parametrize("engine", ["inprocess", "workers:2"])
def test_rounds_are_tested_on_the_validation_part_and_the_last_one_on_the_test_set(engine):
    torch.manual_seed(0)
    data = [(torch.randn(30, 4), torch.randint(2, (30,))) for _ in range(3)]
    federation = ff.Federation(data, (torch.randn(50, 4), torch.randint(2, (50,))))
    model = torch.nn.Linear(4, 2)
    settings = {"local": ff.LocalSGD(lr=0.1, steps=3), "rounds": 3, "engine": engine, "seed": 5}
    run = ff.train(federation, model, validation=0.2, **settings)

    held = federation.with_validation(0.2, 5)
    plain = ff.train(held, model, **settings)
    assert plain.server.w.equal(run.server.w)
    assert [row["validation"]["accuracy"] for row in run.history] == [
        row["accuracy"] for row in plain.history
    ]
    assert [row["validation"]["loss"] for row in run.history] == [row["loss"] for row in plain.history]
    assert [row["accuracy"] is None for row in run.history] == [True, True, False]
    inputs, targets = federation.test.stored()
    with torch.no_grad():
        right = (run.model(inputs).argmax(1) == targets).float().mean()
    assert run.accuracy == pytest.approx(float(right))

    blind = ff.train(federation, model, validation=0.2, test=False, **settings)
    assert [row["accuracy"] for row in blind.history] == [None] * 3
    assert blind.server.w.equal(run.server.w)


# -- studies -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, tuning.Found]:
    """A study of 30 trials that nothing interrupted."""
    place = tmp_path_factory.mktemp("whole")
    return place / "study", tune(tiny(place), LR, 30, place / "study", last=1)


def test_thirty_trials_with_pruning(whole):
    out, found = whole
    trials = read_study(out)
    states = [state for _, state, *_ in trials]
    assert len(trials) == 30 and states.count("PRUNED") >= 3
    assert "PRUNED" not in states[:5]
    rows = {number: read_metrics(out / f"trial-{number}") for number in range(30)}
    for number, state, _, value, reported in trials:
        assert len(rows[number]) == len(reported) <= 3
        assert [row["validation"]["accuracy"] for row in rows[number]] == list(reported.values())
        assert all(row["accuracy"] is None for row in rows[number])  # no trial was tested on the test set
        if state == "COMPLETE":
            assert value == rows[number][-1]["validation"]["accuracy"]
    values = {number: value for number, state, _, value, _ in trials if state == "COMPLETE"}
    assert found.validation == max(values.values()) == values[found.trial]
    assert found.settings == trials[found.trial][2]
    assert len(set(values.values())) >= 8 and found.trial >= 1  # the validation part tells settings apart
    assert len({params["local.lr"] for _, _, params, *_ in trials}) == 30

    (chosen,) = out.glob("chosen-*")
    said = yaml.safe_load((chosen / "experiment.yaml").read_text())
    assert said["local"]["lr"] == found.settings["local.lr"] and "validation" not in said
    tested = [row["accuracy"] for row in read_metrics(chosen)]
    assert tested == [None, None, found.test]
    best = json.loads((out / "best.json").read_text())
    assert best["test"] == found.test and best["chosen_on"] == "validation"


def test_a_finished_study_is_only_read(whole, tmp_path):
    out, found = whole
    before = read_study(out)
    assert tune(tiny(out.parent), LR, 30, out, last=1) == found
    assert read_study(out) == before


KILLED = """
import sys, os, signal
from pathlib import Path
from fedflat.experiments import tune as tuning
sys.path.insert(0, sys.argv[1])
from test_tune import LR, tiny
import torch
torch.set_num_threads(1)
left = int(sys.argv[3])
search = tuning._Search.round if sys.argv[4] == "round" else tuning._Search.finished
def killing(self, *news):
    global left
    left -= 1
    if left == 0 and sys.argv[5] == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = search(self, *news)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(tuning._Search, sys.argv[4], killing)
place = Path(sys.argv[2])
tuning.tune({**tiny(place), "checkpoint_every": 1}, LR, 30, place / "study", last=1)
"""


def test_a_study_that_is_killed_again_and_again_is_the_study_that_it_would_have_been(whole, tmp_path):
    kills = [(14, "round", "before"), (1, "round", "after"), (8, "finished", "before"), (9, "round", "after")]
    kills += [(6, "finished", "before")]
    for left, where, when in kills:
        given = [str(Path(__file__).parent), str(tmp_path), str(left), where, when]
        ended = subprocess.run([sys.executable, "-c", KILLED, *given], capture_output=True, text=True)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    found = tune({**tiny(tmp_path), "checkpoint_every": 1}, LR, 30, tmp_path / "study", last=1)
    out, uninterrupted = whole
    assert found == uninterrupted
    assert read_study(tmp_path / "study") == read_study(out)
    assert read_numbers(tmp_path / "study") == read_numbers(out)


def test_nothing_depends_on_the_test_set_before_the_end(whole, tmp_path, monkeypatch):
    """With test labels that are all wrong, every trial, every early end and the choice stay as they were."""
    from fedflat.experiments import run as running

    make = running.make_federation

    def poisoned(*given):
        federation = make(*given)
        inputs, targets = federation._test
        federation._test = inputs + 100.0, (targets + 1) % 3
        return federation

    monkeypatch.setattr(running, "make_federation", poisoned)
    found = tune(tiny(tmp_path), LR, 30, tmp_path / "study", last=1)
    out, clean = whole
    assert found.test != clean.test  # it was poisoned indeed
    assert (found.settings, found.validation, found.trial) == (clean.settings, clean.validation, clean.trial)
    assert read_study(tmp_path / "study") == read_study(out)
    assert read_numbers(tmp_path / "study") == read_numbers(out)


def test_a_grid_is_a_grid(tmp_path):
    ranges = {"local.lr": parse_range("0.01,0.1,1.0"), "local.steps": parse_range("1,2")}
    found = tune(tiny(tmp_path), ranges, None, tmp_path / "study", last=1)
    combinations = [tuple(params.values()) for _, _, params, *_ in read_study(tmp_path / "study")]
    assert combinations == [(lr, steps) for lr in (0.01, 0.1, 1.0) for steps in (1, 2)]
    assert found.trials == 6


def test_several_jobs_find_what_one_finds_in_a_grid(tmp_path):
    ranges = {"local.lr": parse_range("0.01,0.1,1.0")}
    one = tune(tiny(tmp_path), ranges, None, tmp_path / "one", last=1)
    told = []

    class Watcher:
        def round(self, *news):
            pass

        def finished(self, trial, value, settings):
            told.append(trial)

    two = tune(tiny(tmp_path), ranges, None, tmp_path / "two", last=1, watcher=Watcher(), jobs=2)
    assert two == one and sorted(told) == [0, 1, 2]
    assert read_numbers(tmp_path / "one") == read_numbers(tmp_path / "two")


def test_a_study_has_one_experiment(tmp_path):
    content = tiny(tmp_path)
    tune(content, LR, 1, tmp_path / "study", last=1)
    with pytest.raises(FedflatError, match="another experiment or seed"):
        tune({**content, "rounds": 2}, LR, 2, tmp_path / "study", last=1)
    with pytest.raises(FedflatError, match=r"holds a search for local\.lr"):
        tune(content, {"local.steps": parse_range("1,2")}, 2, tmp_path / "study", last=1)


def test_a_trial_that_was_stopped_is_resumed(tmp_path):
    content = tiny(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        tune(content, LR, 1, tmp_path / "study", last=1, stop=lambda: True)
    began = yaml.safe_load((tmp_path / "study" / "trial-0" / "experiment.yaml").read_text())
    assert len(read_metrics(tmp_path / "study" / "trial-0")) == 1
    found = tune(content, LR, 1, tmp_path / "study", last=1)
    assert found.settings["local.lr"] == began["local"]["lr"] and found.trials == 1


def test_tuning_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FedflatError, match="cannot be written: "):
        tune({"rounds": 1}, {"local.lr": parse_range("0.001:0.2")}, 1, tmp_path / "file" / "study")


def test_both_ends_of_a_range_are_checked_before_anything_runs(tmp_path):
    with pytest.raises(FedflatError, match="momentum"):
        tune({"rounds": 1}, {"local.momentum": parse_range("0.5:1.5")}, 1, tmp_path / "study")
    assert not (tmp_path / "study").exists()


# -- the command line --------------------------------------------------------------------------------


def test_the_command(tmp_path, fedflat):
    file, out = tmp_path / "tiny.yaml", tmp_path / "study"
    file.write_text(yaml.safe_dump(tiny(tmp_path)))
    command = ("tune", file, "--vary", "local.lr=0.0001:5.0:log", "--last", 1, "--out", out)
    code, said, errors = fedflat(*command, "--trials", 3)
    assert code == 0, errors
    best = json.loads((out / "best.json").read_text())
    assert f"Best: {best['validation']:.2%} on the validation part" in said
    assert f"{best['test']:.2%} on the test set" in said
    assert "no trial has seen the test set" in " ".join(said.split())
    assert [line.split(":")[0] for line in said.splitlines()[:3]] == ["trial 0", "trial 1", "trial 2"]
    assert len(read_study(out)) == 3
    for kind in (("tuning",), ("curves", "--value", "validation")):
        code, said, errors = fedflat("figure", *kind, out, "-o", tmp_path / f"{kind[0]}.png")
        assert code == 0, errors
        assert (tmp_path / f"{kind[0]}.png").stat().st_size > 1000

    code, said, errors = fedflat(
        "compare", out, "--on", "validation", "--last", 1, "--out", tmp_path / "t.csv"
    )
    assert code == 0, errors
    assert "validation accuracy" in (tmp_path / "t.csv").read_text().splitlines()[0]
    assert f"{100 * best['validation']:.2f}" in (tmp_path / "t.csv").read_text()
