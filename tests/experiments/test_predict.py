"""`fedflat predict` and `ff.load`: raw rows and images come out as with plain PyTorch and the stored numbers."""

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import fedflat as ff
from fedflat.cli import main
from fedflat.errors import Diverged, FedflatError

WARDS = ("birth", "heart", "surgery")


def patients(count: int, seed: int) -> dict[str, list[Any]]:
    """Names, missing values, a categorical column, and few who die."""
    rng = np.random.default_rng(seed)
    age, pressure = rng.integers(20, 95, count), rng.normal(120, 20, count)
    ward = rng.integers(0, 3, count)
    risk = 0.08 * (age - 80) + 0.05 * (pressure - 120) + 2.0 * (ward == 1)
    return {
        "patient": [f"P{n:04d}" for n in range(count)],
        "age": age.tolist(),
        "pressure": [
            "" if gap else f"{p:.1f}" for gap, p in zip(rng.random(count) < 0.1, pressure, strict=True)
        ],
        "ward": [WARDS[n] for n in ward],
        "hospital": [("Aarau", "Basel", "Chur")[n % 3] for n in range(count)],
        "died": ["yes" if one else "no" for one in rng.random(count) < 1 / (1 + np.exp(-risk))],
        "days": (age / 10 + pressure / 50 + rng.normal(0, 0.1, count)).round(3).tolist(),
    }


def write(path: Path, columns: dict[str, list[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    return path


def command(*words: Any) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fedflat", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def clinic(tmp_path_factory) -> Path:
    """A folder with patients, new ones, and two runs on them by commands: of a class, and of a number."""
    place = tmp_path_factory.mktemp("clinic")
    data = write(place / "patients.csv", patients(400, 0))
    write(place / "new.csv", patients(30, 1))
    for target, scaling in (("died", "standardise"), ("days", "robust")):
        code = command(
            *("run", "--dataset", data, "--target", target, "--client-column", "hospital", "-m", "fedavg"),
            *("--features", "age,pressure,ward", "--missing", "median", "--numeric", scaling),
            *("--rounds", 4, "--out", place / target),
        )
        assert code == 0
    return place


def by_hand(run: Path, table: Path) -> torch.Tensor:
    """The outputs of the trained model for raw rows: by files of the run, numpy and PyTorch, not by the package."""
    about = json.loads((run / "preprocessing.json").read_text())
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    inputs = []
    for row in rows:
        one: list[float] = []
        for feature in about["features"]:
            text = row[feature["name"]]
            if feature["kind"] == "numeric":
                value = float(text) if text else feature["fill"]
                one.append((value - feature["centre"]) / feature["scale"])
                one += [float(not text)] if feature.get("indicator") else []
            else:
                one += [float(text == level) for level in feature["levels"]]
        inputs.append(one)
    weights = load_file(run / "model.safetensors")
    x = torch.tensor(np.array(inputs).astype(np.float32))
    for layer in ("fc1", "fc2"):
        x = F.relu(F.linear(x, weights[f"{layer}.weight"], weights[f"{layer}.bias"]))
    return F.linear(x, weights["fc3.weight"], weights["fc3.bias"])


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_classes_and_probabilities_by_command_are_those_of_plain_pytorch(
    clinic: Path, tmp_path: Path, capsys
):
    out = tmp_path / "predictions.csv"
    assert command("predict", clinic / "died", clinic / "new.csv", "-o", out, "--id", "patient") == 0
    told = capsys.readouterr().out
    assert "30 predictions" in told and "after round 4" in told and str(out) in told
    rows = rows_of(out)
    assert list(rows[0]) == ["patient", "prediction", "p(no)", "p(yes)"]
    assert [row["patient"] for row in rows] == [f"P{n:04d}" for n in range(30)]
    outputs = by_hand(clinic / "died", clinic / "new.csv")
    wanted = outputs.softmax(1).numpy()
    found = np.array([[float(row["p(no)"]), float(row["p(yes)"])] for row in rows])
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert [row["prediction"] for row in rows] == [("no", "yes")[n] for n in outputs.argmax(1).tolist()]
    assert len({row["prediction"] for row in rows}) == 2


def test_numbers_by_command_are_those_of_plain_pytorch(clinic: Path, tmp_path: Path):
    out = tmp_path / "predictions.parquet"
    assert command("predict", clinic / "days", clinic / "new.csv", "-o", out) == 0
    table = pq.read_table(out)
    assert table.column_names == ["prediction"]
    found = table["prediction"].to_numpy()
    np.testing.assert_allclose(found, by_hand(clinic / "days", clinic / "new.csv")[:, 0].numpy(), rtol=1e-5)
    truth = [float(row["days"]) for row in rows_of(clinic / "new.csv")]
    assert np.corrcoef(found, truth)[0, 1] > 0.9


def test_every_way_to_give_rows_is_equal(clinic: Path, tmp_path: Path):
    trained = ff.load(clinic / "died")
    assert (trained.classes, trained.round, trained.task) == (("no", "yes"), 4, "classification")
    columns: dict[str, list[Any]] = patients(30, 1)
    columns["pressure"] = [float(value) if value else None for value in columns["pressure"]]
    probabilities = trained.predict_proba(clinic / "new.csv")
    frame = pa.table(columns)
    pq.write_table(frame, tmp_path / "new.parquet")
    dicts = frame.to_pylist()
    inputs = trained.preprocessing.apply(columns)
    for data in (
        str(clinic / "new.csv"),
        tmp_path / "new.parquet",
        columns,
        frame,
        dicts,
        inputs,
        inputs.numpy(),
    ):
        np.testing.assert_array_equal(trained.predict_proba(data), probabilities)
    assert trained.predict(columns).tolist() == [("no", "yes")[n] for n in probabilities.argmax(1)]
    with torch.no_grad():
        np.testing.assert_allclose(trained.module(inputs).softmax(1).numpy(), probabilities, atol=1e-6)
    one = trained.predict_proba(dicts[3:4])
    np.testing.assert_allclose(one, probabilities[3:4], atol=1e-6)
    numbers = ff.load(clinic / "days")
    assert numbers.predict(columns).shape == (30,) and numbers.classes == ()
    with pytest.raises(FedflatError, match="no probabilities"):
        numbers.predict_proba(columns)


def test_the_preprocessing_travels_in_the_file_of_weights(clinic: Path, tmp_path: Path):
    with safe_open(clinic / "died" / "model.safetensors", "pt") as file:
        stored = json.loads(file.metadata()["fedflat.preprocessing"])
    assert stored == json.loads((clinic / "died" / "preprocessing.json").read_text())
    moved = shutil.copytree(clinic / "died", tmp_path / "moved")
    (moved / "preprocessing.json").unlink()
    (moved / "experiment.yaml").unlink()
    wanted = ff.load(clinic / "died").predict_proba(clinic / "new.csv")
    np.testing.assert_array_equal(ff.load(moved).predict_proba(clinic / "new.csv"), wanted)


def test_unseen_levels_are_mentioned_and_predicted(clinic: Path):
    row = {"age": 50, "pressure": 120, "ward": "eye"}
    with pytest.warns(UserWarning, match=r"'ward' has levels in 1 of 1 rows.*eye"):
        assert ff.load(clinic / "died").predict([row]).shape == (1,)


def test_existing_files_are_replaced_only_where_allowed(clinic: Path, tmp_path: Path, capsys):
    out = tmp_path / "predictions.csv"
    out.write_text("mine")
    words = ("predict", clinic / "died", clinic / "new.csv", "-o", out)
    assert command(*words) == 2
    assert "is there already" in capsys.readouterr().err and out.read_text() == "mine"
    assert command(*words, "--overwrite") == 0
    assert len(rows_of(out)) == 30


def changed(path: Path, **columns: Any) -> Path:
    """New patients in a file of their own, some columns replaced, or left out with None."""
    table = {**patients(30, 1), **columns}
    return write(path, {name: values for name, values in table.items() if values is not None})


@pytest.mark.parametrize(
    ("columns", "more", "parts"),
    [
        ({"ward": None}, [], ["no column 'ward'"]),
        ({"age": None, "Age": [1] * 30}, [], ["no column 'age'", "Did you mean 'Age'?"]),
        ({"age": ["old", *[1] * 29]}, [], ["'age', row 1 is 'old', not a number"]),
        ({"age": [*[1] * 29, "inf"]}, [], ["'age'", "infinite", "row 30"]),
        ({"age": ["1e200", *[1] * 29]}, [], ["'age'", "too large"]),
        ({}, ["--id", "patients"], ["no column 'patients'", "Did you mean 'patient'?"]),
        ({"prediction": [1] * 30}, ["--id", "prediction"], ["'prediction'", "rename"]),
        ({}, ["-o", "out.txt"], ["out.txt", ".csv or .parquet"]),
        ({}, ["-o", "nowhere/out.csv"], ["no directory nowhere"]),
    ],
)
def test_tables_that_do_not_fit_get_a_sentence(columns, more, parts, clinic, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    changed(tmp_path / "odd.csv", **columns)
    assert command("predict", clinic / "died", "odd.csv", *more) == 2
    told = capsys.readouterr().err
    assert told.startswith("Error: ") and told.count("\n") == 1, told
    for part in parts:
        assert part in told
    assert not (tmp_path / "predictions.csv").exists()


def test_gaps_are_refused_by_number_where_training_refused_them(clinic: Path, tmp_path: Path, capsys):
    data = changed(tmp_path / "whole.csv", pressure=[100 + n for n in range(30)])
    run = ("run", "--dataset", data, "--target", "died", "--partition", "iid", "--clients", 2, "-m", "fedavg")
    assert command(*run, "--features", "age,pressure", "--rounds", 1, "--out", tmp_path / "run") == 0
    capsys.readouterr()
    gaps = sum(not value for value in patients(30, 1)["pressure"])
    assert command("predict", tmp_path / "run", clinic / "new.csv", "-o", tmp_path / "p.csv") == 2
    assert f"column 'pressure' in {gaps} of 30 rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ("nothing.csv", ["no file", "nothing.csv"]),
        (".", ["is a folder", "csv or Parquet"]),
        ("empty.csv", ["no rows"]),
        ("picture.png", ["no csv file in UTF-8"]),
        ("broken.parquet", ["no sound Parquet file"]),
    ],
)
def test_files_that_are_no_tables_get_a_sentence(data, parts, clinic, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.csv").write_text("age,pressure,ward\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    Image.new("L", (3, 3), 200).save(tmp_path / "picture.png")
    assert command("predict", clinic / "died", data) == 2
    told = capsys.readouterr().err
    assert told.startswith("Error: ") and told.count("\n") == 1, told
    for part in parts:
        assert part in told


# -- runs of every kind ------------------------------------------------------------------------------


def test_directories_that_hold_no_model_get_a_sentence(clinic: Path, tmp_path: Path, capsys):
    for run, part in ((tmp_path / "nothing", "is not a run"), (clinic, "holds 2 runs: choose one")):
        assert command("predict", run, clinic / "new.csv", "-o", tmp_path / "p.csv") == 2
        assert part in capsys.readouterr().err
    hurt = shutil.copytree(clinic / "died", tmp_path / "hurt")
    (hurt / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(FedflatError, match=r"model\.safetensors cannot be read"):
        ff.load(hurt)
    other = shutil.copytree(clinic / "died", tmp_path / "other")
    shutil.copy(clinic / "days" / "model.safetensors", other / "model.safetensors")
    assert ff.load(other).task == "regression"  # what travels with the weights counts
    about = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps({**about, "model": "mlp-200-100"}))
    with pytest.raises(FedflatError, match="do not fit the model mlp-200-100"):
        ff.load(other)


def test_a_run_that_is_not_finished_gives_its_last_checkpoint(tmp_path: Path):
    federation = ff.federate("digits", clients=4)
    arguments: dict[str, Any] = {"model": "mlp", "rounds": 5, "checkpoint_every": 1, "out": tmp_path / "run"}
    seen = []
    stopped = ff.train(federation, **arguments, on_round=seen.append, stop=lambda: len(seen) == 2)
    with pytest.warns(UserWarning, match="not finished: this is its model after round 2 of 5"):
        found = ff.load(tmp_path / "run")
    for mine, theirs in zip(found.module.parameters(), stopped.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "gone")
    with pytest.raises(FedflatError, match="no model and no checkpoint yet"):
        ff.load(tmp_path / "run")


def test_a_run_that_diverged_gives_its_last_finite_model(tmp_path: Path):
    federation = ff.federate("digits", clients=4)
    with pytest.raises(Diverged) as ended:
        ff.train(federation, "mlp", rounds=30, local=ff.LocalSGD(lr=1e20), out=tmp_path / "run")
    with pytest.warns(UserWarning, match="diverged; this is its last finite model"):
        found = ff.load(tmp_path / "run")
    for mine, theirs in zip(found.module.parameters(), ended.value.run.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class Net(nn.Module):
    """A model of a person's own, with one logit."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).squeeze(1)


def test_a_module_of_ones_own_is_asked_for(tmp_path: Path):
    x = torch.randn(60, 3)
    y = (x[:, 0] > 0).float()
    loss = F.binary_cross_entropy_with_logits
    run = ff.train(ff.Federation([(x, y)], classes=2), Net(3), rounds=20, loss=loss, out=tmp_path / "run")
    with pytest.raises(FedflatError, match=r"a model of its own \(Net\).*module=Net\(\.\.\.\)"):
        ff.load(tmp_path / "run")
    blank = Net(3)
    before = blank.layer.weight.detach().clone()
    found = ff.load(tmp_path / "run", module=blank)
    assert torch.equal(blank.layer.weight, before)
    with torch.no_grad():
        chance = run.model(x).sigmoid().numpy()
    np.testing.assert_allclose(found.predict_proba(x), np.stack([1 - chance, chance], axis=1), atol=1e-6)
    assert found.predict(x).tolist() == [str(int(one > 0.5)) for one in chance]
    with pytest.raises(FedflatError, match="do not fit the model Net"):
        ff.load(tmp_path / "run", module=Net(4))
    with pytest.raises(FedflatError, match="does not say how raw data became inputs"):
        found.predict({"a": [1.0]})
    with pytest.raises(FedflatError, match=r"has|have the shape \(60, 2\)"):
        found.predict(x[:, :2])


def test_a_named_model_on_tensors_needs_nothing_but_the_run(tmp_path: Path):
    x, y = torch.randn(40, 2, 3, dtype=torch.float64), torch.arange(40) % 3
    federation = ff.Federation([(x, y)])
    run = ff.train(federation, "mlp", rounds=1, dtype=torch.float64, out=tmp_path / "run")
    found = ff.load(tmp_path / "run")
    assert found.preprocessing is None and found.classes == ("0", "1", "2")
    with torch.no_grad():
        np.testing.assert_array_equal(found.outputs(x).numpy(), run.model(x).numpy())
    with pytest.raises(FedflatError, match="samples, 2, 3"):
        found.predict(x[:, :, :1])


# -- images ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name, colour in (("blue", (20, 40, 200)), ("red", (200, 40, 20))):
        (place / "all" / name).mkdir(parents=True)
        for number in range(20):
            pixels = np.array(colour) + rng.integers(-20, 20, (9, 11, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / "all" / name / f"{number}.png")
    words = ("run", "--dataset", place / "all", "--image-size", 8, "--model", "cnn", "--partition", "iid")
    assert command(*words, "--clients", 2, "-m", "fedavg", "--rounds", 6, "--out", place / "run") == 0
    return place


def test_images_by_command_are_those_of_plain_pytorch(photos: Path, tmp_path: Path):
    out = tmp_path / "predictions.csv"
    assert command("predict", photos / "run", photos / "all", "-o", out) == 0
    rows = rows_of(out)
    assert list(rows[0]) == ["file", "prediction", "p(blue)", "p(red)"]
    assert len(rows) == 40 and rows[0]["file"] == "blue/0.png"
    assert np.mean([row["file"].startswith(row["prediction"]) for row in rows]) > 0.9
    about = json.loads((photos / "run" / "preprocessing.json").read_text())
    height, width = about["size"]
    trained = ff.load(photos / "run")
    for row in rows[::10]:
        with Image.open(photos / "all" / row["file"]) as opened:
            image = opened.convert(about["colour"]).resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(image, dtype=np.float64) / about["scale"]
        values = ((pixels - about["mean"]) / about["deviation"]).transpose(2, 0, 1)[None]
        with torch.no_grad():
            wanted = trained.module(torch.tensor(values, dtype=torch.float32)).softmax(1)[0]
        np.testing.assert_allclose([float(row["p(blue)"]), float(row["p(red)"])], wanted, atol=1e-5)
        found = trained.predict_proba(photos / "all" / row["file"])[0]  # one image as well as many
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        bytes_ = np.asarray(image)[None]
        np.testing.assert_allclose(trained.predict_proba(bytes_)[0], wanted, atol=1e-5)


def test_what_is_no_image_gets_a_sentence(photos: Path, tmp_path: Path, capsys):
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    (tmp_path / "empty").mkdir()
    for data, part in (
        ("table.csv", "no image and no folder with images"),
        ("nothing.png", "no image and no folder with images"),
        ("empty", "no image and no folder with images"),
        ("broken.png", "no readable image"),
    ):
        assert command("predict", photos / "run", tmp_path / data, "-o", tmp_path / "p.csv") == 2
        told = capsys.readouterr().err
        assert part in told and told.count("\n") == 1, told
    assert command("predict", photos / "run", photos / "all", "-o", tmp_path / "p.csv", "--id", "x") == 2
    assert "--id x goes with a table" in capsys.readouterr().err
    with pytest.raises(FedflatError, match="height, width, channels"):
        ff.load(photos / "run").predict(np.zeros((2, 4, 4, 3), dtype=np.uint8))


# -- real federations --------------------------------------------------------------------------------


def test_a_run_of_a_real_federation_takes_tensors_and_says_why_no_rows(clinic: Path, tmp_path: Path, capsys):
    """Its run.json has the shape of samples, and nothing is known of how nodes prepared them."""
    run = tmp_path / "run"
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    ff.train(ff.Federation([(x, y)]), "mlp", rounds=1, out=run)
    about = json.loads((run / "run.json").read_text())
    about["federation"] = {"name": "on-nodes", "clients": 1, "shape": [3], "classes": 2, "test_samples": 0}
    about["how"] = {"engine": "flower"}
    (run / "run.json").write_text(json.dumps(about))
    assert ff.load(run).predict(x).shape == (40,)
    assert command("predict", run, clinic / "new.csv", "-o", tmp_path / "p.csv") == 2
    assert "clients' own nodes" in capsys.readouterr().err
    given = {
        "format": 1,
        "dataset": "d",
        "kind": "table",
        "target": "y",
        "classes": 2,
        "class_names": ["no", "yes"],
    }
    columns = [{"name": n, "kind": "numeric", "centre": 0.5, "scale": 2.0} for n in "abc"]
    known = ff.Preprocessing.from_dict({**given, "features": columns})
    raw = {name: x[:, n].tolist() for n, name in enumerate("abc")}
    wanted = ff.load(run).predict_proba((x - 0.5) / 2)
    np.testing.assert_allclose(ff.load(run, preprocessing=known).predict_proba(raw), wanted, atol=1e-6)
