"""Every page in docs runs as printed, block after block, and what it promises comes true."""

import ast
import builtins
import json
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import fedflat as ff
from fedflat.cli import main
from fedflat.experiments.measure_run import read_flatness, read_landscape
from fedflat.storage.metrics_file import read_metrics

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md"))
LONG = ("figures.md", "ray.md")
"""Pages that draw every kind of figure, and that start a cluster of their own."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.DOTALL | re.MULTILINE
    )


COMMANDS_BETWEEN = ("using-a-model.md",)
"""Pages whose Python needs what their commands have made."""


def steps(page: str) -> list[tuple[str, str]]:
    """What is run of a page, in order: its Python, and where that needs them its commands."""
    languages = "python|sh" if page in COMMANDS_BETWEEN else "python"
    text = (DOCS / page).read_text("utf-8")
    return re.findall(rf"^```({languages})\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run_commands(block: str) -> None:
    for line in block.splitlines():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", shlex.split(line))
            with pytest.raises(SystemExit) as stop:
                main()
        assert stop.value.code == 0, line


@pytest.fixture(scope="module")
def run_page(tmp_path_factory) -> Any:
    """Run a page's Python blocks in order in one namespace and a folder of their own; each page only once."""
    namespaces: dict[str, dict[str, Any]] = {}

    def run(page: str) -> dict[str, Any]:
        if page not in namespaces:
            place = tmp_path_factory.mktemp("tutorial")
            names: dict[str, Any] = {"__name__": page, "__file__": str(place / page)}
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(place)
                patch.setattr(tempfile, "tempdir", str(place))
                for number, (language, block) in enumerate(steps(page), start=1):
                    if language == "python":
                        exec(compile(block, f"{page}, block {number}", "exec"), names)
                    else:
                        run_commands(block)
            namespaces[page] = names
        return namespaces[page]

    return run


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if page in LONG else ()) for page in PAGES]
)
def test_a_page_runs_and_its_runs_learn(page: str, run_page):
    runs = [value for value in run_page(page).values() if isinstance(value, ff.Run)]
    for run in runs:
        losses = [row["train_loss"] for row in run.history]
        assert len(losses) == 1 or losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("name", "clients", "classes"),
    [("iris_run", 3, 2), ("tone_run", 12, 3), ("window_run", 6, 3), ("bread_run", 4, 3)],
)
def test_own_data_is_learned(name: str, clients: int, classes: int, run_page):
    run = run_page("own-data.md")[name]
    assert run.accuracy > 0.85
    assert max(client for row in run.history for client in row["clients"]) < clients
    assert list(run.model.parameters())[-1].shape == (classes,)


def test_own_data_says_what_is_so(run_page):
    names = run_page("own-data.md")
    assert names["windows"].class_names == ("night", "rain", "sun")
    assert (len(names["windows"].train[1]), len(names["windows"].test[1])) == (144, 36)
    assert names["bread"].class_names == ("burnt", "golden", "pale")
    assert names["bread"].group_names == ("Adele", "Brigitte", "Carl", "Dora")
    assert names["bread"].train[0].shape == (384, 4)
    assert names["bread"].note == "3 classes from minutes, degrees, weather (categorical)"
    shown, found = json.loads(blocks("own-data.md", "json")[0]), names["federation"].preprocessing
    assert [f["name"] for f in shown["features"]] == [f["name"] for f in found["features"]]
    for mine, theirs in zip(shown.pop("features"), found["features"], strict=True):
        assert (mine.get("centre"), mine.get("scale")) == pytest.approx(
            (theirs.get("centre"), theirs.get("scale"))
        )
        assert mine.get("levels") == theirs.get("levels")
    assert shown == {key: value for key, value in found.items() if key != "features"}
    book = names["book"].read_text()
    seen = {bakery: set(re.findall(rf"{bakery}.*,(\w+)", book)) for bakery in names["bread"].group_names}
    assert seen["Adele"] == {"pale", "golden"}
    assert seen["Brigitte"] == {"golden", "burnt"}
    lonely = ff.federate(names["tones"], ff.Pathological(1), clients=12)
    assert all(len(lonely.client(listener).stored()[1].unique()) == 1 for listener in range(12))
    untested = ff.train(ff.Federation(names["gardens"]), "mlp", rounds=1)
    assert untested.accuracy is None


def test_using_a_model_says_what_is_so(run_page):
    names = run_page("using-a-model.md")
    place = Path(names["__file__"]).parent
    shown = blocks("using-a-model.md", "text")[0].splitlines()[0]
    lines = (place / "deaths.csv").read_text().splitlines()
    assert lines[0] == shown and len(lines) == 21 and lines[1].startswith("P0,")
    young = {"age": 30, "pressure": 110, "ward": "birth"}
    (_, old), (_, healthy) = names["deaths"].predict_proba([names["patient"], young])
    assert old > 0.2 and healthy < 0.02
    assert lines[1].split(",")[:2] == blocks("using-a-model.md", "text")[0].splitlines()[1].split(",")[:2]
    made = {path.name for path in place.iterdir()}
    assert {"days.parquet", "deaths.pt", "deaths.pt.json", "deaths.onnx", "deaths.onnx.json"} <= made


def borrowed(block: str) -> set[str]:
    """The names that a block uses but does not make."""
    nodes = list(ast.walk(ast.parse(block)))
    made = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imports = [
        alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    ]
    made |= {alias.asname or alias.name.split(".")[0] for alias in imports}
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    return used - made - set(dir(builtins))


def test_every_example_of_own_data_is_complete():
    assert [borrowed(block) for block in blocks("own-data.md", "python")] == [set()] * 4
    assert borrowed("import math\nprint(math.pi * radius)") == {"radius"}


def test_the_command_lines_of_own_data_work(run_page, tmp_path: Path, monkeypatch, capsys):
    names = run_page("own-data.md")
    shutil.copytree(names["folder"], tmp_path / "windows")
    shutil.copy(names["book"], tmp_path)
    monkeypatch.chdir(tmp_path)
    lines = blocks("own-data.md", "sh")[0].splitlines()
    assert len(lines) == 4
    for line in lines:
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as stop:
            main()
        told = capsys.readouterr()
        assert stop.value.code == 0, told.err
        if " run " in line:
            result = re.search(r"^ +Fed\w+|^ +SCAFFOLD", told.out, re.MULTILINE)
            assert result, told.out
            accuracy = re.search(r"([\d.]+)%", told.out[result.end() :])
            assert accuracy and float(accuracy[1]) > 85
        else:
            assert "clients" in told.out
    assert (tmp_path / "windows.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_command_lines_of_experiments_work(tmp_path: Path, monkeypatch, capsys):
    (experiment,) = blocks("experiments.md", "yaml")
    (tmp_path / "skewed.yaml").write_text(experiment)
    monkeypatch.chdir(tmp_path)
    for line in blocks("experiments.md", "sh")[0].splitlines():
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as stop:
            main()
        told = capsys.readouterr()
        assert stop.value.code == 0, (line, told.err)
    kept = {path.name for path in (tmp_path / "runs" / "skewed").iterdir()}
    listed = set(re.findall(r"^\| `([\w.]+)/?`", (DOCS / "experiments.md").read_text("utf-8"), re.MULTILINE))
    assert listed <= kept
    assert len((tmp_path / "runs" / "again" / "metrics.jsonl").read_text().splitlines()) == 15
    assert len((tmp_path / "comparison.csv").read_text().splitlines()) == 1 + 6
    assert len(list((tmp_path / "runs" / "grid").rglob("model.safetensors"))) == 12


@pytest.mark.slow
def test_the_command_lines_of_flatness_work(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (experiment,) = blocks("flatness.md", "yaml")
    (tmp_path / "recorded.yaml").write_text(experiment)
    for line in [*blocks("flatness.md", "sh")[0].splitlines(), "fedflat run recorded.yaml"]:
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as stop:
            main()
        told = capsys.readouterr()
        assert stop.value.code == 0, (line, told.err)
    for run in ("sam", "avg"):
        measures = read_flatness(tmp_path / "runs" / run)["measures"]
        assert set(measures) == {
            "sharpness",
            "client-sharpness",
            "worst-case",
            "eigenvalues",
            "trace",
            "low-pass (test)",
        }
        assert len(measures["eigenvalues"]["result"]["values"]) == 3
        assert set(read_landscape(tmp_path / "runs" / run)["losses"]) == {"train", "test"}
    taken = [set(row["measures"]) for row in read_metrics(tmp_path / "runs" / "recorded")]
    assert ["sharpness" in names for names in taken] == [False, True] * 3
    assert ["eigenvalues" in names for names in taken] == [False, False, True] * 2


def test_the_table_of_flatness_has_every_measure():
    names = re.findall(r"^\| `([\w-]+)`", (DOCS / "flatness.md").read_text("utf-8"), re.MULTILINE)
    assert names == list(ff.MEASURES)


def test_the_message_about_a_bad_experiment_is_the_printed_one(tmp_path: Path, monkeypatch, capsys):
    (experiment,) = blocks("experiments.md", "yaml")
    bad = (
        experiment.replace("clients", "clinets").replace("fedgmt", "fedgtm").replace("lr: 0.05", "lr: -0.05")
    )
    (tmp_path / "skewed.yaml").write_text(bad)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedflat", "run", "skewed.yaml"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.strip() in (DOCS / "experiments.md").read_text("utf-8")
