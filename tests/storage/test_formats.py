"""Run directories of other versions: one sentence and exit code 2, and nothing on disk is changed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import fedflat as ff
from fedflat.cli import main
from fedflat.storage import formats
from fedflat.storage.checkpoint import read_checkpoint, write_checkpoint
from fedflat.storage.vector_table import Table

SETTINGS = ("--clients", "6", "--participation", "3", "--epochs", "1", "-m", "scaffold")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two rounds, as this version leaves it."""
    out: Path = tmp_path_factory.mktemp("runs") / "now"
    with pytest.MonkeyPatch.context() as patch:
        assert call(patch, "run", *SETTINGS, "--rounds", "2", "--out", str(out)) == 0
    return out


def call(patch: pytest.MonkeyPatch, *arguments: str) -> Any:
    patch.setattr(sys, "argv", ["fedflat", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    copy = tmp_path / "run"
    for file in [path for path in finished.rglob("*") if path.is_file()]:
        place = copy / file.relative_to(finished)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read_bytes())
    return copy


def settings(run: Path, **changes: Any) -> None:
    """Other values in run.json; None takes a key away."""
    about = {**json.loads((run / "run.json").read_text()), **changes}
    (run / "run.json").write_text(json.dumps({k: v for k, v in about.items() if v is not None}))


def on_disk(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}


def test_a_run_says_its_version_everywhere(finished: Path):
    about = json.loads((finished / "run.json").read_text())
    assert about["format"] == formats.RUN
    assert about["environment"]["fedflat"] == ff.__version__
    (checkpoint,) = (finished / "checkpoints").glob("*.safetensors")
    with safe_open(checkpoint, framework="pt") as file:
        assert file.metadata()["format"] == formats.CHECKPOINT
    assert json.loads(next((finished / "state").rglob("*.table")).read_bytes().split(b"\n")[0])["format"] == 1


OTHERS = [
    (
        {"format": 2, "environment": {"fedflat": "7.1"}},
        "newer version of fedflat, 7.1: it has format 2",
        False,
    ),
    ({"format": 99, "environment": None}, "newer version of fedflat: it has format 99", False),
    (
        {"format": 0, "environment": {"fedflat": "0.0.1"}},
        "older version of fedflat, 0.0.1: it has format 0",
        True,
    ),
    ({"format": None}, "run.json does not say which format the run has", True),
    ({"format": "first"}, "run.json does not say which format the run has", True),
]


@pytest.mark.parametrize(("changes", "says", "readable"), OTHERS)
def test_another_version_is_not_gone_on_with(
    changes: dict[str, Any], says: str, readable: bool, run: Path, monkeypatch, capsys
):
    settings(run, **changes)
    before = on_disk(run)
    assert call(monkeypatch, "resume", str(run), "--rounds", "3") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert says in told and told.count("Error:") == 1
    federation = ff.federate("digits", "iid", 6)
    with pytest.raises(formats.OtherFormat, match=says):
        ff.train(federation, "mlp", "scaffold", rounds=3, out=run, resume=True)
    assert on_disk(run) == before
    code = call(monkeypatch, "compare", str(run))
    told = capsys.readouterr()
    assert code == (0 if readable else 2)
    assert ("scaffold" in told.out) if readable else ("newer version" in told.err)
    assert on_disk(run) == before


def test_keys_that_only_a_newer_version_knows_are_not_what_is_complained_about(
    run: Path, monkeypatch, capsys
):
    settings(run, format=2)
    with (run / "experiment.yaml").open("a") as file:
        file.write("invented_later: 3\n")
    assert call(monkeypatch, "resume", str(run)) == 2
    assert "newer version of fedflat" in capsys.readouterr().err


def test_a_checkpoint_of_another_version_is_no_damage(run: Path, monkeypatch, capsys):
    """It must not be passed over for an older one, nor be advised to remove."""
    (path,) = (run / "checkpoints").glob("*.safetensors")
    vectors, numbers = read_checkpoint(path)
    monkeypatch.setattr("fedflat.storage.checkpoint.CHECKPOINT", "2")
    write_checkpoint(path.with_name("round-0000003.safetensors"), vectors, {**numbers, "rounds done": 3})
    monkeypatch.setattr("fedflat.storage.checkpoint.CHECKPOINT", "1")
    before = on_disk(run)
    assert call(monkeypatch, "resume", str(run), "--rounds", "5") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "round-0000003.safetensors was written by another version of fedflat: it has format 2" in told
    assert "Remove" not in told
    assert on_disk(run) == before


def test_a_table_of_another_version_is_no_damage(run: Path, monkeypatch):
    path = next((run / "state" / "clients").glob("*.table"))
    monkeypatch.setattr("fedflat.storage.vector_table.TABLE", 2)
    with pytest.raises(formats.OtherFormat, match="it has format 1, and this version knows 2"):
        Table.read(path)


def test_metrics_and_model_are_plain_files(run: Path):
    """What docs/experiments.md promises of every version: JSON lines and safetensors, without fedflat."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1]
    weights = safetensors.torch.load_file(run / "model.safetensors")
    assert (
        sum(value.numel() for value in weights.values())
        == json.loads((run / "run.json").read_text())["parameters"]
    )


def test_a_run_that_failed_in_its_first_round_can_be_begun_again(tmp_path: Path):
    """There is nothing to lose; one that has a round is kept."""
    out, federation = tmp_path / "run", ff.federate("digits", "iid", 4)
    with pytest.raises(ff.FedflatError, match="shapes"):
        ff.train(federation, torch.nn.Linear(3, 2), rounds=1, out=out)
    assert ff.train(federation, "mlp", rounds=1, out=out).history
    with pytest.raises(
        ff.FedflatError, match=r"already holds a run. Resume it \(train\(\.\.\., resume=True\)\)"
    ):
        ff.train(federation, "mlp", rounds=1, out=out)
