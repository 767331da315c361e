"""What is said of a real federation's run, whose data is on its nodes: by its directory, and by every command."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import fedflat as ff
from fedflat.cli import main
from fedflat.engines.flower.client import client_app
from fedflat.engines.flower.limits import Limits
from fedflat.engines.flower.localgrid import LocalGrid
from fedflat.engines.flower.server import serve
from fedflat.experiments.files import load_experiment
from fedflat.experiments.schema import Experiment
from fedflat.figures import learning_curves, sensitivity
from fedflat.report.content import Content
from fedflat.storage.metrics_file import read_metrics

CLIENTS, ROUNDS = 3, 3
QUICK = Limits(deadline=30, connect=2, poll=0.01)
EXPERIMENT = Experiment.model_validate(
    {
        "clients": CLIENTS,
        "model": "mlp",
        "method": "scaffold",
        "local": {"lr": 0.05, "epochs": 2, "batch_size": 20},
        "participation": "everyone",
        "rounds": ROUNDS,
    }
)
Fedflat = Callable[..., tuple[int, str]]


def clinic(number: int) -> ff.Federation:
    """The patients of a clinic: some to train on, some to test on."""
    rng = torch.Generator().manual_seed(number)
    inputs = torch.randn(40 + 10 * number, 3, generator=rng) + 0.3 * number
    targets = (inputs.sum(1) + 0.3 * torch.randn(len(inputs), generator=rng) > 0).long()
    return ff.Federation([(inputs[15:], targets[15:])], test=(inputs[:15], targets[:15]), classes=2)


def grid(home: Path, **more: Any) -> LocalGrid:
    app = client_app(lambda node: clinic(node["partition-id"]), **more)
    return LocalGrid(app, [{"partition-id": n, "state-dir": str(home)} for n in range(CLIENTS)])


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A run as this version leaves it, and the same as the versions before left it."""
    home = tmp_path_factory.mktemp("federation")
    serve(grid(home / "nodes"), EXPERIMENT, home / "clinics", QUICK)
    old = home / "old" / "clinics"
    shutil.copytree(home / "clinics", old)
    (old / "experiment.yaml").write_text(
        yaml.safe_dump(EXPERIMENT.with_defaults().to_dict(), sort_keys=False)
    )
    about = json.loads((old / "run.json").read_text())
    about["federation"] = {"name": "elsewhere", "clients": CLIENTS}
    (old / "run.json").write_text(json.dumps(about))
    return home


@pytest.fixture(params=["clinics", "old/clinics"])
def run(request, home: Path, tmp_path: Path) -> Path:
    """Either of them, to spoil."""
    shutil.copytree(home / request.param, tmp_path / "clinics")
    return tmp_path / "clinics"


@pytest.fixture(scope="module")
def accuracies() -> list[list[float]]:
    """Accuracy in every clinic of the models after one and two rounds, found by training in one process."""
    everyone = ff.Federation([clinic(n).client(0).stored() for n in range(CLIENTS)], classes=2)
    found = []
    for rounds in range(1, ROUNDS):
        local = ff.LocalSGD(lr=0.05, epochs=2, batch_size=20)
        model = ff.train(everyone, "mlp", "scaffold", local=local, rounds=rounds).model
        tests = [clinic(n).test.stored() for n in range(CLIENTS)]
        found.append([float((model(x).argmax(1) == y).double().mean()) for x, y in tests])
    return found


def mean(values: list[float]) -> float:
    """Clinics test on equally many patients."""
    return sum(values) / len(values)


@pytest.fixture
def fedflat(monkeypatch, capsys) -> Fedflat:
    """The command line: exit code, and what it said, as one line."""

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fedflat", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "160")
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return int(end.value.code or 0), " ".join((said.out + said.err).split())

    return call


# -- the directory ---------------------------------------------------------------------------------


def test_the_directory_says_that_the_data_is_on_the_nodes(home: Path):
    content = yaml.safe_load((home / "clinics" / "experiment.yaml").read_text())
    assert content["dataset"] == "on-nodes"
    assert not {"partition", "data", "download", "stand_in", "target", "augment"} & set(content)
    assert (content["model"], content["clients"], content["rounds"]) == ("mlp", CLIENTS, ROUNDS)
    about = json.loads((home / "clinics" / "run.json").read_text())["federation"]
    assert about.pop("fingerprint")  # of what the server itself has
    assert about == {
        "name": "elsewhere",
        "clients": CLIENTS,
        "data": "on the nodes",
        "shape": [3],
        "classes": 2,
        "test_samples": 0,
    }


def test_a_model_of_the_app_s_own_is_not_called_by_another_name(tmp_path: Path):
    def make(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(shape[0], classes))

    one = EXPERIMENT.model_copy(update={"rounds": 1})
    serve(
        grid(tmp_path / "nodes", model=make), one, tmp_path / "run", QUICK, model=make, test=lambda: clinic(7)
    )
    assert "model" not in yaml.safe_load((tmp_path / "run" / "experiment.yaml").read_text())
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (about["model"], about["federation"]["test_samples"]) == ("Sequential", 15)
    assert Content([tmp_path / "run"]).page()["runs"][0]["config"]["model"] == "Sequential"
    with pytest.raises(ff.FedflatError, match="its Flower app made the model"):
        ff.load_run(tmp_path / "run", clinic(7))


def test_the_app_goes_on_with_it_and_with_one_of_an_older_version(run: Path, home: Path, tmp_path: Path):
    """From the experiment that the directory itself holds, with one round more."""
    longer = EXPERIMENT.model_copy(update={"rounds": ROUNDS + 1})
    whole = serve(grid(tmp_path / "other nodes"), longer, tmp_path / "whole", QUICK)
    shutil.copytree(home / "nodes", tmp_path / "nodes")
    again = load_experiment(run / "experiment.yaml", {"rounds": ROUNDS + 1})
    on = serve(grid(tmp_path / "nodes"), again, run, QUICK)
    assert on.server.w.equal(whole.server.w)
    assert yaml.safe_load((run / "experiment.yaml").read_text())["dataset"] == "on-nodes"


# -- what the clients reported ---------------------------------------------------------------------


def test_compare_shows_what_clients_reported(run: Path, fedflat: Fedflat, accuracies, tmp_path: Path):
    code, said = fedflat("compare", run, "--out", tmp_path / "table.csv", "--target", mean(accuracies[0]))
    assert code == 0, said
    assert "accuracy reported by clients" in said and "–" not in said.split("scaffold")[1].split("±")[0]
    head, row = ((tmp_path / "table.csv").read_text().splitlines()[n] for n in (0, 1))
    assert "accuracy reported by clients, last 10" in head
    both = [mean(each) for each in accuracies]
    cells = row.split(",")
    assert cells[:4] == ["scaffold", "1", str(ROUNDS), f"{100 * mean(both):.2f}"]
    assert cells[5:8] == [
        f"{100 * max(both):.2f}",
        f"{100 * min(accuracies[-1]):.2f}",
        "1",
    ]  # after one round
    assert cells[-1] == "1/1"


def test_a_server_s_own_tests_come_first_and_are_not_mixed_up_with_reports(
    home: Path, fedflat: Fedflat, tmp_path
):
    place = tmp_path / "tested"
    serve(grid(tmp_path / "nodes"), EXPERIMENT, place, QUICK, test=lambda: clinic(7))
    last = read_metrics(place)[-1]["accuracy"]
    code, said = fedflat("compare", place, "--last", 1)
    assert code == 0 and f"{100 * last:.2f}" in said
    assert "reported" not in said
    code, said = fedflat("compare", place, home / "clinics", "--out", tmp_path / "table.csv")
    assert "reported by clients" in said
    head, *rows = (tmp_path / "table.csv").read_text().splitlines()
    assert "reported" not in head
    assert ["reported by clients" in row for row in rows] == [False, True]
    figure = learning_curves([place, home / "clinics"])
    (axes,) = figure.axes
    assert axes.get_ylabel() == "accuracy (%)"
    assert ["reported by clients" in line.get_label() for line in axes.get_lines()] == [False, True]


def test_curves_are_of_what_clients_reported(run: Path, fedflat: Fedflat, accuracies, tmp_path: Path):
    code, said = fedflat("figure", "curves", run, "-o", tmp_path / "curves.png")
    assert code == 0, said
    (axes,) = learning_curves(run).axes
    assert axes.get_ylabel() == "accuracy reported by clients (%)"
    (line,) = axes.get_lines()
    assert line.get_xdata().tolist() == [1, 2]  # a report is on the model that the round before ended with
    assert line.get_ydata().tolist() == pytest.approx([100 * mean(each) for each in accuracies])
    (axes,) = learning_curves(run, "worst_decile").axes
    assert axes.get_lines()[0].get_ydata().tolist() == pytest.approx([100 * min(each) for each in accuracies])
    assert learning_curves(run, "loss").axes[0].get_ylabel() == "loss reported by clients"
    (axes,) = sensitivity(run, "local.lr").axes
    assert axes.get_ylabel() == "accuracy reported by clients, last 10 (%)"


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 5, 7])
def test_ticks_of_few_rounds_are_distinct_whole_numbers(rounds: int):
    figure = learning_curves({"FedAvg": [{"index": n, "accuracy": 0.5 + n / 99} for n in range(rounds)]})
    figure.canvas.draw()
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    ticks = [t.get_text() for t in axes.get_xticklabels() if low <= t.get_position()[0] <= high]
    assert ticks and ticks == [str(int(text)) for text in ticks] and len(set(ticks)) == len(ticks)


def test_where_clients_do_not_report_nothing_is_made_up(fedflat: Fedflat, tmp_path: Path):
    place = tmp_path / "silent"
    serve(grid(tmp_path / "nodes"), EXPERIMENT.model_copy(update={"rounds": 2}), place, QUICK, report=False)
    code, said = fedflat("compare", place)
    assert code == 0 and "reported by clients" not in said
    code, said = fedflat("figure", "curves", place, "-o", tmp_path / "curves.png")
    assert code == 2 and "no round has been tested" in said
    assert "No round was tested" in str(Content([place]).page()["runs"][0]["notes"])


# -- the report ------------------------------------------------------------------------------------


def test_the_report_is_about_the_federation_and_not_about_digits(
    run: Path, fedflat: Fedflat, accuracies, tmp_path
):
    code, said = fedflat("report", run, "-o", tmp_path / "report.html")
    assert code == 0, said
    assert "note on what is missing" not in said
    page = Content([run]).page()
    (shown,), (split,) = page["runs"], page["splits"]
    assert shown["notes"] == []
    assert shown["tested_by_clients"] is True
    assert shown["series"]["accuracy"] == [
        *(pytest.approx(mean(each), abs=1e-4) for each in accuracies),
        None,
    ]
    assert shown["summary"]["accuracy"] == pytest.approx(mean(accuracies[-1]), abs=1e-4)
    assert shown["config"]["dataset"] == "on-nodes"
    assert "counts" not in split and "on the clients' own nodes" in split["missing"]
    assert (
        f"{CLIENTS} clients" in split["missing"] and "45 samples that 3 clients tested on" in split["missing"]
    )
    assert "digits" not in json.dumps(page) and "dirichlet" not in json.dumps(page)
    (command,) = shown["repeat"]["commands"]
    assert command["command"] == """flwr run . federation --stream --run-config 'out="clinics-again"'"""
    assert yaml.safe_load(shown["repeat"]["experiment"])["dataset"] == "on-nodes"


def test_the_report_of_an_unfinished_run_says_how_to_go_on(run: Path):
    unfinish(run)
    (shown,) = Content([run]).page()["runs"]
    assert shown["repeat"]["commands"][0]["command"] == "flwr run . federation --stream"
    assert "fedflat" not in json.dumps(shown["repeat"]["commands"])


def unfinish(run: Path) -> None:
    """As if the server had stopped after two rounds."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    (run / "checkpoints" / f"round-{ROUNDS:07d}.safetensors").unlink()
    (run / "model.safetensors").unlink()
    about = json.loads((run / "run.json").read_text())
    del about["finished"]
    (run / "run.json").write_text(json.dumps(about))


# -- what takes data -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    ["flatness", "landscape", "figure partition", "figure embedding", "figure radius", "figure surface"],
)
def test_what_takes_data_says_in_a_sentence_that_it_cannot(
    command: str, run: Path, fedflat: Fedflat, tmp_path: Path
):
    out = ("-o", tmp_path / "figure.png") if command.startswith("figure") else ()
    code, said = fedflat(*command.split(), run, *out)
    assert code == 2
    assert said.count("Error") == 1
    assert re.search(r"[Tt]he data .*is on the clients' own nodes", said)
    assert ("`flwr run" if "partition" in command else f"ff.load_run('{run}', ") in said
    assert said.endswith(".")


def test_a_model_is_measured_on_data_that_a_person_gives(run: Path):
    own = clinic(5)
    everyone = ff.Federation([clinic(n).client(0).stored() for n in range(CLIENTS)], classes=2)
    local = ff.LocalSGD(lr=0.05, epochs=2, batch_size=20)
    model = ff.train(everyone, "mlp", "scaffold", local=local, rounds=ROUNDS).model
    trained = ff.load_run(run, own)
    assert trained.round == ROUNDS
    assert ff.sharpness(trained.model, own) == pytest.approx(ff.sharpness(model, own))
    wrong = ff.Federation([(torch.randn(9, 4), torch.zeros(9, dtype=torch.int64))], classes=2)
    with pytest.raises(ff.FedflatError, match=r"do not fit .*: .*size mismatch"):
        ff.load_run(run, wrong)


# -- going on, and again ---------------------------------------------------------------------------


def test_resume_says_who_goes_on(run: Path, fedflat: Fedflat):
    code, said = fedflat("resume", run)
    assert code == 0 and "is done" in said
    code, said = fedflat("resume", run, "--rounds", ROUNDS + 2)
    assert code == 2 and "`flwr run . federation --stream`" in said and f"rounds: {ROUNDS + 2}" in said
    unfinish(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, said = fedflat("resume", run)
    assert code == 2 and "`flwr run . federation --stream`" in said and "digits" not in said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_its_experiment_cannot_be_simulated(home: Path, fedflat: Fedflat, tmp_path: Path):
    file = home / "clinics" / "experiment.yaml"
    code, said = fedflat("run", file, "--out", tmp_path / "again")
    assert code == 2 and "`flwr run . federation --stream`" in said
    assert not (tmp_path / "again").exists()
