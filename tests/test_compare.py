"""Comparing runs, against numbers computed by hand, and the search for settings."""

import json
import statistics

import pytest
import yaml

from fedflat.errors import FedflatError
from fedflat.experiments.compare import as_csv, as_latex, as_markdown, compare, find_runs, table, write_table
from fedflat.experiments.tune import Range, parse_range, tune
from fedflat.rundirectory import read_metrics


def make_run(path, method, seed, accuracies, worst=0.2, **settings):
    path.mkdir(parents=True)
    experiment = {"method": method, "seed": seed, "dataset": "digits", **settings}
    (path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    with (path / "metrics.jsonl").open("w") as file:
        for index, accuracy in enumerate(accuracies):
            row = {
                "index": index,
                "accuracy": accuracy,
                "client_accuracy": {"mean": 0.5, "std": 0.1, "worst_decile": worst},
                "seconds": 2.0,
                "bytes_down": 3_000_000,
                "bytes_up": 1_000_000,
            }
            file.write(json.dumps(row) + "\n")


def test_means_over_rounds_and_seeds(tmp_path):
    make_run(tmp_path / "a0", "fedavg", 0, [0.1, 0.5, 0.6, 0.8], worst=0.2)
    make_run(tmp_path / "a1", "fedavg", 1, [0.2, 0.3, 0.4, 0.6], worst=0.4)
    make_run(tmp_path / "b0", "fedsam", 0, [0.1, 0.2, None, 0.3])
    fedavg, fedsam = compare(find_runs([tmp_path]), last=2, target=0.5)
    assert (fedavg.name, fedsam.name) == ("fedavg", "fedsam")
    assert fedavg.last == (pytest.approx(0.6), pytest.approx(statistics.stdev([0.7, 0.5])))
    assert fedavg.within == pytest.approx(statistics.stdev([0.6, 0.8]))
    assert fedavg.best == (pytest.approx(0.7), pytest.approx(statistics.stdev([0.8, 0.6])))
    assert fedavg.worst_decile[0] == pytest.approx(0.3)
    assert fedavg.rounds_to == (3, pytest.approx(statistics.stdev([2, 4])))
    assert fedavg.seconds_to[0] == 6
    assert fedavg.megabytes_to[0] == 12
    assert fedavg.reached == 2
    assert fedsam.last == (pytest.approx(0.25), None)
    assert fedsam.rounds_to is None and fedsam.reached == 0


def test_what_differs_names_the_groups_and_the_engine_does_not(tmp_path):
    make_run(
        tmp_path / "a", "fedavg", 0, [0.1], partition={"name": "dirichlet", "alpha": 0.1}, engine="workers"
    )
    make_run(
        tmp_path / "b", "fedavg", 1, [0.2], partition={"name": "dirichlet", "alpha": 0.1}, engine="inprocess"
    )
    make_run(tmp_path / "c", {"fedsam": {"rho": 0.1}}, 0, [0.3], partition={"name": "dirichlet", "alpha": 1})
    names = [group.name for group in compare(find_runs([tmp_path]))]
    assert names == ["fedavg alpha=0.1", "fedsam(rho=0.1) alpha=1"]


def test_tables(tmp_path):
    make_run(tmp_path / "runs" / "a", "fedavg", 0, [0.5, 0.75])
    groups = compare(find_runs([tmp_path / "runs"]), last=1, target=0.7)
    head, rows = table(groups, 1, 0.7)
    assert as_csv(head, rows).splitlines()[1] == "fedavg,1,2,75.00,–,75.00,20.00,2,4,8,1/1"
    assert as_markdown(head, rows).splitlines()[1].startswith("| --- | ---: |")
    assert r"rounds to 70\%" in as_latex(head, rows)
    for ending in (".csv", ".md", ".tex"):
        write_table(tmp_path / f"table{ending}", head, rows)
        assert "fedavg" in (tmp_path / f"table{ending}").read_text()
    with pytest.raises(FedflatError, match=r"\.csv, \.md or \.tex"):
        write_table(tmp_path / "table.xls", head, rows)


def test_places_without_runs(tmp_path):
    with pytest.raises(FedflatError, match="no run in"):
        find_runs([tmp_path])
    with pytest.raises(FedflatError, match="no directory"):
        find_runs([tmp_path / "nowhere"])


def test_ranges():
    assert parse_range("0.01:1:log") == Range(0.01, 1, True)
    assert parse_range("1:5") == Range(1, 5, False)
    assert parse_range("1,5,10").choices == (1, 5, 10)
    for wrong in ("1", "1:0", "0:1:log", "a:b", "1:2:lin"):
        with pytest.raises(FedflatError, match="write"):
            parse_range(wrong)


def test_tuning_finds_the_best_of_its_trials_and_goes_on(tmp_path):
    content = {"rounds": 3, "local": {"epochs": 1}, "method": "fedsam"}
    ranges = {"local.lr": parse_range("0.001:0.2:log"), "method.rho": parse_range("0.01,0.05")}
    told = []
    tune(content, ranges, 2, tmp_path, last=1, on_trial=lambda *trial: told.append(trial))
    best, value = tune(content, ranges, 4, tmp_path, last=1, on_trial=lambda *trial: told.append(trial))
    assert [number for number, _, _ in told] == [0, 1, 2, 3]
    finals = {
        number: read_metrics(tmp_path / f"trial-{number}")[-1]["accuracy"]
        for number, outcome, _ in told
        if outcome is not None
    }
    assert value == max(finals.values())
    assert best == dict(told[max(finals, key=lambda n: finals[n])][2])
    assert tune(content, ranges, 4, tmp_path, last=1) == (best, value)


def test_a_trial_that_was_interrupted_comes_again(tmp_path):
    content = {"rounds": 3, "local": {"epochs": 1}, "method": "fedavg"}
    ranges = {"local.lr": parse_range("0.001:0.2:log")}
    with pytest.raises(KeyboardInterrupt):
        tune(content, ranges, 1, tmp_path, last=1, stop=lambda: True)
    began = yaml.safe_load((tmp_path / "trial-0" / "experiment.yaml").read_text())
    best, _ = tune(content, ranges, 1, tmp_path, last=1)
    assert best["local.lr"] == began["local"]["lr"]


def test_tuning_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FedflatError, match="cannot be written: "):
        tune({"rounds": 1}, {"local.lr": parse_range("0.001:0.2")}, 1, tmp_path / "file" / "study")


def test_both_ends_of_a_range_are_checked_before_anything_runs(tmp_path):
    with pytest.raises(FedflatError, match="momentum"):
        tune({"rounds": 1}, {"local.momentum": parse_range("0.5:1.5")}, 1, tmp_path / "study")
    assert not (tmp_path / "study").exists()
