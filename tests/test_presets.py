"""The papers' tables: every cell is a valid experiment, the numbers are the printed ones, and cells can be run."""

import json
import re

import pytest

from fedflat.cli import main
from fedflat.errors import FedflatError
from fedflat.experiments.presets import (
    SMALL_BUDGET,
    PaperCell,
    check_all,
    choose,
    core_seconds,
    find_preset,
    measured,
    presets,
    small,
)
from fedflat.experiments.reading import make_experiment
from fedflat.rundirectory import read_metrics

KEYS = [preset.key for preset in presets()]


def test_every_cell_is_a_valid_experiment():
    assert check_all() == []


@pytest.mark.parametrize(
    ("key", "row", "column", "published"),
    [
        ("fedwmsam/table1", "FedWMSAM", "fashion-mnist/dirichlet-0.1", 0.8464),
        ("fedwmsam/table1", "FedAvg", "cifar10/dirichlet-0.1", 0.7005),
        ("fedwmsam/table1", "FedGAMMA", "cifar100/pathological-10", 0.0198),
    ],
)
def test_published_numbers(key: str, row: str, column: str, published: float):
    (cell,) = choose(find_preset(key).cells(), [column], [row])
    assert cell.published == published


@pytest.mark.parametrize("key", KEYS)
def test_a_preset_says_what_it_is(key: str):
    preset = find_preset(key)
    cells = preset.cells()
    assert preset.title and preset.where and cells
    runs, hours = preset.cost()
    assert 1 <= runs <= len(cells)
    assert hours > 0
    assert all(cell.statistic["kind"] != "rounds-to" or 0 < (cell.target or 0) < 1 for cell in cells)
    for cell in cells:
        if cell.published is not None and cell.unit == "percent":
            assert 0 <= cell.published <= 100
        if cell.published is not None and cell.unit == "fraction":
            assert 0 <= cell.published <= 1


@pytest.mark.parametrize("key", KEYS)
def test_a_small_reproduction_is_small(key: str):
    cells = find_preset(key).cells()
    contents = small(cells)
    runs = {cell.run: content for cell, content in zip(cells, contents, strict=True)}
    for content in runs.values():
        make_experiment(content)
    assert sum(map(core_seconds, runs.values())) < 2 * SMALL_BUDGET


def cell(kind: str, last: int | None = None, target: float | None = None, unit: str = "percent") -> PaperCell:
    statistic = {"kind": kind} | ({} if last is None else {"last": last})
    return PaperCell("row", "column", {}, statistic, unit, target, None, None, "", None)


def test_statistics():
    rows = [{"index": i, "accuracy": a} for i, a in enumerate([0.1, None, 0.5, 0.9, 0.7])]
    assert measured(cell("mean", last=2), rows) == (pytest.approx(80), "mean of the last 2")
    assert measured(cell("max"), rows) == (pytest.approx(90), "maximum")
    assert measured(cell("accuracy", unit="fraction"), rows) == (0.9, "maximum")
    assert measured(cell("final"), rows) == (pytest.approx(70), "final")
    assert measured(cell("rounds-to", target=0.5), rows)[0] == 3
    assert measured(cell("rounds-to", target=0.95), rows)[0] is None
    assert measured(cell("other"), rows)[0] is None
    assert measured(cell("final"), [])[0] is None


def test_wrong_names_are_told_apart():
    cells = find_preset("fedwmsam/table1").cells()
    with pytest.raises(FedflatError, match="Did you mean 'fedwmsam/table1'"):
        find_preset("fedwmsam/tabel1")
    with pytest.raises(FedflatError, match="no paper 'fedwsam'"):
        find_preset("fedwsam/table1")
    with pytest.raises(FedflatError, match="no cells 'fashion'"):
        choose(cells, ["fashion"], [])
    with pytest.raises(FedflatError, match="Did you mean 'FedSAM'"):
        choose(cells, [], ["FedSMA"])
    assert {c.column for c in choose(cells, ["fashion-mnist"], ["fedavg"])} == {
        f"fashion-mnist/{split}"
        for split in ("dirichlet-0.6", "dirichlet-0.1", "pathological-6", "pathological-3")
    }


def test_reproduce_runs_cells_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)
    arguments = ["fedflat", "reproduce", "fedwmsam/table1", "--cells", "fashion-mnist/dirichlet-0.1"]
    arguments += ["--rows", "FedAvg", "--add", "fedgmt", "--scale", "small", "--out", "here"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code in (0, None)
    shown = capsys.readouterr().out
    assert re.search(r"FedAvg +fashion-mnist/dirichlet-0.1 +maximum", shown)
    assert "FedGMT" in shown
    results = json.loads((tmp_path / "here" / "comparison.json").read_text())
    (ours,) = [r for r in results if r["row"] == "FedAvg"]
    rows = read_metrics(tmp_path / "here" / "fedavg" / "fashion-mnist_dirichlet-0.1" / "seed-0")
    assert ours["ours"] == max(row["accuracy"] for row in rows if row["accuracy"] is not None)
    assert ours["paper"] == 0.8226
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    with pytest.raises(SystemExit):
        main()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")} == times
