"""The commands that `fedflat reproduce` prints under a figure: every one runs and draws what it says."""

import json
import shlex
import shutil
import sys
from glob import glob
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from synthetic_runs import made_run

from fedflat import figures
from fedflat.cli import main
from fedflat.cli.papers import drawing
from fedflat.errors import FedflatError
from fedflat.experiments.files import make_experiment
from fedflat.experiments.presets import find_preset, presets
from fedflat.experiments.reproduce import plan_runs
from fedflat.experiments.run import run_experiment
from fedflat.experiments.run_trajectory import paths_of
from fedflat.methods.text import as_method
from fedflat.server.server import Server
from fedflat.storage.client_store import ClientStore

FIGURES = [preset.key for preset in presets() if preset.name.startswith("figure")]
FIRST = {key.partition("/")[0]: key for key in reversed(FIGURES)}.values()
"""of each paper"""
OF_MODELS = ("landscape", "flatness", "embedding", "trajectory")
"""Commands that need a trained model."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of FedGMT on a small table, with its states."""
    place = tmp_path_factory.mktemp("trained")
    rng = np.random.default_rng(0)
    kinds = np.arange(120) % 3
    table = np.column_stack([rng.normal(size=(120, 4)) + kinds[:, None], kinds])
    lines = ["a,b,c,d,kind", *(",".join(f"{value:g}" for value in row) for row in table)]
    (place / "table.csv").write_text("\n".join(lines))
    experiment = {
        "dataset": str(place / "table.csv"),
        "target": "kind",
        "partition": "dirichlet:1",
        "clients": 4,
        "model": "mlp",
        "local": {"lr": 0.1, "lr_decay": 0.5, "epochs": 1, "batch_size": 10},
        "participation": 4,
        "rounds": 2,
        "method": "fedgmt(alpha=0.95, beta=10, gamma=1, tau=3)",
    }
    run_experiment(make_experiment(experiment), out=place / "run")
    return place / "run"


def lay_out(planned, commands: list[str], trained: Path) -> None:
    """Runs where the reproduction would have put them: copies of a trained one, or made-up numbers."""
    if any(word in command for command in commands for word in OF_MODELS):
        for number, (cell, (run,)) in enumerate(planned):
            if run.out.exists():
                continue
            shutil.copytree(trained, run.out)
            settings = yaml.safe_load((run.out / "experiment.yaml").read_text())
            settings |= {"method": cell.content["method"], "partition": f"dirichlet:{number + 1}"}
            (run.out / "experiment.yaml").write_text(yaml.safe_dump(settings))
        return
    for cell, (run,) in planned:
        if run.out.exists():
            continue
        settings = run.experiment.to_dict()
        made_run(run.out, rounds=12, **{k: v for k, v in settings.items() if k != "rounds"})
        kept = Server(torch.zeros(3), as_method(cell.content["method"]), 4).scalars()
        measures = [m if isinstance(m, str) else next(iter(m)) for m in run.experiment.measure]
        rows = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            row |= {"scalars": kept, "measures": dict.fromkeys(measures, 1.0 + row["index"])}
        (run.out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def call(line: str, monkeypatch, capsys) -> str:
    """As a shell would: with patterns replaced by what they stand for."""
    words = [found for word in shlex.split(line) for found in (sorted(glob(word)) or [word])]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        main()
    told = capsys.readouterr()
    assert stop.value.code == 0, (line, told.out + told.err)
    return told.out


@pytest.mark.parametrize(
    ("key", "scale"),
    [
        *(pytest.param(key, "full", marks=() if key in FIRST else pytest.mark.slow) for key in FIGURES),
        ("fedgf/figure1", "small"),
    ],
)
def test_every_printed_command_draws(key, scale, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    preset = find_preset(key)
    planned = plan_runs(preset.cells(), Path("some runs"), scale, [0], {})
    commands = drawing(preset, Path("some runs"), planned)
    assert any(command.startswith("fedflat figure") for command in commands)
    lay_out(planned, commands, trained)
    for command in commands:
        call(command, monkeypatch, capsys)
    files = [shlex.split(command)[-1] for command in commands if command.startswith("fedflat figure")]
    assert len(set(files)) == len(files)
    for name in files:
        assert (tmp_path / name).stat().st_size > 5000


def drawn_by(command: str, monkeypatch, capsys):
    """The figure that a command saves."""
    seen = []
    monkeypatch.setattr(figures, "save", lambda figure, out: seen.append(figure) or out)
    call(command, monkeypatch, capsys)
    return seen[0]


def prepared(key: str, tmp_path, monkeypatch, trained) -> list[str]:
    tmp_path.mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    preset = find_preset(key)
    planned = plan_runs(preset.cells(), Path("runs"), "full", [0], {})
    commands = drawing(preset, Path("runs"), planned)
    lay_out(planned, commands, trained)
    return commands


def test_fedgf_figure_1_is_one_line_over_alpha(tmp_path, monkeypatch, capsys, trained):
    (command,) = prepared("fedgf/figure1", tmp_path, monkeypatch, trained)
    accuracy, discrepancy = drawn_by(command, monkeypatch, capsys).axes
    for panel in (accuracy, discrepancy):
        (line,) = panel.get_lines()
        assert len(line.get_xdata()) == 3
        assert [tick.get_text() for tick in panel.get_xticklabels()] == ["0", "0.5", "1000"]


def test_fedwmsam_figure_6_has_clients_and_rates(tmp_path, monkeypatch, capsys, trained):
    clients, rates = prepared("fedwmsam/figure6", tmp_path, monkeypatch, trained)
    for command, places in ((clients, [20, 50, 100]), (rates, [0.05, 0.1, 0.2, 0.4, 0.8, 1])):
        (panel,) = drawn_by(command, monkeypatch, capsys).axes
        assert len(panel.get_lines()) == 5
        assert all(list(line.get_xdata()) == places for line in panel.get_lines())


def test_fednsam_figure_7_has_training_and_test_loss(tmp_path, monkeypatch, capsys, trained):
    compute, draw = prepared("fednsam/figure7", tmp_path, monkeypatch, trained)
    call(compute, monkeypatch, capsys)
    titles = [panel.get_title() for panel in drawn_by(draw, monkeypatch, capsys).axes]
    assert sum("train" in title for title in titles) == sum("test" in title for title in titles) == 6


def test_fedwmsam_figure_9_is_one_minus_figure_7(tmp_path, monkeypatch, capsys, trained):
    drawn = []
    for number in (7, 9):
        (command,) = prepared(f"fedwmsam/figure{number}", tmp_path / str(number), monkeypatch, trained)
        history = next(Path("runs").rglob("metrics.jsonl"))
        rows = [json.loads(line) for line in history.read_text().splitlines()]
        for row in rows:
            row["scalars"] |= {"cosine": 0.05 * row["index"], "one-minus-cosine": 1 - 0.05 * row["index"]}
        history.write_text("".join(json.dumps(row) + "\n" for row in rows))
        panel, *_ = drawn_by(command, monkeypatch, capsys).axes
        drawn.append(panel.get_lines()[0].get_ydata())
    assert list(drawn[0]) == pytest.approx([0.05 * index for index in range(12)])
    assert list(drawn[0] + drawn[1]) == pytest.approx([1.0] * 12)


def test_learning_curves_have_a_file_for_every_dataset(tmp_path, monkeypatch, capsys, trained):
    commands = prepared("fedgmt/figure5", tmp_path, monkeypatch, trained)
    assert len(commands) == 4
    for command in commands:
        (panel,) = drawn_by(command, monkeypatch, capsys).axes
        assert len(panel.get_lines()) == 9


def test_paths_are_of_the_round_that_the_run_would_train_next(trained, tmp_path):
    """The run itself goes on by a round: the change of the client's dual, times −β, is where its training went."""
    before, paths = paths_of(trained, 2, ["fedgmt(beta=10)", "fedavg", "fedgmt(beta=None)"])
    assert before.round == 2
    assert all(torch.equal(path[0], before.model.vector) for path in paths.values())
    own, *others = (path[-1] for path in paths.values())
    shutil.copytree(trained, tmp_path / "on")
    settings = yaml.safe_load((trained / "experiment.yaml").read_text()) | {"rounds": 3}
    run = run_experiment(make_experiment(settings), out=tmp_path / "on", resume=True)
    old = ClientStore(trained / "state" / "clients", name="round-0000002").get(2)["dual"]
    end = before.model.vector + 10 * (old - run.clients.get(2)["dual"])
    torch.testing.assert_close(own, end, rtol=0, atol=2e-6)
    assert all((end - other).abs().max() > 1e-4 for other in others)


def test_a_run_without_its_states_has_no_next_round(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(FedflatError, match="--keep-states"):
        paths_of(tmp_path / "run", 0, ["fedavg"])
    with pytest.raises(FedflatError, match="has 4, counted from 0"):
        paths_of(trained, 4, ["fedavg"])
