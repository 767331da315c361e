"""`fedflat export`: the file gives equal outputs in a fresh process that has plain PyTorch, or ONNX Runtime, only."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedflat as ff
from fedflat.cli import main
from fedflat.errors import FedflatError

READERS = {
    "torchscript": """import torch
model = torch.jit.load(file)
run = lambda x: model(torch.tensor(x)).detach().numpy()""",
    "pt2": """import torch
model = torch.export.load(file).module()
run = lambda x: model(torch.tensor(x)).detach().numpy()""",
    "onnx": """import onnxruntime
session = onnxruntime.InferenceSession(file)
run = lambda x: session.run(["output"], {"input": x})[0]""",
}
"""How plain PyTorch and ONNX Runtime read a file."""
ELSEWHERE = """
import sys
import numpy as np
sys.modules["fedflat"] = None
file, inputs, outputs = sys.argv[1:]
{reader}
x = np.load(inputs)
np.savez(outputs, all=run(x), one=run(x[:1]))
"""


def outputs_elsewhere(
    format: str, file: Path, inputs: np.ndarray, place: Path
) -> tuple[np.ndarray, np.ndarray]:
    """What the file says of a batch, and of one sample alone, where there is no fedflat."""
    np.save(place / "inputs.npy", inputs)
    subprocess.run(
        [
            sys.executable,
            "-c",
            ELSEWHERE.format(reader=READERS[format]),
            file,
            place / "inputs.npy",
            place / "out.npz",
        ],
        check=True,
        cwd=place,
        env={"PATH": "", "OMP_NUM_THREADS": "1"},
    )
    with np.load(place / "out.npz") as stored:
        return stored["all"], stored["one"]


def command(*words: object) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fedflat", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def table_run(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("table")
    rng = np.random.default_rng(0)
    rows = [f"{a:.2f},{('u', 'v')[n % 2]},{a * 3 + n % 2:.3f}" for n, a in enumerate(rng.normal(size=80))]
    (place / "t.csv").write_text("\n".join(["a,word,y", *rows]))
    words = ("run", "--dataset", place / "t.csv", "--target", "y", "--partition", "iid", "--clients", 2)
    assert command(*words, "-m", "fedavg", "--rounds", 3, "--out", place / "run") == 0
    return place / "run"


@pytest.mark.parametrize("format", READERS)
def test_an_exported_table_model_and_its_description_are_all_one_needs(
    format: str, table_run: Path, tmp_path: Path
):
    if format == "onnx":
        pytest.importorskip("onnxruntime")
    file = tmp_path / f"model.{format}"
    assert command("export", table_run, "--format", format, "-o", file) == 0
    about = json.loads((tmp_path / f"model.{format}.json").read_text())
    assert about["task"] == "regression" and about["input"]["shape"] == ["batch", 3]
    number, word = about["preprocessing"]["features"]
    raw = [(-1.0, "u"), (0.25, "v"), (2.0, "u")]
    inputs = np.array(
        [
            [(a - number["centre"]) / number["scale"], *(w == level for level in word["levels"])]
            for a, w in raw
        ],
        dtype=about["input"]["dtype"],
    )
    many, one = outputs_elsewhere(format, file, inputs, tmp_path)
    wanted = ff.load(table_run).predict({"a": [a for a, _ in raw], "word": [w for _, w in raw]})
    np.testing.assert_allclose(many[:, 0], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one[:, 0], wanted[:1], rtol=1e-5, atol=1e-6)
    assert many.shape[1:] == tuple(about["output"]["shape"][1:])


@pytest.mark.parametrize("format", READERS)
@pytest.mark.parametrize("model", ["cnn", "resnet8-bn"])
def test_convolutions_and_statistics_survive(format: str, model: str, tmp_path: Path):
    if format == "onnx":
        pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    x, y = torch.randn(24, 3, 16, 16), torch.arange(24) % 4
    ff.train(ff.Federation([(x, y)]), model, rounds=1, out=tmp_path / "run")
    trained = ff.load(tmp_path / "run")
    file = tmp_path / f"model.{format}"
    assert ff.export(trained, format, file) == [file, tmp_path / f"model.{format}.json"]
    many, one = outputs_elsewhere(format, file, x.numpy(), tmp_path)
    wanted = trained.outputs(x).numpy()
    np.testing.assert_allclose(many, wanted, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(one, wanted[:1], rtol=1e-3, atol=1e-4)
    assert np.abs(wanted - wanted[0]).max() > 0.01


def test_text_is_exported_with_whole_numbers_as_inputs(tmp_path: Path):
    tokens, y = torch.randint(1, 9, (20, 7)), torch.arange(20) % 2
    federation = ff.Federation([(tokens, y)], vocabulary=9)
    ff.train(federation, "fasttext", rounds=1, out=tmp_path / "run")
    trained = ff.load(tmp_path / "run")
    file = tmp_path / "model.pt2"
    ff.export(trained, "pt2", file)
    assert json.loads((tmp_path / "model.pt2.json").read_text())["input"]["dtype"] == "int64"
    many, _ = outputs_elsewhere("pt2", file, tokens.numpy(), tmp_path)
    np.testing.assert_allclose(many, trained.outputs(tokens).numpy(), atol=1e-5)


def test_mistakes_get_a_sentence_and_nothing_is_overwritten(
    table_run: Path, tmp_path: Path, capsys, monkeypatch
):
    file = tmp_path / "m.pt2"
    beside = tmp_path / "m.pt2.json"
    beside.write_text("mine")
    for words, part in (
        (("--format", "ts", "-o", file), "no format 'ts'"),
        (("--format", "pt2", "-o", file), f"{beside} is there already"),
        (("--format", "pt2", "-o", tmp_path), "is a directory"),
        (("--format", "pt2", "-o", tmp_path / "no" / "m"), "no directory"),
    ):
        assert command("export", table_run, *words) == 2
        told = capsys.readouterr().err
        assert part in told and told.count("\n") == 1, told
    assert beside.read_text() == "mine" and not file.exists()
    assert command("export", table_run, "--format", "pt2", "-o", file, "--overwrite") == 0
    assert json.loads(beside.read_text())["format"] == "pt2"


def test_clients_are_not_named_in_what_leaves(table_run: Path, tmp_path: Path):
    (tmp_path / "t.csv").write_text(
        "\n".join(["a,who,y", *(f"{n},{'uv'[n % 2]},{n % 2}" for n in range(40))])
    )
    dataset = ff.read_table(tmp_path / "t.csv", "y", client="who")
    ff.train(ff.federate(dataset, ff.ByUser()), "mlp", rounds=1, out=tmp_path / "run")
    assert ff.load(tmp_path / "run").preprocessing.clients == ["u", "v"]
    ff.export(ff.load(tmp_path / "run"), "torchscript", tmp_path / "m.pt")
    assert "clients" not in json.loads((tmp_path / "m.pt.json").read_text())["preprocessing"]


def test_an_export_without_the_extra_says_so(table_run: Path, tmp_path: Path, monkeypatch):
    import fedflat.errors as errors

    there = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "onnxscript" else there(name))
    with pytest.raises(FedflatError, match=r'needs onnxscript.*pip install "fedflat\[onnx\]"'):
        ff.export(ff.load(table_run), "onnx", tmp_path / "m.onnx")
