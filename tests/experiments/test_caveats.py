"""What makes a run unlike a paper's is said: in the output, in run.json, comparison.json, reports and figures."""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_runs import made_run

import fedflat as ff
from fedflat.cli import main
from fedflat.experiments.build import make_federation
from fedflat.experiments.caveats import protocol_caveats
from fedflat.experiments.presets import choose, find_preset
from fedflat.experiments.reproduce import plan_runs
from fedflat.experiments.schema import Experiment
from fedflat.report.content import Content
from fedflat.report.page import make_page

COLUMN = "fashion-mnist/dirichlet-0.1"
SMALLER = ["clients=6", "participation=2", "local.epochs=1", "local.batch_size=200", "rounds=2"]


def fedflat(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr("sys.argv", ["fedflat", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def told(text: str) -> str:
    """What was printed, on one line."""
    return " ".join(text.split())


# -- data ------------------------------------------------------------------------------------------


def encoded(image: np.ndarray, kind: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    kind, _, how = kind.partition(" ")
    settings: dict[str, Any] = {"lossless": how == "lossless"} if kind == "WEBP" else {}
    Image.fromarray(image).save(file, kind, **settings)
    return file.getvalue()


def write_cifar100(folder: Path, kind: str) -> None:
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    pixels = np.random.Generator(np.random.Philox(0)).integers(0, 256, (4, 32, 32, 3)).astype(np.uint8)
    for split in ("train", "test"):
        images = [{"bytes": encoded(image, kind), "path": ""} for image in pixels]
        table = pyarrow.table({"img": images, "fine_label": [0, 1, 98, 99]})
        pyarrow.parquet.write_table(table, folder / f"{split}.parquet")


@pytest.mark.parametrize(
    ("kind", "loss"),
    [("PNG", ""), ("JPEG", "are JPEG"), ("WEBP lossless", ""), ("WEBP lossy", "are lossy WebP")],
)
def test_a_copy_says_what_it_lacks_and_what_it_lost(kind: str, loss: str, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDFLAT_CACHE", str(tmp_path / "cache"))
    write_cifar100(tmp_path / "cifar100", kind)
    for _ in range(2):  # decoded, then from the cache
        part, *rest = ff.load_dataset("cifar100", tmp_path).caveats
        assert (
            part == "This copy of cifar100 is a part: 4 of 50,000 training samples, 4 of 10,000 test samples."
        )
        assert [loss in sentence for sentence in rest] == ([True] if loss else [])
    federation = ff.federate("cifar100", "iid", 2, data=tmp_path)
    assert federation.to(ff.federate("digits").client(0).inputs.dtype).caveats == (part, *rest)


def test_jpeg_is_no_loss_where_the_original_is_jpeg():
    from fedflat.data.caveats import copy_caveats

    assert copy_caveats("tiny-imagenet", 100_000, 10_000, 200, "JPEG") == ()
    assert len(copy_caveats("cifar10", 50_000, 10_000, 10, "JPEG")) == 1
    assert copy_caveats("shakespeare", 1, 1, 81) == copy_caveats("cifar10", 50_000, 10_000, 10) == ()
    (more,) = copy_caveats("ag-news", 127_600, 7_600, 4)
    assert more.endswith("127,600 training samples for 120,000.")


def test_made_up_data_says_so(tmp_path):
    experiment = Experiment(dataset="ag-news", stand_in=True, data=str(tmp_path))
    assert make_federation(experiment, 0).caveats == (
        "ag-news is made up: the real dataset is not on this machine.",
    )


# -- protocol --------------------------------------------------------------------------------------


def protocol(key: str, row: str, column: str, scale: str = "full", **changes: Any) -> list[str]:
    cells = choose(find_preset(key).cells(), [column], [row])
    ((_, (run, *_)), *_) = plan_runs(cells, Path("nowhere"), scale, [3], changes)
    return list(run.notes)


def test_the_papers_own_protocol_needs_no_note():
    """Neither the seed, nor where and how it runs, nor other words for the same, nor a further measure is one."""
    how = {"data": "here", "download": True, "threads": 2, "checkpoint_every": 5, "measure": ["drift"]}
    same = {"partition.alpha": 0.1, "method": "fedavg()", "rounds": 500}
    assert protocol("fedwmsam/table1", "FedAvg", COLUMN, **how, **same) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rounds": 10, "local.lr": 0.2}, "rounds 10 (500), local.lr 0.2 (0.1)"),
        ({"partition.alpha": 0.5}, "partition dirichlet:0.5:refill (dirichlet:0.1:refill)"),
        ({"method.rho": 0.3}, None),
        ({"eval_every": 10, "test_samples": 100}, "test_samples 100 (none), eval_every 10 (1)"),
    ],
)
def test_changed_settings_are_told(changes: dict[str, Any], told: str | None):
    (sentence,) = protocol("fedwmsam/table1", "FedSAM", COLUMN, **changes)
    assert sentence.startswith("Settings that are not the paper's (in brackets): ")
    if told is None:
        assert re.search(r"method .*0\.3.* \(.*0\.01.*\)", sentence)
    else:
        assert sentence.endswith(f": {told}.")


def test_a_model_in_the_place_of_another_is_told():
    models, settings, weights = protocol("fednsam/table3", "FedAvg", "swin-b", "small")
    assert models == "Models: resnet8 stands in for swin-b."
    assert "rounds" in settings and "local.steps" in settings
    assert weights.startswith("resnet8 does not start from given weights")


def test_a_measure_that_is_not_the_papers_is_told():
    (sentence,) = protocol("fedgmt/figure2", "FedAvg", "dir-0.01", measure=[{"sharpness": {"samples": 9}}])
    assert "measure [{'sharpness': {'samples': 9}}]" in sentence


def test_changes_of_many_runs_are_one_sentence():
    cells = choose(find_preset("fedgf/table1").cells(), ["cifar10"], ["FedAvg"])
    pairs = [(c.content, r.experiment) for c, rs in plan_runs(cells, Path(), "small", [0], {}) for r in rs]
    (sentence,) = protocol_caveats(pairs)
    assert "participation 1 / 2 / 3 (5 / 10 / 20)" in sentence


# -- where they are said ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory) -> tuple[Path, str]:
    """Two runs of a cell on made-up data and with other settings; what the command printed."""
    place = tmp_path_factory.mktemp("reproduced")
    patch, capture = pytest.MonkeyPatch(), io.StringIO()
    with patch.context() as monkeypatch, redirect_stdout(capture):
        monkeypatch.setenv("FEDFLAT_DATA", str(place / "nothing"))
        monkeypatch.setenv("COLUMNS", "200")
        changes = [f"--set={change}" for change in [*SMALLER, "stand_in=true"]]
        command = ["reproduce", "fedwmsam/table1", "--cells", COLUMN, "--rows", "FedAvg,FedCM"]
        assert fedflat(monkeypatch, *command, *changes, "--out", place / "runs") == 0
    return place / "runs", capture.getvalue()


MADE_UP = "fashion-mnist is made up: the real dataset is not on this machine."
CHANGED = (
    "Settings that are not the paper's (in brackets): clients 6 (100), participation 2 (bernoulli:0.1), rounds 2 "
    "(500), local.epochs 1 (5), local.batch_size 200 (50)."
)


def test_reproduce_says_it_and_marks_the_difference(reproduced):
    runs, output = reproduced
    assert f"Note: {MADE_UP}" in told(output) and f"Note: {CHANGED}" in told(output)
    assert len(re.findall(r"FedAvg +\S+ .* [+-][\d.]+ ‡", output)) == 1
    assert "‡ data or protocol are not the paper's" in output
    for result in json.loads((runs / "comparison.json").read_text()):
        assert sorted(result["notes"]) == sorted([MADE_UP, CHANGED])


def test_runs_keep_it(reproduced):
    runs, _ = reproduced
    found = [json.loads(path.read_text())["notes"] for path in runs.rglob("run.json")]
    assert found == [[MADE_UP, CHANGED]] * 2


def test_compare_says_it(reproduced, monkeypatch, capsys):
    fedflat(monkeypatch, "compare", reproduced[0])
    assert f"Note: {MADE_UP} Note: {CHANGED}" in told(capsys.readouterr().out)


def test_a_report_says_it(reproduced):
    content = Content([reproduced[0]], splits=False).page()
    assert [run["caveats"] for run in content["runs"]] == [[MADE_UP, CHANGED]] * 2
    assert MADE_UP in make_page(content, "")


def test_a_report_marks_numbers_beside_a_papers(tmp_path):
    """A run with the paper's settings, on a part of the data."""
    (cell,) = choose(find_preset("fedwmsam/table1").cells(), [COLUMN], ["FedAvg"])
    run = made_run(tmp_path / "run", rounds=500, **{k: v for k, v in cell.content.items() if k != "rounds"})
    for notes in ([], ["This copy is a part."]):
        settings = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(settings | {"notes": notes}))
        (entry, *_) = Content([run], splits=False).page()["published"]
        assert entry["notes"] == notes


def written(figure: Any) -> list[str]:
    return [" ".join(text.get_text().split()) for text in figure.texts]


def test_figures_say_it(reproduced):
    from fedflat.figures import learning_curves, sensitivity

    runs, _ = reproduced
    assert f"{MADE_UP} {CHANGED}" in written(learning_curves(runs))
    assert f"{MADE_UP} {CHANGED}" in written(learning_curves({"ours": [*runs.glob("fedavg/*/*")]}))
    assert f"{MADE_UP} {CHANGED}" in written(sensitivity([runs], by="local.lr"))


def test_figures_without_notes_are_as_they_were(tmp_path):
    from fedflat.figures import learning_curves, surfaces

    run = made_run(tmp_path / "run", landscape=True)
    plain = learning_curves(run)
    assert written(plain) == []
    settings = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(settings | {"notes": [f"Sentence {n}." for n in range(9)]}))
    noted = learning_curves(runs=run)
    (text,) = written(noted)
    assert text == "Sentence 0. Sentence 1. Sentence 2. 6 more notes are in the runs' run.json."
    assert noted.get_figheight() > plain.get_figheight()
    noted.draw_without_rendering()
    (axes,) = noted.axes
    below = axes.get_tightbbox().ymin
    assert noted.texts[0].get_window_extent().ymax < below, "the note lies over the drawing"
    assert surfaces(run).texts[0].get_text() == noted.texts[0].get_text()


def test_a_label_of_the_whole_figure_stays_clear_of_notes(tmp_path):
    from fedflat.figures import landscapes

    run = made_run(tmp_path / "run", landscape=True)
    settings = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(settings | {"notes": ["A sentence."]}))
    figure = landscapes(run)
    figure.draw_without_rendering()
    boxes = {text.get_text(): text.get_window_extent() for text in figure.texts}
    label = boxes["direction 1 (filter lengths)"]
    assert boxes["A sentence."].ymax <= label.ymin
    assert label.ymax <= min(axes.get_tightbbox().ymin for axes in figure.axes[:2])


def test_run_and_sweep_say_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "short.yaml"
    file.write_text(
        "dataset: fashion-mnist\nstand_in: true\nclients: 4\nparticipation: 2\nrounds: 1\nmethod: fedavg\n"
        "engine: inprocess\nlocal: {steps: 1, lr: 0.1, batch_size: 10}\n"
    )
    assert fedflat(monkeypatch, "run", file, "--out", "run") == 0
    assert told(capsys.readouterr().out).count(f"Note: {MADE_UP}") == 1
    assert fedflat(monkeypatch, "sweep", file, "--seeds", "2", "--out", "sweep") == 0
    assert told(capsys.readouterr().out).count(f"Note: {MADE_UP}") == 1
    assert fedflat(monkeypatch, "resume", "run", "--rounds", "2") == 0
    later = "Its rounds were changed to 2 by `fedflat resume`."
    assert json.loads(Path("run/run.json").read_text())["notes"] == [MADE_UP, later]


def test_a_run_in_python_keeps_notes_and_may_go_on_with_others(tmp_path):
    federation = ff.federate("digits", "iid", 4)
    for rounds, notes in ((1, ["First."]), (2, []), (3, ["First.", "Third."])):
        ff.train(federation, rounds=rounds, participation=2, out=tmp_path, resume=rounds > 1, notes=notes)
    assert json.loads((tmp_path / "run.json").read_text())["notes"] == ["First.", "Third."]
