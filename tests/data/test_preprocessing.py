"""How tables become inputs, against scikit-learn; fitted on training rows only; and back from JSON."""

import csv
import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.impute import MissingIndicator
from sklearn.preprocessing import OneHotEncoder, RobustScaler, StandardScaler

import fedflat as ff
from fedflat.data.features import RARE
from fedflat.data.preprocessing import Preprocessing, Table
from fedflat.errors import FedflatError


def write(path: Path, columns: dict[str, list[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    return path


def held_out(count: int) -> list[int]:
    return [int(number % 4 == 3) for number in range(count)]


def read(path: Path, columns: dict[str, list[Any]], **options: Any) -> tuple[ff.Dataset, Table]:
    count = len(next(iter(columns.values())))
    labels = [("a", "b")[number % 2] for number in range(count)]
    table = write(path, {**columns, "label": labels, "held": held_out(count)})
    dataset = ff.read_table(table, "label", test="held", **options)
    found = Preprocessing.from_dict(ff.federate(dataset, clients=2).preprocessing)
    assert isinstance(found, Table)
    return dataset, found


def says(action: Any, *parts: str) -> None:
    with pytest.raises(FedflatError) as caught:
        action()
    told = str(caught.value)
    assert "\n" not in told
    for part in parts:
        assert part in told, told


NUMBERS = st.floats(-1e6, 1e6, width=32)
WORDS = st.sampled_from(["red", "green", "blue", "dark blue", "Ä", "12 px", "x,y", 'say "no"'])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(NUMBERS, NUMBERS), min_size=8, max_size=60), st.sampled_from(["standardise", "robust"])
)
def test_scaled_numbers_are_those_of_scikit_learn(tmp_path_factory, rows, scaling: str):
    columns = {"one": [a for a, _ in rows], "two": [b for _, b in rows]}
    dataset, _ = read(tmp_path_factory.mktemp("t") / "t.csv", columns, numeric=scaling)
    raw = np.array(rows)
    held = np.array(held_out(len(rows)), dtype=bool)
    scaler = (StandardScaler if scaling == "standardise" else RobustScaler)().fit(raw[~held])
    spread = scaler.scale_ / np.maximum(np.abs(raw[~held]).max(0), 1e-300)
    sound = (spread > 1e-9) & np.isfinite(
        spread
    )  # what is a constant but for rounding is told apart differently
    for found, part in ((dataset.train[0], ~held), (dataset.test[0], held)):
        wanted = scaler.transform(raw[part])
        np.testing.assert_allclose(found.numpy()[:, sound], wanted[:, sound], rtol=2e-6, atol=2e-6)


@settings(max_examples=40, deadline=None)
@given(st.lists(WORDS, min_size=8, max_size=120))
def test_categories_are_those_of_scikit_learn(tmp_path_factory, words):
    """Rare levels share an input, into which unseen ones go; where none is rare, those are 0 everywhere."""
    columns = {"x": list(range(len(words))), "colour": words}
    dataset, found = read(
        tmp_path_factory.mktemp("t") / "t.csv", columns, categorical=["colour"], numeric="none"
    )
    held = np.array(held_out(len(words)), dtype=bool)
    raw = np.array(words, dtype=object)[:, None]
    encoder = OneHotEncoder(
        min_frequency=RARE, handle_unknown="infrequent_if_exist", sparse_output=False, dtype=np.float32
    ).fit(raw[~held])
    np.testing.assert_array_equal(dataset.train[0].numpy()[:, 1:], encoder.transform(raw[~held]))
    np.testing.assert_array_equal(dataset.test[0].numpy()[:, 1:], encoder.transform(raw[held]))
    with pytest.warns(UserWarning, match="'colour' has levels in 1 of 1 rows"):
        new = found.apply({"x": [0], "colour": ["never seen"]})
    np.testing.assert_array_equal(new.numpy()[:, 1:], encoder.transform([["never seen"]]))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.integers(-1000, 1000)), min_size=12, max_size=60),
    st.sampled_from(["median", 7.5]),
)
def test_gaps_are_filled_and_indicated_as_by_scikit_learn(tmp_path_factory, values, missing):
    held = np.array(held_out(len(values)), dtype=bool)
    raw = np.array([np.nan if v is None else v for v in values])[:, None]
    if np.isnan(raw[~held]).all():
        return
    columns = {"x": ["" if v is None else v for v in values], "y": list(range(len(values)))}
    dataset, _ = read(
        tmp_path_factory.mktemp("t") / "t.csv", columns, features=["x"], missing=missing, numeric="none"
    )
    fill = np.nanmedian(raw[~held]) if missing == "median" else missing
    indicator = MissingIndicator(features="missing-only", error_on_new=False).fit(raw[~held])
    for found, part in ((dataset.train[0], ~held), (dataset.test[0], held)):
        filled = np.where(np.isnan(raw[part]), fill, raw[part])
        np.testing.assert_array_equal(found.numpy(), np.hstack([filled, indicator.transform(raw[part])]))


def test_scaling_does_not_look_at_gaps_and_a_filled_value_is_scaled(tmp_path: Path):
    values = [1.0, 2.0, None, 0, 4.0, 9.0, 5.0, 0] * 3
    dataset, found = read(tmp_path / "t.csv", {"x": values}, missing="median")
    raw = np.array([np.nan if v is None else v for v in values])[:, None]
    train = raw[~np.array(held_out(len(values)), dtype=bool)]
    scaler = StandardScaler().fit(train)  # which passes over NaN
    wanted = scaler.transform(np.where(np.isnan(train), np.nanmedian(train), train))
    np.testing.assert_allclose(dataset.train[0].numpy()[:, :1], wanted, rtol=1e-6)
    assert found.inputs == ["x", "x missing"]


def test_a_missing_word_is_indicated(tmp_path: Path):
    words = ["red", "", "blue", "red", "blue", "NA"] * 8
    dataset, found = read(tmp_path / "t.csv", {"colour": words}, missing="median")
    assert found.inputs == ["colour=blue", "colour=red", "colour missing"]
    train = [word for word, held in zip(words, held_out(48), strict=True) if not held]
    rows = {"red": [0, 1, 0], "blue": [1, 0, 0], "": [0, 0, 1], "NA": [0, 0, 1]}
    assert dataset.train[0].tolist() == [rows[word] for word in train]


@pytest.mark.parametrize("numeric", ["standardise", "robust"])
def test_test_rows_are_never_looked_at(numeric: str, tmp_path: Path):
    columns: dict[str, list[Any]] = {
        "x": [float(n) for n in range(80)],
        "gaps": ["" if n % 10 == 0 else n for n in range(80)],
        "word": [("u", "v", "w")[n % 3] for n in range(80)],
    }
    other = {name: list(values) for name, values in columns.items()}
    for row in np.flatnonzero(held_out(80)):
        other["x"][row], other["gaps"][row], other["word"][row] = 1e5, "", "never in training"
    options = {"numeric": numeric, "missing": "median", "features": ["x", "gaps", "word"]}
    first, second = (read(tmp_path / "t.csv", one, **options) for one in (columns, other))
    assert first[1] == second[1]
    assert torch.equal(first[0].train[0], second[0].train[0])


def test_new_rows_of_every_kind_become_equal_inputs(tmp_path: Path):
    columns: dict[str, list[Any]] = {
        "x": [n / 7 for n in range(40)],
        "gaps": [None if n % 10 == 0 else n for n in range(40)],
        "word": [("u", "v")[n % 2] for n in range(40)],
        "grade": [(1, 2.0, 10)[n % 3] for n in range(40)],
    }
    dataset, found = read(tmp_path / "t.csv", columns, categorical=["word", "grade"], missing="median")
    assert found.inputs == ["x", "gaps", "gaps missing", "word=u", "word=v", "grade=1", "grade=2", "grade=10"]
    inputs = found.apply(columns)
    held = np.array(held_out(40), dtype=bool)
    assert torch.equal(inputs[~held], dataset.train[0]) and torch.equal(inputs[held], dataset.test[0])
    dicts = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    assert torch.equal(found.apply(dicts), inputs)
    frame = pa.table({**columns, "grade": [float(value) for value in columns["grade"]], "more": columns["x"]})
    assert torch.equal(found.apply(frame), inputs)
    assert torch.equal(found.apply(frame.to_pydict()), inputs)
    assert found.apply(columns, torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    "dates",
    [
        ["2024-01-31", "2024-02-01"],
        ["31.1.2024", "1.2.24"],
        ["1/31/2024 10:15", "2/1/2024 9:00:30"],
        ["2024-01-31T10:15:00Z", ""],
        ["10:15", "23:59"],
    ],
)
def test_dates_are_refused_with_a_remedy(dates: list[str], tmp_path: Path):
    columns = {"x": list(range(40)), "seen": dates * 20}
    says(lambda: read(tmp_path / "t.csv", columns), "'seen'", "dates or times", dates[0], "--features")
    dataset, _ = read(tmp_path / "t.csv", columns, features=["x"])
    assert dataset.train[0].shape[1] == 1


def test_dates_of_a_parquet_file_are_refused(tmp_path: Path):
    import pyarrow.parquet as pq

    days = [datetime.date(2024, 1, 1 + n) for n in range(8)]
    pq.write_table(pa.table({"day": days, "x": range(8), "y": [0, 1] * 4}), tmp_path / "t.parquet")
    says(lambda: ff.read_table(tmp_path / "t.parquet", "y"), "'day'", "dates or times")


def test_refused_gaps_are_counted_by_column(tmp_path: Path):
    columns = {
        "x": ["", *range(19)],
        "word": [*("u", "v") * 8, "", "NA", "v", "u"],
        "whole": list(range(20)),
    }
    says(
        lambda: read(tmp_path / "t.csv", columns),
        "'x' in 1 of 20 rows, first in row 1",
        "'word' in 2 of 20 rows, first in row 17",
        "--missing median",
    )


def test_words_with_many_levels_are_used_only_where_asked_for(tmp_path: Path):
    columns = {"x": list(range(60)), "name": [f"person {n}" for n in range(60)], "same": ["u"] * 60}
    dataset, found = read(tmp_path / "t.csv", columns)
    assert found.inputs == ["x"]
    assert dataset.note == "2 classes from x; not used: name, same"
    _, found = read(tmp_path / "t.csv", columns, categorical=["name"])
    assert found.inputs == ["x", "name other"]  # none is frequent enough for an input of its own


def test_a_typing_mistake_in_a_column_of_numbers_is_found_where_the_column_is_named(tmp_path: Path):
    columns = {"x": ["12O", *range(19)]}
    says(lambda: read(tmp_path / "t.csv", columns, features=["x"]), "'x', row 1 is '12O', not a number")


# -- the task ----------------------------------------------------------------------------------------


def table_with_target(path: Path, target: list[Any]) -> Path:
    return write(path, {"x": list(range(len(target))), "y": target})


@pytest.mark.parametrize(
    ("target", "task"),
    [
        ([n / 7 for n in range(60)], "regression"),
        ([n * n for n in range(60)], "regression"),
        ([f"{n % 3}.0" for n in range(60)], "classification"),
        ([n % 3 / 2 for n in range(60)], "classification"),
        ([n % 25 for n in range(60)], "classification"),
        ([n % 25 + 0.5 for n in range(60)], "regression"),
        ([("yes", "no")[n % 2] for n in range(60)], "classification"),
    ],
)
def test_the_task_is_what_the_target_looks_like_unless_said_otherwise(target, task: str, tmp_path: Path):
    path = table_with_target(tmp_path / "t.csv", target)
    dataset = ff.read_table(path, "y")
    assert dataset.task == task
    assert (f"{task}, since 'y' has" in dataset.note) == (len(set(target)) > 20)
    if not isinstance(target[0], str):
        numbers = ff.read_table(path, "y", task="regression")
        found = torch.cat([numbers.train[1], numbers.test[1]])
        assert found.shape == (60, 1) and found.dtype == torch.float32
        np.testing.assert_array_equal(
            np.sort(found.numpy().ravel()), np.sort(np.array(target, dtype=np.float32))
        )


def test_regression_is_partitioned_without_classes_and_trained_with_a_loss_for_numbers(tmp_path: Path):
    path = table_with_target(tmp_path / "t.csv", [n / 7 for n in range(60)])
    dataset = ff.read_table(path, "y")
    says(lambda: ff.federate(dataset, ff.Dirichlet(0.1), clients=3), "iid, quantity or by-user")
    federation = ff.federate(dataset, ff.IID(), clients=3)
    assert (federation.task, federation.classes) == ("regression", 1)
    run = ff.train(federation, "mlp", rounds=20, local=ff.LocalSGD(lr=0.01))
    named = ff.train(
        federation, "mlp", rounds=20, local=ff.LocalSGD(lr=0.01), loss=torch.nn.functional.mse_loss
    )
    torch.testing.assert_close(run.server.w, named.server.w)
    assert run.accuracy is None
    assert run.history[-1]["loss"] < 0.1 * run.history[0]["loss"]


# -- plain values ------------------------------------------------------------------------------------


def sound() -> dict[str, Any]:
    return {
        "format": 1,
        "dataset": "t",
        "kind": "table",
        "target": "y",
        "missing": "median",
        "features": [
            {"name": "x", "kind": "numeric", "centre": 1.0, "scale": 2.0, "fill": 1.0, "indicator": True},
            {"name": "word", "kind": "categorical", "levels": ["u", "v"], "other": True},
        ],
        "task": "classification",
        "classes": 2,
        "class_names": ["a", "b"],
    }


def test_plain_values_there_and_back():
    found = Preprocessing.from_json(json.dumps(sound()))
    assert found.to_dict() == sound()
    assert found.input_shape == (5,)
    assert Preprocessing.from_dict(found.to_dict()) == found
    digits = ff.federate("digits", clients=2).preprocessing
    assert Preprocessing.from_dict(digits).to_dict() == digits


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"format": 2}, ["format 2", "knows 1"]),
        ({"format": "1" * 100}, ["knows 1"]),
        ({"kind": "sound"}, ["unknown kind, sound"]),
        ({"kind": ["table"]}, ["unknown kind"]),
        ({"features": []}, ["'features'"]),
        ({"features": [{"name": "x", "kind": "numeric", "centre": 1.0, "scale": 0.0}]}, ["scale"]),
        ({"features": [{"name": "x", "kind": "numeric", "centre": float("nan"), "scale": 1}]}, ["centre"]),
        ({"features": [{"name": "x", "kind": "magic"}]}, ["features"]),
        ({"class_names": ["a"]}, ["1 names for 2 classes"]),
        ({"classes": 0}, ["'classes'"]),
        ({"missing": "guess"}, ["missing"]),
        ({"code": "import os"}, ["'code'"]),
    ],
)
def test_what_is_not_sound_is_refused_in_a_sentence(change: dict[str, Any], parts: list[str]):
    says(lambda: Preprocessing.from_dict({**sound(), **change}, "p.json"), "p.json", *parts)


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "{", "null", '{"kind": "table"}', b"\xff\xfe", "[" * 100_000]
)
def test_what_is_no_description_at_all_is_refused_in_a_sentence(text):
    says(lambda: Preprocessing.from_json(text, "p.json"), "p.json", "was it edited")


CELLS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["", "NA", "1e400", "inf", "2020-01-01", "1_000", "²"]),
    st.dates(),
    st.binary(max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(CELLS, CELLS), max_size=5), st.sampled_from(["refuse", "median"]))
@pytest.mark.filterwarnings("ignore:.*levels")
def test_odd_rows_are_refused_in_a_sentence_or_become_finite_inputs(rows, missing: str):
    found = Preprocessing.from_dict({**sound(), "missing": missing})
    columns = {"x": [a for a, _ in rows], "word": [b for _, b in rows]}
    refusals = []
    try:
        inputs = found.apply(columns)
    except FedflatError as refusal:
        refusals.append(str(refusal))
    else:
        assert inputs.shape == (len(rows), 5) and bool(torch.isfinite(inputs).all())
        assert bool((inputs[:, 2:].sum(1) <= 1).all())
    assert not any("\n" in told for told in refusals)


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ({"x": [1]}, ["no column 'word'"]),
        ({"x": [1], "words": ["u"]}, ["no column 'word'", "Did you mean 'words'?"]),
        ({"x": [1, 2], "word": ["u"]}, ["different lengths"]),
        ({"x": [], "word": []}, ["no rows"]),
        ({}, ["no rows"]),
        ([], ["no rows"]),
        ([{"x": 1}, {"x": 2}], ["no column 'word'"]),
        ([[1, "u"]], ["no columns by name", "data frame"]),
        ("rows", ["no columns by name"]),
        (7, ["no columns by name"]),
        ({"x": ["one"], "word": ["u"]}, ["'x', row 1 is 'one', not a number"]),
        ({"x": [1e300], "word": ["u"]}, ["'x'", "too large"]),
    ],
)
def test_rows_that_do_not_fit_are_refused_in_a_sentence(rows: Any, parts: list[str]):
    says(lambda: Preprocessing.from_dict(sound()).apply(rows), *parts)
