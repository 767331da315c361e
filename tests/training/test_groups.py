"""Accuracy of every user or domain of a test set: the same from every engine, and what FedWMSAM's Table 2 shows."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import federation, same, train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedflat as ff
from fedflat.cli import main
from fedflat.core.evaluation import evaluate
from fedflat.core.flat import FlatModel
from fedflat.data.catalogue import OFFICE_DOMAINS
from fedflat.data.standin import stand_in
from fedflat.engines.flower.remote_federation import RemoteFederation
from fedflat.experiments.presets import find_preset, presets
from fedflat.experiments.reproduce import plan_runs, tabulate
from fedflat.experiments.statistics import statistic
from fedflat.storage.metrics_file import read_metrics


def by_hand(model: nn.Module, x: Tensor, y: Tensor, owners: list[str]) -> dict[str, float]:
    """The share of right answers for every owner."""
    with torch.no_grad():
        right = (model.eval()(x).argmax(1) == y).numpy()
    return {name: float(right[np.array(owners) == name].mean()) for name in sorted(set(owners))}


# -- what is recorded ------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["inprocess", "workers:2"])
def test_every_group_has_its_accuracy(engine: str):
    """Groups of unequal size across three batches, shared out among workers."""
    run = train("fedavg", engine, rounds=2)
    data = federation()
    owners = [data.test_group_names[n] for n in data.test.groups.tolist()]
    assert sorted(set(owners)) == ["east", "north", "west"]
    told = run.history[-1]["accuracy_by_group"]
    assert told == by_hand(run.model, data.test.inputs, data.test.targets, owners)
    shares = {name: owners.count(name) / len(owners) for name in told}
    assert sum(shares[name] * told[name] for name in told) == pytest.approx(run.accuracy, abs=1e-12)


def test_a_round_that_is_tested_during_the_next_has_the_same():
    same(train("fedsam", "inprocess", rounds=3), train("fedsam", ff.Workers(2), rounds=3, overlap=True))


def table(path: Path, clients: int) -> Path:
    rng = np.random.default_rng(0)
    rows = [
        f"{x:.3f},{int(x + 0.3 * e > 0)},c{k % clients}" for k, (x, e) in enumerate(rng.normal(size=(600, 2)))
    ]
    path.write_text("\n".join(["x,y,who", *rows]))
    return path


def test_clients_of_a_table_are_tested_on_their_own_rows(tmp_path: Path):
    dataset = ff.read_table(table(tmp_path / "t.csv", 3), "y", client="who")
    run = ff.train(ff.federate(dataset, ff.ByUser()), "mlp", rounds=3, out=tmp_path / "run")
    owners = [dataset.group_names[number] for number in dataset.test_groups]
    assert {name: owners.count(name) for name in dataset.group_names} == {"c0": 40, "c1": 40, "c2": 40}
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["accuracy_by_group"] == by_hand(run.model, *dataset.test, owners)
    # the rows are the clients' own: of every client the fifth that it does not train on
    raw = [line.split(",") for line in (tmp_path / "t.csv").read_text().splitlines()[1:]]
    about = ff.federate(dataset, ff.ByUser()).preprocessing["features"][0]
    for number, name in enumerate(dataset.group_names):
        own = {np.float32((float(x) - about["centre"]) / about["scale"]) for x, _, who in raw if who == name}
        assert set(dataset.test[0][dataset.test_groups == number, 0].numpy()) <= own
    # dealt out in another way, the groups are still there
    other = ff.train(ff.federate(dataset, ff.IID(), clients=4), "mlp", rounds=1)
    assert set(other.history[0]["accuracy_by_group"]) == {"c0", "c1", "c2"}


@pytest.mark.parametrize(("clients", "recorded"), [(100, True), (101, False)])
def test_many_groups_are_not_recorded(clients: int, recorded: bool, tmp_path: Path):
    dataset = ff.read_table(table(tmp_path / "t.csv", clients), "y", client="who")
    (row,) = ff.train(ff.federate(dataset, ff.ByUser()), "mlp", rounds=1).history
    assert (row["accuracy_by_group"] is not None) == recorded
    assert row["accuracy"] is not None


def test_without_groups_or_classes_nothing_is_recorded():
    x, y = torch.randn(12, 3), torch.arange(12) % 2
    dataset = ff.from_torch(TensorDataset(x, y), TensorDataset(x, y), groups=list("abab" * 3))
    (row,) = ff.train(ff.federate(dataset, ff.ByUser()), "mlp", rounds=1).history
    assert row["accuracy_by_group"] is None
    numbers = ff.Federation([(x, x)], test=(x, x))
    numbers.set_test_groups(np.arange(12) % 2, ("even", "odd"))
    (row,) = ff.train(numbers, nn.Linear(3, 3), rounds=1, loss=nn.functional.mse_loss).history
    assert row["accuracy_by_group"] is None
    with pytest.raises(ff.FedflatError, match="11 groups for 12 test samples"):
        numbers.set_test_groups(np.zeros(11, dtype=int), ("one",))


def test_the_servers_own_test_set_keeps_its_groups():
    held = federation()
    roster = RemoteFederation(4, (6,), 3, None, held)
    assert roster.test_group_names == held.test_group_names
    model = FlatModel(nn.Linear(6, 3))
    scores = [evaluate(model, None, data.test, nn.functional.cross_entropy) for data in (held, roster)]
    assert scores[0]["accuracy_by_group"] == scores[1]["accuracy_by_group"] is not None


# -- FedWMSAM, Table 2 -----------------------------------------------------------------------------

DOMAIN_OF = {"art": "Art", "clipart": "Clipart", "product": "Product", "real-world": "Real World"}


def test_every_column_is_a_domain():
    cells = find_preset("fedwmsam/table2").cells()
    assert {cell.column: cell.statistic["group"] for cell in cells} == DOMAIN_OF
    assert set(DOMAIN_OF.values()) == set(OFFICE_DOMAINS)
    made_up = stand_in("office-home", 40, 12)
    assert set(made_up.group_names) == set(OFFICE_DOMAINS)
    assert np.bincount(made_up.test_groups).tolist() == [3, 3, 3, 3]
    rows = [
        {"index": n, "accuracy": 0.5, "accuracy_by_group": {"Art": art, "Clipart": 0.1}}
        for n, art in enumerate([0.2, 0.9, 0.4])
    ]
    (art,) = [cell for cell in cells if (cell.row, cell.column) == ("FedAvg", "art")]
    assert statistic(art, rows)[:2] == (0.9, "maximum, Art")
    assert statistic(art, [{"index": 0, "accuracy": 0.5}]).value is None


@pytest.mark.slow
def test_reproduce_gives_every_domain_its_number(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)
    arguments = ["fedflat", "reproduce", "fedwmsam/table2", "--rows", "FedAvg", "--scale", "small"]
    monkeypatch.setattr("sys.argv", [*arguments, "--out", "here"])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code in (0, None)
    shown = capsys.readouterr().out
    assert re.search(r"FedAvg +art +maximum, Art", shown)
    results = json.loads((tmp_path / "here" / "comparison.json").read_text())
    rows = read_metrics(tmp_path / "here" / "fedavg" / "art" / "seed-0")
    tested = [row["accuracy_by_group"] for row in rows if row["accuracy_by_group"]]
    for result in results:
        assert result["ours"] == max(found[DOMAIN_OF[result["column"]]] for found in tested)
    assert len(results) == 4


def ended(out: Path, accuracy: float) -> None:
    out.mkdir(parents=True)
    row = {"index": 0, "accuracy": accuracy, "accuracy_by_group": dict.fromkeys(OFFICE_DOMAINS, accuracy)}
    (out / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (out / "run.json").write_text(json.dumps({"format": 1, "rounds": 1, "finished": "today"}))


@pytest.mark.parametrize(
    ("key", "model"),
    [("fedwmsam/table2", "resnet50-bn:weights.pth"), ("fednsam/table3", "swin-s:weights.pth")],
)
def test_a_model_that_should_start_from_weights_and_does_not_is_told(key: str, model: str, tmp_path: Path):
    preset = find_preset(key)
    cells = preset.cells()[:1]
    assert cells[0].weights == preset.weights
    assert ":FILE" in preset.weights
    for settings, told in (({}, True), ({"model": model}, False)):
        plans = plan_runs(cells, tmp_path / str(told), "full", [0], settings)
        for _, runs in plans:
            ended(runs[0].out, 0.5)
        (result,) = tabulate(plans)
        assert result["ours"] == (0.5 if key == "fedwmsam/table2" else 50)
        assert ("random weights" in result["ours_note"]) == told


def test_presets_that_need_weights_are_those_whose_notes_say_so():
    needing = {preset.key for preset in presets() if preset.weights}
    assert needing == {
        preset.key
        for preset in presets()
        if any("trained weights" in n or "trained on ImageNet" in n for n in preset.notes)
    }


def test_reproduce_says_that_weights_are_missing(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    preset = find_preset("fedwmsam/table2")
    chosen = [cell for cell in preset.cells() if cell.row == "FedAvg"]
    for _, (run,) in plan_runs(chosen, Path("runs/fedwmsam/table2"), "full", [0], {})[:1]:
        ended(run.out, 0.75)
    monkeypatch.setattr("fedflat.experiments.sweep.run_cells", lambda *_: {})
    monkeypatch.setattr("sys.argv", ["fedflat", "reproduce", "fedwmsam/table2", "--rows", "FedAvg"])
    with pytest.raises(SystemExit):
        main()
    shown = " ".join(capsys.readouterr().out.split())
    assert "0.75 (random weights)" in shown
    assert "does not start from given weights" in shown
    assert "--set model=resnet50-bn:FILE" in shown
    kept = json.loads((tmp_path / "runs" / "fedwmsam" / "table2" / "comparison.json").read_text())
    assert all("random weights" in result["ours_note"] for result in kept)
