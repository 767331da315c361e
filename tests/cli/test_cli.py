"""The command line, as a person uses it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fedflat as ff

Fedflat = Callable[..., tuple[int, str, str]]
QUICK = ("--rounds", "2", "--epochs", "1")


def test_help_does_not_import_torch():
    code = (
        "import sys; sys.argv = ['fedflat', '--help']\n"
        "from fedflat.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "False", result.stderr
    assert "methods" in result.stdout


def test_demo_compares_three_methods():
    """In a process of its own, as a person starts it."""
    command = [sys.executable, "-m", "fedflat", "run", *QUICK]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    table = [line.split() for line in result.stdout.splitlines()]
    rows = {line[0]: line for line in table if line and line[0] in {"FedGMT", "FedAvg", "FedSAM"}}
    # 2 rounds x 5 clients x 4 steps; FedGMT 2 forward passes, FedSAM 2 of both
    assert [rows[name][4] for name in ("FedGMT", "FedAvg", "FedSAM")] == ["80/40", "40/40", "80/80"]
    assert "round 2/2" in result.stdout
    assert "Where to go next" in result.stdout


def test_a_composition_and_every_option(fedflat: Fedflat, tmp_path: Path):
    out = tmp_path / "run"
    code, _, errors = fedflat(
        "run", "--method", "local-ascent(rho=0.05) + control-variates", "--dataset", "digits", "--model", "mlp",
        "--partition", "pathological:2", "--clients", "8", "--participation", "3", "--rounds", "3", "--lr", "0.02",
        "--lr-decay", "0.9", "--momentum", "0.5", "--weight-decay", "1e-4", "--clip-norm", "5", "--steps", "4",
        "--batch-size", "16", "--weighting", "uniform", "--evaluate", "average", "--eval-every", "2",
        "--on-bad-upload", "stop", "--seed", "3", "--engine", "inprocess", "--out", out,
    )  # fmt: skip
    assert code == 0, errors
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["steps"] for row in rows] == [12, 12, 12]
    assert [row["lr"] for row in rows] == pytest.approx([0.02, 0.018, 0.0162])
    assert [row["accuracy"] is None for row in rows] == [True, False, False]
    assert all(row["forward"] == 2 * row["steps"] and row["vectors_up"] == 6 for row in rows)
    settings = json.loads((out / "run.json").read_text())
    assert settings["mechanisms"] == "local-ascent + control-variates"
    assert (out / "model.safetensors").stat().st_size > 1000


def test_several_methods_write_several_directories(fedflat: Fedflat, tmp_path: Path):
    code, _, errors = fedflat(
        "run", "-m", "fedavg", "-m", "fedsam(rho=0.1)", *QUICK, "--out", tmp_path / "all"
    )
    assert code == 0, errors
    assert sorted(p.name for p in (tmp_path / "all").iterdir()) == ["fedavg", "fedsam"]


def test_methods_table_lists_all_with_their_cost(fedflat: Fedflat):
    _, told, _ = fedflat("methods")
    rows = {line.split()[0]: line.split() for line in told.splitlines() if line.split()}
    assert rows["fedsmoo"][1:4] == ["2", "2", "2/2"]
    assert rows["fednsam-s"][1:4] == ["3", "2", "1/1"]
    assert rows["fedwmsam"][1:6] == ["2", "+", "alpha", "1", "1/1"]
    assert {name.replace("_", "-") for name in ff.METHODS} <= set(rows)


def test_one_method_in_detail(fedflat: Fedflat):
    _, told, _ = fedflat("methods", "fedgmt-v2")
    assert "own-trajectory-loss + dual-correction" in told
    assert "2 forward and 1 backward" in told


def test_mechanisms_are_listed_with_parameters(fedflat: Fedflat):
    _, told, _ = fedflat("mechanisms")
    assert "history-ascent(rho=0.05, source='history')" in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--method", "fedgmtt"], "Did you mean 'fedgmt'?"),
        (["--method", "fedsam(roh=0.1)"], "Did you mean 'rho'?"),
        (["--method", "fedsam(rho=-1)"], "rho must be at least 0, not -1"),
        (["--method", "fedsam(0.1)"], "by name"),
        (["--method", "momentum-ascent"], "Add look-ahead-momentum or nesterov-momentum or server-momentum"),
        (["--dataset", "digit"], "Did you mean 'digits'?"),
        (["--partition", "dirichlet"], "dirichlet:0.1"),
        (["--partition", "dirichlet:-1"], "alpha must be"),
        (["--partition", "diriclet:1"], "Did you mean 'dirichlet'?"),
        (["--model", "mlpp"], "Did you mean 'mlp'?"),
        (["--engine", "inproces"], "Did you mean 'inprocess'?"),
        (["--participation", "21"], "of 20 clients"),
        (["--clients", "5000"], "fewer clients"),
        (["--lr", "0"], "lr must be above 0"),
        (["--epochs", "1", "--steps", "2"], "epochs or steps, not both"),
        (["--weighting", "sample"], "Did you mean 'samples'?"),
        (["--out", "/proc/nowhere"], "Choose another directory"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(arguments: list[str], says: str, fedflat: Fedflat):
    code, _, told = fedflat("run", "--rounds", "1", *arguments)
    assert code == 2
    assert says in told
    assert len(told.strip().splitlines()) == 1


def test_a_run_is_never_overwritten(fedflat: Fedflat, tmp_path: Path):
    arguments = ("run", "-m", "fedavg", *QUICK, "--out", tmp_path / "a")
    assert fedflat(*arguments)[0] == 0
    before = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    code, _, errors = fedflat(*arguments)
    assert code == 2
    assert "already holds a run" in errors
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == before
