"""Without the optional dependencies: what needs one says which extra brings it, all the rest works."""

import json
import os
import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]

MODULES = {
    "data": ["pyarrow", "PIL"],
    "download": ["datasets"],
    "plot": ["matplotlib"],
    "vision": ["timm", "torchvision"],
    "tune": ["optuna"],
    "flatness": ["scipy"],
    "report": ["plotly"],
    "embedding": ["sklearn"],
    "tensorboard": ["tensorboard"],
    "wandb": ["wandb"],
    "mlflow": ["mlflow", "sqlalchemy", "alembic"],
    "trackio": ["trackio"],
    "ray": ["ray"],
    "flower": ["flwr", "cryptography"],
    "privacy": ["dp_accounting"],
    "onnx": ["onnx", "onnxscript"],
}
"""What each extra brings, as it is imported."""
FOR_DEVELOPERS = {"test", "test-slow", "docs", "lint"}

BARE = f"""
import sys
sys.modules.update(dict.fromkeys({sorted(name for names in MODULES.values() for name in names)}))
"""
"""Python code after which none of them can be imported, as where none is installed."""

REFUSED: list[tuple[str, str, str]] = [
    ("flatness", "flatness run -m eigenvalues", "The measure eigenvalues needs scipy"),
    ("flatness", "flatness run --top 2", "The measure eigenvalues needs scipy"),
    ("flatness", "flatness run --all", "The measure eigenvalues needs scipy"),
    (
        "flatness",
        "run --measure eigenvalues --rounds 1 --out measured",
        "The measure eigenvalues needs scipy",
    ),
    ("plot", "figure curves run -o curves.png", "Drawing a figure needs matplotlib"),
    ("plot", "figure radius run -o radius.png", "Drawing a figure needs matplotlib"),  # before all else
    ("plot", "figure embedding run -o seen.png", "Drawing a figure needs matplotlib"),
    ("plot", "split digits iid --clients 3 --out split.png", "Drawing a split needs matplotlib"),
    ("embedding", "figure embedding run -o seen.png", "An embedding by t-SNE needs scikit-learn"),
    ("report", "report run -o report.html", "A report needs plotly"),
    ("report", "watch run --port 0", "A report needs plotly"),
    ("tune", "tune run/experiment.yaml --vary local.lr=0.1,1 --trials 1", "Tuning needs optuna"),
    ("ray", "run --engine ray", "The engine ray needs ray"),
    ("tensorboard", "run --trackers tensorboard --out tracked", "The tracker tensorboard needs tensorboard"),
    ("wandb", "run --trackers wandb --out tracked", "The tracker wandb needs wandb"),
    ("mlflow", "run --trackers mlflow --out tracked", "The tracker mlflow needs mlflow"),
    ("trackio", "run --trackers trackio --out tracked", "The tracker trackio needs trackio"),
    ("flower", "federate keys keys", "Making keys needs cryptography"),
    ("onnx", "export run --format onnx -o model.onnx", "Exporting to ONNX needs onnx"),
    ("privacy", "privacy private.yaml", "Privacy accounting needs dp-accounting"),
    ("data", "run --dataset table.parquet --target y", "Reading Parquet files needs pyarrow"),
    ("data", "run --dataset folder --model cnn", "Reading images needs Pillow"),
    ("download", "run --dataset cifar10 --data nowhere --download", "Downloading cifar10 needs datasets"),
    ("vision", "run --dataset cifar10 --data . --model vit-b16 --rounds 1", "The model vit-b16 needs timm"),
]
"""The extra, a command, and how its answer begins."""

WORKS = [
    ("compare run", "fedsam"),
    ("export run --format pt2 -o model.pt2", "Written to model.pt2.json"),
    ("flatness run --samples 50", "worst-case"),
    ("landscape run --points 3 --samples 20", "train loss from"),
    ("federate init clinics", "Starting it needs flwr, which is not installed."),
    ("run cluster/experiment.yaml --set engine=workers:2 --rounds 2 --out again", "Written to again"),
    ("flatness cluster -m sharpness --samples 50", "sharpness"),
    ("papers", "fedwmsam/table1"),
    ("datasets", "digits"),
]
"""Commands that need nothing, and something that they print."""

DRIVER = """
import contextlib, io, json, shlex, sys
from fedflat.cli import console, main
told = []
for present, line in json.load(sys.stdin):
    hidden = {name: sys.modules.pop(name) for name in present}
    out, err = io.StringIO(), io.StringIO()
    console.file = out
    sys.argv = ["fedflat", *shlex.split(line)]
    code = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        code = f"{type(error).__name__}: {error}"
    sys.modules.update(hidden)
    told.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[tuple[str, str], tuple[Any, str, str]]:
    """What every command says, all in one process that can import none of the extras, bar `plot` for `embedding`."""
    place = tmp_path_factory.mktemp("bare")
    write_stage(place)
    asked = [(["matplotlib"] if extra == "embedding" else [], line) for extra, line, _ in REFUSED]
    start = "run --method fedsam --rounds 1 --epochs 1 --clients 6 --participation 3 --out run"
    asked = [([], start), ([], start.replace("out run", "out cluster")), *asked]
    first = run_bare(asked, place)
    assert [answer[0] for answer in first[:2]] == [0, 0], first[:2]
    with (place / "cluster" / "experiment.yaml").open("a") as file:
        file.write("engine: ray\n")  # as if it had been trained elsewhere, on a cluster
    rest = run_bare([([], line) for line, _ in WORKS], place)
    keys = [(extra, line) for extra, line, _ in REFUSED] + [("", line) for line, _ in WORKS]
    assert not (place / "tracked").exists() and not (place / "measured").exists()
    return dict(zip(keys, first[2:] + rest, strict=True))


def write_stage(place: Path) -> None:
    """Files for the commands to be about."""
    (place / "table.parquet").write_bytes(b"PAR1")
    (place / "private.yaml").write_text(
        "clients: 20\nmethod: fedavg + private-uploads(noise=4)\nlocal: {lr: 0.1, steps: 2, batch_size: 20}\n"
        "participation: 10\nrounds: 2\nweighting: uniform\n"
    )
    for name in ("cat", "dog"):
        (place / "folder" / name).mkdir(parents=True)
        (place / "folder" / name / "1.png").write_bytes(b"")
    batches = place / "cifar-10-batches-py"
    batches.mkdir()
    images = {b"data": np.zeros((400, 3072), np.uint8), b"labels": list(range(10)) * 40}
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        (batches / name).write_bytes(pickle.dumps(images))
    names = [name.encode() for name in "abcdefghij"]
    (batches / "batches.meta").write_bytes(pickle.dumps({b"label_names": names}))


def run_bare(asked: list[tuple[list[str], str]], place: Path) -> list[tuple[Any, str, str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "HOME": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", BARE + DRIVER],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=environment,
        cwd=place,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answers: list[tuple[Any, str, str]] = json.loads(done.stdout)
    return answers


def test_every_extra_is_here():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"]) - FOR_DEVELOPERS
    assert extras == set(MODULES)
    assert extras == {extra for extra, _, _ in REFUSED}


@pytest.mark.parametrize(("extra", "line", "begins"), REFUSED)
def test_a_missing_extra_is_named_in_one_sentence(extra: str, line: str, begins: str, told):
    code, _, error = told[extra, line]
    assert code == 2, error
    sentence = re.escape(f'{begins}, which is not installed. Install it with: pip install "fedflat[{extra}]"')
    assert re.fullmatch(rf"Error: (The experiment: \w+: )?{sentence}\n", error)


@pytest.mark.parametrize(("line", "says"), WORKS)
def test_what_needs_no_extra_works_without(line: str, says: str, told):
    code, out, error = told["", line]
    assert code in (0, None) and not error
    assert says in out


def test_measures_that_nobody_asked_for_are_left_out_with_a_word(told):
    _, out, _ = told["", "flatness run --samples 50"]
    assert "Without eigenvalues: The measure eigenvalues needs scipy" in out
    assert 'pip install "fedflat[flatness]"' in out
