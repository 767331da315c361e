"""A person's own tables, folders of images and torch datasets: read as described, trained on, and complained about in
a sentence; in Python and on the command line."""

import csv
import json
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import Dataset as TorchDataset, IterableDataset, TensorDataset

import fedflat as ff
from fedflat.cli import main
from fedflat.errors import FedflatError, MissingExtra

LOCAL = ff.LocalSGD(lr=0.1, epochs=2, batch_size=16)


def says(action: Callable[[], Any], *parts: Any) -> str:
    """The one sentence of a mistake, which contains all parts."""
    with pytest.raises(FedflatError) as caught:
        action()
    told = str(caught.value)
    for part in parts:
        assert str(part) in told
    assert "\n" not in told
    return told


# -- tables ----------------------------------------------------------------------------------------

HOSPITALS = ("Basel", "Aarau", "Chur")


def patients(count: int = 120) -> dict[str, list[Any]]:
    """Two measurements that tell the classes apart, one that does not, and words; hospitals of unequal size."""
    rng = np.random.default_rng(0)
    sick = rng.random(count) < 0.5
    return {
        "age": rng.integers(20, 90, count).tolist(),
        "fever": (37 + 2 * sick + 0.3 * rng.standard_normal(count)).tolist(),
        "pulse": (70 + 20 * sick + 5 * rng.standard_normal(count)).tolist(),
        "name": [f"patient {number}" for number in range(count)],
        "hospital": [HOSPITALS[min(number % 5, 2)] for number in range(count)],
        "state": ["sick" if s else "healthy" for s in sick],
        "grade": [10 if s else 2 for s in sick],
        "held": [number % 4 == 0 for number in range(count)],
    }


def write(path: Path, columns: dict[str, list[Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    return path


@pytest.fixture(params=["csv", "parquet"])
def table(request, tmp_path: Path) -> Path:
    """The patients, in each of the two forms."""
    return write(tmp_path / f"patients.{request.param}", patients())


@pytest.fixture
def csv_table(tmp_path: Path) -> Path:
    return write(tmp_path / "patients.csv", patients())


def rows_of(dataset: ff.Dataset) -> np.ndarray:
    """All samples, training first, of a dataset that was not standardised."""
    return torch.cat([dataset.train[0], dataset.test[0]]).numpy()


def test_a_table_gives_back_its_rows(table: Path):
    columns = patients()
    dataset = ff.read_table(table, "state", features=["pulse", "age"], test="held", numeric="none")
    held = np.array(columns["held"])
    inputs = np.array([columns["pulse"], columns["age"]], dtype=np.float32).T
    labels = np.array([state == "sick" for state in columns["state"]], dtype=int)
    for (x, y), chosen in ((dataset.train, ~held), (dataset.test, held)):
        np.testing.assert_array_equal(x.numpy(), inputs[chosen])
        np.testing.assert_array_equal(y.numpy(), labels[chosen])
    assert dataset.name == "patients"
    assert dataset.class_names == ("healthy", "sick")
    assert dataset.classes == 2
    assert dataset.train[0].dtype == torch.float32
    assert dataset.groups is None


def test_features_are_all_other_columns_with_numbers_or_few_words(table: Path):
    def names(dataset: ff.Dataset) -> list[str]:
        return ff.Preprocessing.from_dict(ff.federate(dataset, clients=2).preprocessing).inputs

    dataset = ff.read_table(table, "state", client="hospital", test=0.5, numeric="none")
    # every name is another one, and in a csv file `held` is the words True and False
    held = ["held=False", "held=True"] if table.suffix == ".csv" else ["held"]
    assert names(dataset) == ["age", "fever", "pulse", "grade", *held]
    hospitals = [f"hospital={name}" for name in sorted(HOSPITALS)]
    states = ["state=healthy", "state=sick"]
    found = names(ff.read_table(table, "grade", test="held"))
    assert found == ["age", "fever", "pulse", *hospitals, *states]


def test_classes_that_are_numbers_are_in_the_order_of_numbers(table: Path):
    dataset = ff.read_table(table, "grade", features=["fever"], numeric="none")
    assert dataset.class_names == ("2", "10")
    assert dataset.train[0][dataset.train[1] == 1].mean() > dataset.train[0][dataset.train[1] == 0].mean() + 1


def test_every_client_keeps_its_share_for_testing(table: Path):
    columns = patients()
    dataset = ff.read_table(table, "state", client="hospital", features=["age"], test=0.25)
    owned = {name: columns["hospital"].count(name) for name in sorted(HOSPITALS)}
    assert dataset.group_names == tuple(sorted(HOSPITALS)) == ("Aarau", "Basel", "Chur")
    assert np.bincount(dataset.groups).tolist() == [n - round(0.25 * n) for n in owned.values()]
    assert len(dataset.test[1]) == sum(round(0.25 * n) for n in owned.values())


def test_clients_are_dealt_their_own_rows(table: Path):
    columns = patients()
    dataset = ff.read_table(table, "state", client="hospital", features=["fever", "pulse"], numeric="none")
    federation = ff.federate(dataset, ff.ByUser(), clients=None)
    assert len(federation) == 3
    everyone = list(zip(columns["hospital"], columns["fever"], columns["pulse"], strict=True))
    for number, name in enumerate(sorted(HOSPITALS)):
        own = {
            (np.float32(fever), np.float32(pulse)) for hospital, fever, pulse in everyone if hospital == name
        }
        assert {tuple(row) for row in federation.client(number).stored()[0].numpy()} <= own


def test_clients_named_by_numbers_are_in_the_order_of_numbers(tmp_path: Path):
    columns = {"x": list(range(40)), "label": [0, 1] * 20, "user": [10] * 10 + [9] * 10 + [100] * 20}
    dataset = ff.read_table(write(tmp_path / "t.csv", columns), "label", client="user")
    assert dataset.group_names == ("9", "10", "100")
    assert np.bincount(dataset.groups).tolist() == [8, 8, 16]


def test_the_test_rows_are_chosen_by_the_seed(csv_table: Path):
    read = lambda seed: ff.read_table(csv_table, "state", numeric="none", seed=seed)  # noqa: E731
    assert read(3).test[0].equal(read(3).test[0])
    assert not read(3).test[0].equal(read(4).test[0])
    for seed in (3, 4):
        assert len(read(seed).test[1]) == 24
        np.testing.assert_array_equal(np.sort(rows_of(read(seed)), axis=0), np.sort(rows_of(read(5)), axis=0))


@pytest.mark.parametrize(
    "marks",
    [["1", "0"], ["true", "false"], ["True", "False"], ["TEST", "train"], [" test ", ""], ["1.0", "0.0"]],
    ids=["numbers", "true", "True", "words", "spaces", "floats"],
)
def test_marks_of_test_rows(marks: list[str], tmp_path: Path):
    """What programs write for yes; a column of floats is what is left of whole numbers with gaps."""
    columns = {
        "x": [0.5, 1.5, 2.5, 3.5],
        "label": [0, 1, 0, 1],
        "held": [marks[0], marks[1], marks[1], marks[0]],
    }
    dataset = ff.read_table(write(tmp_path / "t.csv", columns), "label", test="held", numeric="none")
    assert dataset.test[0].flatten().tolist() == [0.5, 3.5]
    assert dataset.train[0].flatten().tolist() == [1.5, 2.5]


def test_features_are_standardised_over_the_training_rows(table: Path):
    raw = ff.read_table(table, "state", features=["age", "fever"], numeric="none")
    dataset = ff.read_table(table, "state", features=["age", "fever"])
    x = dataset.train[0].double()
    assert x.mean(0).abs().max() < 1e-6
    assert (x.std(0, unbiased=False) - 1).abs().max() < 1e-6
    mean, std = raw.train[0].double().mean(0), raw.train[0].double().std(0, unbiased=False)
    assert (dataset.test[0] - (raw.test[0] - mean) / std).abs().max() < 1e-5


@pytest.mark.parametrize("value", [5.0, 0.1, 1e6 / 3])
def test_a_constant_feature_becomes_zero(value: float, tmp_path: Path):
    """Also where the mean of equal numbers is not quite that number."""
    columns = {"x": [value] * 20, "y": list(range(20)), "label": [0, 1] * 10}
    dataset = ff.read_table(write(tmp_path / "t.csv", columns), "label")
    assert dataset.train[0][:, 0].abs().max() < 1e-6
    assert dataset.test[0][:, 0].abs().max() < 1e-6


def test_csv_files_as_programs_write_them(tmp_path: Path):
    """With a mark of UTF-8 at the beginning, Windows line ends, quotes, and an empty line at the end."""
    path = tmp_path / "t.csv"
    path.write_bytes(
        '\ufeff"label",x,note\r\n"a, or b",1,"two\r\nlines"\r\nc,2,\r\n"a, or b",3,ü\r\nc,4,\r\n\r\n'.encode()
    )
    dataset = ff.read_table(path, "label", test=0.5, numeric="none")
    assert dataset.class_names == ("a, or b", "c")
    assert sorted(rows_of(dataset).flatten().tolist()) == [1, 2, 3, 4]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_tables_from_spreadsheets(separator: str, tmp_path: Path):
    path = tmp_path / "sheet.csv"
    lines = ["\ufeffx;who;label", "1.5;Ann, Bern;a", "2;Bo;b", "3;Cy;a", "4;Di;b"]
    path.write_text("\n".join(lines).replace(";", separator), "utf-8")
    dataset = ff.read_table(path, "label", test=0.5, numeric="none")
    assert sorted(rows_of(dataset).flatten().tolist()) == [1.5, 2, 3, 4]
    assert dataset.class_names == ("a", "b")


def test_a_table_notes_what_became_of_its_columns(csv_table: Path):
    assert ff.read_table(csv_table, "state", client="hospital", test="held").note == (
        "2 classes from age, fever, pulse, grade; not used: name"
    )
    assert ff.read_table(csv_table, "state", features=["age"]).note.startswith(
        "2 classes from age; not used: fever"
    )


def test_training_on_a_table(table: Path):
    dataset = ff.read_table(table, "state", client="hospital", features=["age", "fever", "pulse"])
    federation = ff.federate(dataset, ff.ByUser(), clients=None)
    run = ff.train(federation, "mlp", "fedgmt", LOCAL, rounds=5)
    assert run.accuracy > 0.9
    assert run.history[-1]["clients"] == [0, 1, 2]


GOOD = {"x": [1.0, 2.0, 3.0, 4.0], "who": ["a", "b", "a", "b"], "label": [0, 1, 0, 1]}


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"target": "lable"}, ["'lable'", "Did you mean 'label'?"]),
        ({"client": "whom"}, ["'whom'", "Did you mean 'who'?"]),
        ({"test": "tests"}, ["'tests'", "Known: label, who, x"]),
        ({"features": ["x", "z"]}, ["'z'", "Known: label, who, x"]),
        ({"features": ["who"], "categorical": ["x"]}, ["'x'", "categorical", "features"]),
        ({"features": []}, ["no column to learn from"]),
        ({"categorical": ["z"]}, ["'z'", "Known: who, x"]),
        ({"numeric": "standard"}, ["'standard'", "Did you mean 'standardise'?"]),
        ({"missing": "mean"}, ["'mean'", "refuse, median or a number"]),
        ({"missing": float("nan")}, ["'nan'", "refuse, median or a number"]),
        ({"task": "clasification"}, ["Did you mean 'classification'?"]),
        ({"target": "who", "task": "regression"}, ["'who'", "row 1", "'a'", "not a number"]),
        ({"test": "who"}, ["0 of 4 rows", "both parts need some"]),
        ({"test": 0}, ["test=0", "between 0 and 1"]),
        ({"test": 1.0}, ["test=1.0", "between 0 and 1"]),
        ({"test": -0.5}, ["between 0 and 1"]),
        ({"test": 0.01}, ["0 of 4 rows"]),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_wrong_arguments_for_a_table(options: dict[str, Any], parts: list[str], tmp_path: Path):
    path = write(tmp_path / "good.csv", GOOD)
    told = says(lambda: ff.read_table(path, **{"target": "label", **options}), *parts)
    assert str(path) in told or re.match(r"'x'|\w+=", told)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["no rows"]),
        (b"x,label\n", ["no rows"]),
        (b"x,label\n1,0\n2\n", ["line 3", "1 values for 2 columns"]),
        (b"x,label\n1,0,9\n", ["line 2", "3 values for 2 columns"]),
        (b"x,label\ncaf\xe9,0\n", ["UTF-8"]),
        (b"who,label\na,0\nb,1\n", ["no column to learn from"]),
        (b"x,label\n1,0\nnan,1\n2,0\n", ["'x'", "missing values", "Fill or drop"]),
        (b"x,label\n1,0\ninf,1\n2,0\n", ["'x'", "infinite values", "row 2"]),
        (b"x,x,label\n1,2,0\n3,4,1\n", ["'x'", "twice"]),
        (b"x,label\n1,0\n2,\n3,1\n4,0\n", ["'label'", "row 2"]),
        (
            b"x,label\n1,0\n2,nan\n3,1\n4,NA\n5, \n",
            ["'label'", "3 of 5 rows, first in row 2 (nan)", "fill or drop"],
        ),
        (b"x,label\n1,0\n,1\n2,0\nNA,1\n", ["'x'", "missing", "2 of 4 rows, first in row 2", "--features"]),
        (b"x,label\n1,0\n1e308,1\n-1e308,0\n1e308,1\n", ["'x'", "too large for single precision"]),
        (b'x,label\n1,0\n2,"1\n3,0\n4,1\n', ["unexpected end of data"]),
        (
            b"x,label\n" + b"".join(b"%d,w%d\n" % (row % 3, row) for row in range(60)),
            ["'label'", "60 different values in 60 rows", "few classes"],
        ),
    ],
    ids=[
        "empty",
        "header only",
        "short row",
        "long row",
        "latin 1",
        "no numbers",
        "nan",
        "inf",
        "twice",
        "no class",
        "missing classes",
        "gaps",
        "too large",
        "a quote that is not closed",
        "a word for every row",
    ],
)
def test_bad_csv_files(content: bytes, parts: list[str], tmp_path: Path):
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    says(lambda: ff.read_table(path, "label", test=0.5), path, *parts)


def test_bad_parquet_files(tmp_path: Path, monkeypatch):
    path = tmp_path / "bad.parquet"
    says(lambda: ff.read_table(path, "label"), path, "no file")
    path.write_bytes(b"PAR1 and nothing else")
    says(lambda: ff.read_table(path, "label"), path, "no sound Parquet file")
    write(path, {**GOOD, "label": [0, None, 0, 1]})
    says(lambda: ff.read_table(path, "label", test=0.5), path, "'label'", "row 2")
    write(path, {**GOOD, "who": ["a", None, "a", "b"]})
    says(lambda: ff.read_table(path, "label", client="who", test=0.5), path, "'who'", "row 2")
    write(path, {**GOOD, "label": [0.0, float("nan"), 1.0, None]})
    says(lambda: ff.read_table(path, "label", test=0.5), path, "'label'", "2 of 4 rows")
    write(path, {**GOOD, "label": [[0], [1], [0], [1]]})
    says(lambda: ff.read_table(path, "label", test=0.5), path, "'label'", "several values in row 1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pyarrow.*fedflat\[data\]"):
        ff.read_table(path, "label")


def test_a_number_is_one_class_and_one_client_however_it_is_written(tmp_path: Path):
    path = tmp_path / "numbers.csv"
    rows = [
        "x,who,label",
        *(f"{n},{('7', '7.0', '12')[n % 3]},{('1', '1.0', '10', '2.00')[n % 4]}" for n in range(24)),
    ]
    path.write_text("\n".join(rows))
    dataset = ff.read_table(path, "label", client="who")
    assert dataset.class_names == ("1", "2", "10")
    assert dataset.group_names == ("7", "12")
    labels = torch.cat([dataset.train[1], dataset.test[1]])
    assert torch.bincount(labels).tolist() == [12, 6, 6]
    owners = np.concatenate([dataset.groups, dataset.test_groups])
    assert np.bincount(owners).tolist() == [16, 8]
    # numbers that floats cannot tell apart are not the same, nor are words that look like numbers
    large = [2**60, 2**60 + 1]
    path.write_text("\n".join(["x,label", *(f"{n},{large[n % 2]}" for n in range(8))]))
    assert ff.read_table(path, "label").class_names == tuple(map(str, large))
    path.write_text("\n".join(["x,label", *(f"{n},{('1e1', '10', '1_0', '007')[n % 4]}" for n in range(8))]))
    assert set(ff.read_table(path, "label").class_names) == {"1e1", "10", "1_0", "007"}
    write(tmp_path / "floats.parquet", {"x": [1, 2, 3, 4], "label": [3.0, 1.0, 3.0, 1.0]})
    assert ff.read_table(tmp_path / "floats.parquet", "label", test=0.5).class_names == ("1", "3")


def test_the_number_of_a_class_does_not_depend_on_the_hash_seed(tmp_path: Path):
    words, numbers = tmp_path / "words.csv", tmp_path / "numbers.csv"
    names = ["b", "a", "-", "+", "2", "2.0", "inf", "10", "Ä", "a b"]
    rows = [f"{n},{names[-1 - n % 10]},{names[n % 10]}" for n in range(60)]
    words.write_text("\n".join(["x,who,label", *rows]))
    numbers.write_text(
        "x,who,label\n" + "".join(f"{n},{n % 2},{(n, 'nan')[n % 3 == 0]}\n" for n in range(20))
    )
    script = (
        "import sys; from fedflat.data.own import read_table\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        d = read_table(path, 'label', client='who')\n"
        "        print(ascii([d.class_names, d.group_names, d.train[1].tolist(), d.groups.tolist()]))\n"
        "    except ValueError as refusal:\n"
        "        print(refusal)\n"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", script, words, numbers],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def test_missing_groups_of_a_torch_dataset_are_refused():
    data = TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    says(lambda: ff.from_torch(data, data, groups=["a", None, "b", float("nan")]), "groups", "2 of 4 rows")


def test_by_user_needs_a_client_column(csv_table: Path):
    says(lambda: ff.federate(ff.read_table(csv_table, "state"), ff.ByUser(), clients=None), "by-user", "user")


# -- folders of images -----------------------------------------------------------------------------

COLOURS = {"blue": (20, 40, 200), "red": (200, 40, 20)}


def paint(
    path: Path, colour: Iterable[int], number: int = 0, size: tuple[int, int] = (6, 6), mode: str = "RGB"
) -> Path:
    """An image of nearly one colour; the first pixel's green says which image it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = size
    noise = np.random.default_rng(number).integers(0, 10, (height, width, 3))
    pixels = (np.array(list(colour)) + noise).astype(np.uint8)
    pixels[0, 0, 1] = number
    Image.fromarray(pixels).convert(mode).save(path, "PNG")
    return path


def numbers(inputs: torch.Tensor) -> list[int]:
    return inputs[:, 0, 0, 1].tolist()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """`photos/CLASS/*.png`, 20 reds and 10 blues."""
    for name, count in (("red", 20), ("blue", 10)):
        for number in range(count):
            paint(tmp_path / "photos" / name / f"{number}.png", COLOURS[name], number)
    return tmp_path / "photos"


def test_class_folders(photos: Path):
    dataset = ff.read_images(photos)
    assert dataset.class_names == ("blue", "red")
    assert dataset.name == "photos"
    assert dataset.train[0].dtype == torch.uint8
    assert dataset.train[0].shape[1:] == (6, 6, 3)
    found = [[], []]
    for inputs, labels in (dataset.train, dataset.test):
        redder = inputs[:, 3, 3, 0] > inputs[:, 3, 3, 2]
        assert redder.long().equal(labels)
        for label in (0, 1):
            found[label] += numbers(inputs[labels == label])
    assert [sorted(part) for part in found] == [list(range(10)), list(range(20))]
    assert dataset.groups is None


def test_every_class_keeps_its_share_for_testing(photos: Path):
    for seed in range(5):
        dataset = ff.read_images(photos, test=0.2, seed=seed)
        assert torch.bincount(dataset.test[1], minlength=2).tolist() == [2, 4]


def test_the_test_images_are_chosen_by_the_seed(photos: Path):
    chosen = [numbers(ff.read_images(photos, seed=seed).test[0]) for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_train_and_test_folders(tmp_path: Path):
    for split, first in (("train", 0), ("test", 100)):
        for name, colour in COLOURS.items():
            for number in range(3):
                paint(tmp_path / split / name / f"{number}.png", colour, first + number)
    dataset = ff.read_images(tmp_path, test=0.5)
    assert numbers(dataset.train[0]) == [0, 1, 2] * 2
    assert numbers(dataset.test[0]) == [100, 101, 102] * 2
    assert dataset.train[1].tolist() == dataset.test[1].tolist() == [0, 0, 0, 1, 1, 1]


@pytest.fixture
def cameras(tmp_path: Path) -> Path:
    """`cameras/CLIENT/CLASS/*.png`; the garden's camera never saw red."""
    number = 0
    for client, seen in (
        ("street", {"red": 10, "blue": 10}),
        ("garden", {"blue": 15}),
        ("attic", {"red": 5}),
    ):
        for name, count in seen.items():
            for _ in range(count):
                paint(tmp_path / "cameras" / client / name / f"{number}.png", COLOURS[name], number)
                number += 1
    return tmp_path / "cameras"


def test_client_folders(cameras: Path):
    dataset = ff.read_images(cameras, clients=True, test=0.2)
    assert dataset.group_names == ("attic", "garden", "street")
    assert dataset.class_names == ("blue", "red")
    assert np.bincount(dataset.groups).tolist() == [4, 12, 16]
    assert len(dataset.test[1]) == 8
    federation = ff.federate(dataset, ff.ByUser(), clients=None)
    homes = [range(35, 40), range(20, 35), range(20)]
    for client, home in enumerate(homes):
        assert set(numbers(federation.client(client).stored()[0])) <= set(home)


def test_grey_colour_and_other_modes(tmp_path: Path):
    for number, mode in enumerate(("RGB", "L", "RGBA", "P", "1", "CMYK")):
        path = tmp_path / "a" / f"{number}.png"
        if mode == "CMYK":
            image = Image.new("CMYK", (6, 6), (0, 255, 255, 0))
            image.save(path.with_suffix(".jpg"))
        else:
            paint(path, COLOURS["red"], number, mode=mode)
    colour, grey = ff.read_images(tmp_path), ff.read_images(tmp_path, channels=1)
    assert colour.train[0].shape[1:] == (6, 6, 3)
    assert grey.train[0].shape[1:] == (6, 6, 1)
    assert ff.federate(grey, clients=2).sample_shape == (1, 6, 6)
    assert len(grey.pipeline.mean) == 1


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_16_bits_keep_their_range(channels: int, tmp_path: Path):
    levels = np.array([0, 1, 200, 257, 300, 25700, 40000, 65535], dtype=np.uint16)
    for number in range(3):
        path = tmp_path / "a" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.tile(levels, (2, 1))).save(path)
    with Image.open(path) as stored:
        assert stored.mode.startswith("I;16")
    pixels = ff.read_images(tmp_path, channels=channels).train[0]
    wanted = np.rint(levels * (255 / 65535)).astype(int)
    assert pixels[0, 0, :, 0].tolist() == wanted.tolist() == [0, 0, 1, 1, 1, 100, 156, 255]
    assert (pixels == pixels[..., :1]).all()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is that large."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(100)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("side", [10_100, 12_000, 2_000_000_000])
def test_a_decompression_bomb_is_one_sentence(side: int, size: int | None, photos: Path):
    (photos / "blue" / "0.png").write_bytes(bomb(side, side))
    says(
        lambda: ff.read_images(photos, size=size),
        photos / "blue" / "0.png",
        "too many",
        "shrink or remove it",
    )


def test_images_that_do_not_fit_into_memory_are_one_sentence(photos: Path):
    told = says(
        lambda: ff.read_images(photos, size=10_000_000),
        "30 images of 10,000,000 x 10,000,000",
        "--image-size",
    )
    assert "9,000,000 GB" in told


@pytest.mark.parametrize(
    ("pixels", "part"),
    [(np.full((6, 6), 0.5, np.float32), "floats"), (np.full((6, 6), 70_000, np.int32), "16 bits")],
)
def test_images_of_unknown_range_are_refused(pixels: np.ndarray, part: str, photos: Path):
    Image.fromarray(pixels).save(photos / "blue" / "0.png", format="TIFF")
    says(lambda: ff.read_images(photos), photos / "blue" / "0.png", part)


def test_a_picture_that_is_a_program_is_not_run(photos: Path):
    (photos / "blue" / "0.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 6\n%%EndComments\nquit\n"
    )
    says(lambda: ff.read_images(photos), photos / "blue" / "0.png", "cannot identify")


def test_endings_in_capitals_and_other_files(tmp_path: Path):
    paint(tmp_path / "a" / "1.PNG", COLOURS["red"], 1)
    paint(tmp_path / "a" / "2.Png", COLOURS["red"], 2)
    paint(tmp_path / "b" / "3.png", COLOURS["blue"], 3)
    paint(tmp_path / "b" / "4.png", COLOURS["blue"], 4)
    (tmp_path / "a" / "Thumbs.db").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "readme.txt").write_text("hello")
    dataset = ff.read_images(tmp_path, test=0.5)
    assert dataset.class_names == ("a", "b")
    assert sorted(numbers(torch.cat([dataset.train[0], dataset.test[0]]))) == [1, 2, 3, 4]


@pytest.mark.parametrize(("size", "shape"), [(4, (4, 4)), ((3, 5), (3, 5))])
def test_images_are_resized(size, shape: tuple[int, int], tmp_path: Path):
    for number, (height, width) in enumerate(((6, 6), (9, 7), shape)):
        paint(tmp_path / "a" / f"{number}.png", COLOURS["red"], size=(height, width))
    dataset = ff.read_images(tmp_path, size=size, test=0.34)
    every = torch.cat([dataset.train[0], dataset.test[0]]).float()
    assert every.shape == (3, *shape, 3)
    assert (every[:, 1:, 1:].mean((0, 1, 2)) - torch.tensor([204.5, 44.5, 24.5])).abs().max() < 3


def test_images_are_normalised_over_the_training_set(photos: Path):
    dataset = ff.read_images(photos)
    prepared = dataset.pipeline.test(dataset.train[0]).double()
    assert prepared.mean((0, 2, 3)).abs().max() < 1e-5
    assert (prepared.std((0, 2, 3), unbiased=False) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("grey", [0, 9, 255])
def test_images_of_one_colour_become_zero(grey: int, tmp_path: Path):
    (tmp_path / "a").mkdir()
    for number in range(4):
        Image.new("RGB", (4, 4), (grey, grey, grey)).save(tmp_path / "a" / f"{number}.png")
    dataset = ff.read_images(tmp_path, test=0.25)
    assert dataset.pipeline.test(dataset.train[0]).abs().max() < 1e-6


@pytest.mark.parametrize("augment", [None, "fedgmt-paper"])
def test_training_on_a_folder(augment: str | None, photos: Path):
    federation = ff.federate(ff.read_images(photos), ff.Dirichlet(0.5), clients=3, augment=augment)
    run = ff.train(federation, "mlp", "fedsam", ff.LocalSGD(lr=0.02, epochs=2, batch_size=8), rounds=10)
    assert run.accuracy > 0.9


def test_training_on_client_folders(cameras: Path):
    federation = ff.federate(ff.read_images(cameras, clients=True), ff.ByUser(), clients=None)
    run = ff.train(federation, "cnn", "fedavg", ff.LocalSGD(lr=0.02, epochs=2, batch_size=8), rounds=3)
    assert run.accuracy > 0.9


def test_wrong_folders(tmp_path: Path, photos: Path):
    says(lambda: ff.read_images(tmp_path / "nowhere"), tmp_path / "nowhere", "no folder")
    says(lambda: ff.read_images(paint(tmp_path / "x" / "a.png", (1, 2, 3))), "no folder")
    (tmp_path / "empty").mkdir()
    says(lambda: ff.read_images(tmp_path / "empty"), tmp_path / "empty", "no folders of images")
    says(lambda: ff.read_images(photos, clients=True), photos, "below client folders")


def test_a_file_that_is_no_image_is_named(photos: Path):
    bad = photos / "red" / "bad.png"
    bad.write_bytes(b"not at all")
    says(lambda: ff.read_images(photos), bad, "remove or replace it")
    bad.write_bytes((photos / "red" / "1.png").read_bytes()[:80])
    says(lambda: ff.read_images(photos), bad, "remove or replace it")


def test_images_of_several_sizes_need_a_size(photos: Path):
    odd = paint(photos / "red" / "odd.png", COLOURS["red"], size=(7, 5))
    says(lambda: ff.read_images(photos), odd, "5x7", "6x6", "give a size")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"test": 0}, "between 0 and 1"),
        ({"test": 1.5}, "between 0 and 1"),
        ({"test": -0.5}, "between 0 and 1"),
        ({"test": 0.001}, "for testing"),
        ({"channels": 2}, "channels"),
        ({"size": 0}, "size"),
        ({"size": (4, -1)}, "size"),
    ],
    ids=str,
)
def test_wrong_arguments_for_images(options: dict[str, Any], part: str, photos: Path):
    says(lambda: ff.read_images(photos, **options), part)


def test_without_pillow_the_extra_is_named(photos: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"Pillow.*fedflat\[data\]"):
        ff.read_images(photos)


# -- torch datasets --------------------------------------------------------------------------------


class Stripes(TorchDataset):
    """Small images, striped across or down: a class each."""

    def __init__(self, count: int, kind: Callable[[np.ndarray], Any] = torch.from_numpy) -> None:
        self.count, self.kind = count, kind

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[Any, int]:
        stripes = np.tile(np.array([[1.0], [-1.0]], dtype=np.float32), (3, 6))
        noise = np.random.default_rng(number).standard_normal((6, 6)).astype(np.float32)
        down = number % 2
        return self.kind(((stripes.T if down else stripes) + 0.3 * noise)[None]), down


@pytest.mark.parametrize(
    "kind", [torch.from_numpy, np.asarray, np.ndarray.tolist], ids=["tensor", "numpy", "list"]
)
def test_any_torch_dataset(kind):
    train, test = Stripes(60, kind), Stripes(20, kind)
    dataset = ff.from_torch(train, test, name="stripes")
    assert dataset.name == "stripes"
    assert dataset.classes == 2
    assert dataset.train[0].shape == (60, 1, 6, 6)
    for number in (0, 7, 59):
        torch.testing.assert_close(dataset.train[0][number], Stripes(60)[number][0], check_dtype=False)
    assert dataset.train[1].tolist() == [0, 1] * 30
    run = ff.train(ff.federate(dataset, ff.Dirichlet(0.3), clients=4), "mlp", "scaffold", LOCAL, rounds=5)
    assert run.accuracy > 0.9


def test_a_tensor_dataset_and_groups():
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    owners = ["b"] * 5 + ["a"] * 10 + ["c"] * 15
    dataset = ff.from_torch(TensorDataset(x, y), TensorDataset(x[:6], y[:6]), groups=owners)
    assert dataset.train[0].equal(x) and dataset.train[1].equal(y)
    assert dataset.test[0].equal(x[:6]) and dataset.test[1].equal(y[:6])
    assert dataset.group_names == ("a", "b", "c")
    federation = ff.federate(dataset, ff.ByUser(), clients=None)
    assert federation.sizes == [10, 5, 15]
    assert federation.client(1).stored()[0].equal(x[:5])


def test_what_the_test_set_has_beyond_training_counts_as_a_class():
    x = torch.randn(4, 2)
    dataset = ff.from_torch(TensorDataset(x, torch.tensor([0, 1, 0, 1])), TensorDataset(x, torch.arange(4)))
    assert dataset.classes == 4


def pairs(*samples: Any) -> TorchDataset:
    class Listed(TorchDataset):
        def __len__(self) -> int:
            return len(samples)

        def __getitem__(self, number: int) -> Any:
            return samples[number]

    return Listed()


X = torch.zeros(2)


@pytest.mark.parametrize(
    ("samples", "parts"),
    [
        ([], ["empty"]),
        ([(X, 0), (torch.zeros(3), 1)], ["Sample 1", "(3,)", "(2,)", "resize or pad"]),
        ([(X, 0), X], ["Sample 1"]),
        ([(X, 0), (X, 1, 2)], ["Sample 1", "pair"]),
        ([(X, 0), (X, "cat")], ["Sample 1", "cat"]),
        ([("a text", 0)], ["Sample 0", "pair of an array and a class"]),
        ([(X, 0), (X, torch.tensor([0.0, 1.0]))], ["Sample 1", "class"]),
        ([(X, 0), (X, 0.7)], ["Sample 1", "0.7"]),
        ([(X, 0), (X, torch.tensor(2.5))], ["Sample 1", "2.5"]),
        ([(X, 0), (X, -1)], ["-1"]),
        ([(X, 0), {"image": X, "label": 0}], ["Sample 1"]),
    ],
    ids=[
        "empty",
        "shapes",
        "no pair",
        "triple",
        "word",
        "text",
        "one-hot",
        "float",
        "float tensor",
        "negative",
        "dict",
    ],
)
@pytest.mark.parametrize("which", ["training", "test"])
def test_wrong_torch_datasets(samples: list[Any], parts: list[str], which: str):
    good = pairs((X, 0), (X, 1))
    chosen = (pairs(*samples), good) if which == "training" else (good, pairs(*samples))
    told = says(lambda: ff.federate(ff.from_torch(*chosen), clients=1), *parts)
    if parts != ["-1"]:
        assert which in told


def test_groups_are_one_per_sample():
    good = pairs((X, 0), (X, 1))
    says(lambda: ff.from_torch(good, good, groups=["a"]), "1 groups for 2 training samples")


def test_a_dataset_without_a_length_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            yield X, 0

    says(lambda: ff.from_torch(Stream(), pairs((X, 0))), "training", "length")


def test_images_of_bytes_are_refused():
    """As torchvision's datasets give them without a transform: no model can multiply bytes."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 6, 3), dtype=np.uint8)
    for kind in (Image.fromarray, torch.from_numpy):
        samples = pairs(*((kind(image), number % 2) for number, image in enumerate(pixels)))
        says(lambda chosen=samples: ff.from_torch(chosen, chosen), "Sample 0", "training", "float")


def test_tokens_are_left_to_a_module_that_looks_them_up():
    tokens = torch.arange(40)[:, None].repeat(1, 3) % 8
    samples = TensorDataset(tokens, (tokens[:, 0] > 3).long())
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Flatten(), torch.nn.Linear(12, 2))
    run = ff.train(ff.federate(ff.from_torch(samples, samples), clients=2), model, local=LOCAL, rounds=20)
    assert run.accuracy == 1


# -- on the command line ---------------------------------------------------------------------------


@pytest.fixture
def fedflat(monkeypatch, capsys, tmp_path: Path) -> Callable[..., str]:
    """Run a command in this process, in a folder of its own; gives what it prints."""
    monkeypatch.setenv("FEDFLAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("FEDFLAT_DATA", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path, fails: bool = False) -> str:
        monkeypatch.setattr(sys, "argv", ["fedflat", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        told = capsys.readouterr()
        assert stop.value.code == (2 if fails else 0), told.err
        assert not fails or len(told.err.strip().splitlines()) == 1
        return told.err if fails else told.out

    return run


def test_run_on_a_table(fedflat, csv_table: Path, tmp_path: Path):
    out = tmp_path / "out"
    told = fedflat(
        "run", "--dataset", csv_table, "--target", "state", "--client-column", "hospital", "--partition", "by-user",
        "-m", "fedavg", "--rounds", "6", "--per-round", "2", "--epochs", "3", "--out", out,
    )  # fmt: skip
    assert "patients, 96 samples over 3 clients by-user, 2 a round, 6 rounds" in told
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["accuracy"] > 0.9
    assert all(set(row["clients"]) <= {0, 1, 2} and len(row["clients"]) == 2 for row in rows)


def test_a_client_column_deals_out_by_user(fedflat, csv_table: Path, tmp_path: Path):
    """Without a partition: a column that says whose rows are whose is not to be ignored."""
    table = ("run", "--dataset", csv_table, "--target", "state", "--client-column", "hospital")
    short = ("-m", "fedavg", "--rounds", "1", "--features", "age, fever", "--out", tmp_path / "out")
    told = fedflat(*table, *short)
    assert "patients, 96 samples over 3 clients by-user" in told
    assert "(2 classes from age, fever; not used: pulse, name, grade, held)" in told
    kept = yaml.safe_load((tmp_path / "out" / "experiment.yaml").read_text())
    assert kept["partition"] == "by-user" and kept["features"] == ["age", "fever"]
    assert not {"client_folders", "image_size"} & set(
        kept
    )  # runs from before there were such keys are like this one
    again = fedflat(*table, "--partition", "iid", "--clients", "4", "-m", "fedavg", "--rounds", "1")
    assert "96 samples over 4 clients by iid" in again


def test_images_of_many_sizes_and_of_many_clients(fedflat, tmp_path: Path):
    for number in range(24):
        owner, colour, size = ("ann", "bo")[number % 2], ("blue", "red")[number // 2 % 2], (6 + number % 3, 8)
        paint(tmp_path / "album" / owner / colour / f"{number}.png", COLOURS[colour], number, size)
    run = ("run", "--dataset", "album", "--client-folders", "-m", "fedavg", "--rounds", "2", "--lr", "0.01")
    assert "--image-size" in fedflat(*run, fails=True)
    assert "over 2 clients by-user" in fedflat(*run, "--image-size", "6")
    assert "samples of 2 classes" in fedflat(
        "split", "album", "by-user", "--client-folders", "--image-size", "6"
    )


def test_run_on_a_folder(fedflat, photos: Path):
    told = fedflat(
        "run", "--dataset", photos, "--partition", "iid", "--clients", "3", "--per-round", "3", "-m", "fedsam",
        "--rounds", "3", "--augment", "crop-flip", "--lr", "0.01",
    )  # fmt: skip
    assert "photos, 24 samples over 3 clients by iid" in told


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_split_draws_a_folder(ending: str, fedflat, photos: Path, tmp_path: Path):
    picture = tmp_path / f"x.{ending}"
    told = fedflat("split", f"{photos}/", "iid", "--clients", "3", "--out", picture)
    assert "3 clients" in told
    assert "24 samples of 2 classes" in told
    assert f"Drawn to {picture}" in told
    if ending == "png":
        with Image.open(picture) as image:
            image.load()
            assert image.format == "PNG"
            assert min(image.size) > 100
            assert len(image.convert("RGB").getcolors(image.width * image.height)) > 2
    else:
        assert "<svg" in picture.read_text()


def test_split_draws_into_a_directory(fedflat, photos: Path, tmp_path: Path):
    (tmp_path / "there.d").mkdir()
    for place in ("there.d", "new/one"):
        told = fedflat("split", photos, "iid", "--clients", "3", "--out", place)
        assert f"Drawn to {place}/photos-iid.png" in told
        with Image.open(tmp_path / place / "photos-iid.png") as image:
            assert image.format == "PNG"
    assert sorted(p.name for p in tmp_path.iterdir() if "new" in p.name) == ["new"]


def test_split_takes_a_folder_in_the_working_directory(fedflat, photos: Path):
    assert "24 samples of 2 classes" in fedflat("split", "photos/", "iid", "--clients", "3")
    assert "24 samples of 2 classes" in fedflat("split", "photos", "iid", "--clients", "3")


def test_split_of_a_table_by_user(fedflat, csv_table: Path, tmp_path: Path):
    told = fedflat(
        "split", csv_table, "by-user", "--target", "state", "--client-column", "hospital", "--plot"
    )
    assert "3 clients" in told
    assert "96 samples of 2 classes, all used, none twice" in told
    with Image.open(tmp_path / "patients-by-user.png") as image:
        assert image.format == "PNG"


def test_datasets_are_listed_with_their_places(fedflat, tmp_path: Path):
    folder = tmp_path / "data" / "ag_news"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.csv").write_text('"1","a","b"\n')
    for told in (fedflat("datasets"), fedflat("datasets", "--data", tmp_path / "data")):
        lines = told.splitlines()
        assert lines[0] == "digits  ships with fedflat"
        assert any(line.startswith("ag-news  in ") and line.endswith("ag_news") for line in lines)
        for missing in (
            "cifar10",
            "cifar100",
            "fashion-mnist",
            "cinic10",
            "tiny-imagenet",
            "office-home",
            "shakespeare",
        ):
            assert f"{missing}  not found" in lines
        assert any("IDX" in line for line in lines)


def test_mistakes_on_the_command_line(fedflat, csv_table: Path, photos: Path):
    run = ("run", "--rounds", "1", "--dataset")
    assert "--target COLUMN" in fedflat(*run, csv_table, fails=True)
    assert "Did you mean 'state'?" in fedflat(*run, csv_table, "--target", "stat", fails=True)
    assert "no file nowhere.csv" in fedflat(*run, "nowhere.csv", "--target", "x", fails=True)
    assert "by-user needs" in fedflat(
        *run, csv_table, "--target", "state", "--partition", "by-user", fails=True
    )
    assert "no folders of images" in fedflat(*run, f"{photos}/red/", fails=True)
    assert "Did you mean" in fedflat(*run, photos, "--augment", "cropflip", fails=True)
    asked = fedflat(*run, csv_table, "--target", "state", "--client-column", "hospital", "--partition", "by-user",
                    "--clients", "4", fails=True)  # fmt: skip
    assert "3 users, fewer than the 4 clients" in asked
    column = ("--client-column", "hospital")
    assert "client_column: this goes with a csv" in fedflat("run", "--rounds", "1", *column, fails=True)
    assert "image_size: this goes with a folder of images" in fedflat(
        *run, csv_table, "--target", "state", "--image-size", "3", fails=True
    )


def test_names_with_square_brackets_are_told_whole(fedflat, csv_table: Path, tmp_path: Path):
    """They are text, not colours."""
    odd = csv_table.rename(tmp_path / "patients[red].csv")
    assert str(odd) in fedflat("split", odd, "iid", fails=True)
    told = fedflat("split", odd, "iid", "--target", "state", "--clients", "2", "--out", tmp_path / "x[1].png")
    assert f"Drawn to {tmp_path / 'x[1].png'}" in told
    told = fedflat(
        "run", "--dataset", odd, "--target", "state", "--partition", "iid", "-m", "fedavg", "--rounds", "1"
    )
    assert told.startswith("patients[red], 96 samples")


# -- what a run keeps of it ------------------------------------------------------------------------


WARD = ["age", "fever", "pulse", "grade", "ward", "far"]


def ward(count: int = 120) -> dict[str, list[Any]]:
    """The patients, with a column that never changes and one that is very far from 0."""
    columns = patients(count)
    far = (1e6 + np.array(columns["fever"])).tolist()
    return {**columns, "ward": [0.1] * count, "far": far}


def kept(run: Path) -> dict[str, Any]:
    return json.loads((run / "preprocessing.json").read_text())


def prepared_by_hand(path: Path, about: dict[str, Any]) -> np.ndarray:
    """Every row of a csv file as the file of a run says: features, class and client, sorted; none of the package."""
    with path.open(newline="") as file:
        raw = list(csv.DictReader(file))
    rows = []
    for row in raw:
        values = [(float(row[f["name"]]) - f["centre"]) / f["scale"] for f in about["features"]]
        client = about["clients"].index(row[about["client_column"]]) if "clients" in about else 0
        rows.append(
            [*np.array(values).astype(np.float32), about["class_names"].index(row[about["target"]]), client]
        )
    return np.array(sorted(rows))


def trained_on(federation: ff.Federation, dataset: ff.Dataset) -> np.ndarray:
    """The same of what clients train on and of the test set."""
    owners = np.repeat(np.arange(len(federation)), federation.sizes)
    parts = [(*federation.union().stored(), owners), (*dataset.test, dataset.test_groups)]
    return np.array(
        sorted([*x.numpy(), int(y), int(o)] for part in parts for x, y, o in zip(*part, strict=True))
    )


@pytest.mark.parametrize("standardise", [True, False])
def test_a_run_keeps_how_rows_of_a_table_become_inputs(standardise: bool, tmp_path: Path):
    table, out = write(tmp_path / "ward.csv", ward()), tmp_path / "out"
    scaling = "standardise" if standardise else "none"
    dataset = ff.read_table(table, "state", client="hospital", features=WARD, numeric=scaling)
    federation = ff.federate(dataset, ff.ByUser())
    ff.train(federation, "mlp", local=LOCAL, rounds=1, out=out)
    about = kept(out)
    assert [f["name"] for f in about["features"]] == WARD
    assert about["class_names"] == ["healthy", "sick"] and about["target"] == "state"
    assert about["clients"] == sorted(HOSPITALS)
    assert about["format"] == 1 and about["kind"] == "table"
    constant = about["features"][4]
    assert constant["scale"] == 1.0 and constant["centre"] == (pytest.approx(0.1) if standardise else 0.0)
    np.testing.assert_array_equal(prepared_by_hand(table, about), trained_on(federation, dataset))
    deviations = dataset.train[0].numpy()[:, [0, 1, 2, 3, 5]].std(0)
    assert (np.abs(deviations - 1) < 1e-4).all() == standardise


def test_clients_have_names_only_where_each_is_one_owner(csv_table: Path, tmp_path: Path):
    dataset = ff.read_table(csv_table, "state", client="hospital")
    for partition, clients in ((ff.IID(), 4), (ff.Dirichlet(0.3), 3)):
        assert "clients" not in ff.federate(dataset, partition, clients).preprocessing
    chosen = ff.federate(dataset, ff.ByUser(), clients=2)
    assert len(chosen.preprocessing["clients"]) == 2
    numbers = [sorted(HOSPITALS).index(name) for name in chosen.preprocessing["clients"]]
    assert [int((dataset.groups == n).sum()) for n in numbers] == chosen.sizes


def test_a_column_with_gaps_is_refused_and_the_file_says_so(csv_table: Path):
    assert ff.federate(ff.read_table(csv_table, "state"), clients=3).preprocessing["missing"] == "refuse"
    columns = {**patients(), "pulse": [None, *patients()["pulse"][1:]]}
    says(lambda: ff.read_table(write(csv_table, columns), "state"), "pulse", "missing")


def test_command_line_runs_and_sweeps_keep_it_and_a_resume_leaves_it(fedflat, tmp_path: Path):
    table, out = write(tmp_path / "ward.csv", ward()), tmp_path / "out"
    data = (
        "--dataset",
        table,
        "--target",
        "state",
        "--client-column",
        "hospital",
        "--features",
        ",".join(WARD),
    )
    fedflat("run", *data, "-m", "fedavg", "--rounds", "1", "--out", out)
    first = (out / "preprocessing.json").read_bytes()
    dataset = ff.read_table(table, "state", client="hospital", features=WARD)
    trained = trained_on(ff.federate(dataset, ff.ByUser()), dataset)
    np.testing.assert_array_equal(prepared_by_hand(table, kept(out)), trained)
    fedflat("resume", out, "--rounds", "2")
    assert (out / "preprocessing.json").read_bytes() == first
    fedflat("sweep", out / "experiment.yaml", "--seeds", "2", "--set", "rounds=1", "--out", tmp_path / "grid")
    for run in (tmp_path / "grid").rglob("metrics.jsonl"):
        assert (run.parent / "preprocessing.json").read_bytes() == first


def test_going_on_with_a_changed_table_is_told_and_what_was_kept_stays(csv_table: Path, tmp_path: Path):
    """Other values under the same labels: nothing else would notice."""
    out = tmp_path / "out"

    def train(rounds: int) -> None:
        federation = ff.federate(
            ff.read_table(csv_table, "state", features=["fever"], test="held"), clients=3
        )
        ff.train(federation, "mlp", local=LOCAL, rounds=rounds, out=out, resume=rounds > 1)

    train(1)
    before = (out / "preprocessing.json").read_bytes()
    columns = patients()
    write(csv_table, {**columns, "fever": [value + 1 for value in columns["fever"]]})
    with pytest.warns(UserWarning, match=r"preprocessing\.json.*features"):
        train(2)
    assert (out / "preprocessing.json").read_bytes() == before


def test_a_run_keeps_how_images_become_inputs(cameras: Path, tmp_path: Path):
    dataset, out = ff.read_images(cameras, size=5, clients=True), tmp_path / "out"
    federation = ff.federate(dataset, ff.ByUser())
    ff.train(federation, "mlp", local=LOCAL, rounds=1, out=out)
    about = kept(out)
    assert about["kind"] == "images" and about["class_names"] == ["blue", "red"]
    assert about["clients"] == ["attic", "garden", "street"]
    height, width = about["size"]
    found = []
    for path in sorted(cameras.glob("*/*/*.png")):
        with Image.open(path) as opened:
            image = opened.convert(about["colour"]).resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(image, dtype=float).reshape(height, width, about["channels"]) / about["scale"]
        values = (pixels - about["mean"]) / about["deviation"]
        found.append([*values.transpose(2, 0, 1).ravel(), about["class_names"].index(path.parent.name)])
    shards = [federation.union(), federation.test]
    batches = [[array.numpy() for array in batch] for shard in shards for batch in shard.batches(100)]
    seen = [[*x.ravel(), y] for batch in batches for x, y in zip(*batch, strict=True)]
    np.testing.assert_allclose(np.array(sorted(seen)), np.array(sorted(found)), atol=2e-6)


def test_named_data_keep_what_is_known_of_them(tmp_path: Path):
    about = ff.federate("digits", clients=5).preprocessing
    assert about["class_names"] == list("0123456789")
    assert (about["kind"], about["size"], about["channels"], about["scale"]) == ("images", [8, 8], 1, 1)
    with np.load(Path(ff.__file__).parent / "data" / "digits.npz") as stored:
        images = stored["images"]
    values = np.sort(((images - about["mean"][0]) / about["deviation"][0]).astype(np.float32).ravel())
    federation = ff.federate("digits", clients=5)
    seen = torch.cat([federation.union().inputs, federation.test.inputs]).numpy().ravel()
    np.testing.assert_allclose(np.sort(seen), values, atol=1e-6)
    x, y = torch.randn(6, 4), torch.arange(6) % 2
    own = ff.from_torch(TensorDataset(x, y), TensorDataset(x, y), groups=list("ababab"))
    assert ff.federate(own, ff.ByUser()).preprocessing == {
        "format": 1, "dataset": "own", "kind": "tensors", "shape": [4], "task": "classification",
        "classes": 2, "class_names": [],
        "clients": ["a", "b"],
    }  # fmt: skip
    ff.train(ff.Federation([(x, y)]), "mlp", local=LOCAL, rounds=1, out=tmp_path / "out")
    assert not (tmp_path / "out" / "preprocessing.json").exists()
