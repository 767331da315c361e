"""Comparing runs, against numbers computed by hand."""

import json
import re
import shutil
import statistics
import sys

import pytest
import yaml

from fedflat.cli import main
from fedflat.errors import FedflatError
from fedflat.experiments.compare import as_csv, as_latex, as_markdown, compare, find_runs, table, write_table
from fedflat.storage.metrics_file import read_metrics


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


def test_copies_are_no_seeds(tmp_path):
    make_run(tmp_path / "a0", "fedavg", 0, [0.1, 0.5, 0.6])
    make_run(tmp_path / "a1", "fedavg", 1, [0.2, 0.3, 0.4])
    shutil.copytree(tmp_path / "a0", tmp_path / "again")
    make_run(tmp_path / "half", "fedavg", 0, [0.1, 0.5])  # a copy that was made earlier
    make_run(tmp_path / "twin", "fedavg", 2, [0.1, 0.5, 0.6])  # another seed with the same luck is none
    (group,) = compare(find_runs([tmp_path]), last=1)
    assert [run.name for run in group.counted] == ["a0", "a1", "twin"]
    assert group.last == (pytest.approx(1.6 / 3), pytest.approx(statistics.stdev([0.6, 0.4, 0.6])))
    assert table([group], 1, None)[1][0][1] == "3"
    for copy in ("again", "half"):
        sentence = f"{tmp_path / copy} has the settings, the seed and the numbers of {tmp_path / 'a0'}"
        assert sum(note.startswith(sentence) for note in group.notes) == 1


def test_unfinished_runs_are_not_averaged_silently(tmp_path, fedflat):
    make_run(tmp_path / "a0", "fedavg", 0, [0.1, 0.5, 0.8], rounds=3)
    make_run(tmp_path / "a1", "fedavg", 1, [0.2, 0.3, 0.6], rounds=3)
    make_run(tmp_path / "a2", "fedavg", 2, [0.1], rounds=3)
    make_run(tmp_path / "b0", "fedsam", 0, [0.4], rounds=3)
    fedavg, fedsam = compare(find_runs([tmp_path]), last=1)
    assert fedavg.last == (pytest.approx(0.7), pytest.approx(statistics.stdev([0.8, 0.6])))
    assert [row[1] for row in table([fedavg, fedsam], 1, None)[1]] == ["2 of 3", "1 unfinished"]
    assert fedsam.last == (pytest.approx(0.4), None)  # there is nothing else to show
    code, printed = fedflat("compare", tmp_path)
    assert code == 0
    assert f"{tmp_path / 'a2'} is not finished (1 rounds) and left out of the means." in printed
    assert f"{tmp_path / 'b0'} is not finished (1 rounds)." in printed


ROW = '{"index": 1, "accuracy": 0.5, "seconds": 2.0, "bytes_down": 1, "bytes_up": 1}'


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (ROW.replace("0.5", "NaN"), "line 2, is not JSON"),
        (ROW.replace("0.5", "Infinity"), "line 2, is not JSON"),
        (ROW.replace("0.5", "1e999"), "line 2, is not JSON"),
        ("\xff\xfe", "line 2, is not JSON"),
        ("[" * 100_000, "line 2, is not JSON"),
        (ROW.replace("0.5", "5.0"), "line 2, is no round: its 'accuracy' cannot be 5.0"),
        (ROW.replace("0.5", '"0.5"'), "line 2, is no round: its 'accuracy'"),
        (ROW.replace("2.0", "-2.0"), "line 2, is no round: its 'seconds'"),
        (ROW.replace("2.0", "9" * 400), "line 2, is no round: its 'seconds'"),
        (ROW.replace('"index": 1', '"index": true'), "line 2, is no round: it does not say which"),
        (ROW.replace('"index": 1', '"index": 0'), "line 2, has round 0 once more, with other numbers"),
        (ROW.replace('"index": 1', '"index": 2'), "line 2, is round 2, not 1; lines were removed"),
        ("[1]", "line 2, is no round"),
    ],
)
def test_damaged_metrics_are_never_counted(tmp_path, line, says):
    make_run(tmp_path / "a", "fedavg", 0, [0.1, 0.5, 0.6])
    lines = (tmp_path / "a" / "metrics.jsonl").read_bytes().splitlines()
    lines[1] = line.encode("latin-1")
    (tmp_path / "a" / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(FedflatError, match=re.escape(f"metrics.jsonl, {says}")):
        compare(find_runs([tmp_path]))


def test_lines_that_are_there_twice_count_once(tmp_path):
    make_run(tmp_path / "a", "fedavg", 0, [0.1, 0.5, 0.6])
    file = tmp_path / "a" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    whole = read_metrics(tmp_path / "a")
    file.write_text("".join([lines[0], lines[0], lines[1], lines[2], lines[1], lines[2][:20]]))
    assert read_metrics(tmp_path / "a") == whole


def test_a_row_without_a_number_that_is_asked_for(tmp_path):
    make_run(tmp_path / "a", "fedavg", 0, [0.1])
    (tmp_path / "a" / "metrics.jsonl").write_text('{"index": 0, "accuracy": 0.9}\n')
    with pytest.raises(FedflatError, match="round 0 has no 'seconds'"):
        compare(find_runs([tmp_path]), target=0.5)


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


@pytest.fixture
def fedflat(monkeypatch, capsys):
    """The command line: exit code and what it said."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedflat", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return int(end.value.code or 0), " ".join((said.out + said.err).split())

    return call
