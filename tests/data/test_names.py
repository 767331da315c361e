"""Clients by their own names: in split tables, in what is recorded of each, in tables, figures and the report."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
import yaml

import fedflat as ff
from fedflat.errors import FedflatError
from fedflat.experiments.by_client import client_accuracies
from fedflat.report.content import Content
from fedflat.storage.client_scores import read_client_scores

NAMES = ("Aachen", "Berlin", "Celle")


@pytest.fixture
def table(tmp_path):
    """A hospital's csv: three places, of which one labels otherwise."""
    lines = ["age,pressure,hospital,held,died"]
    for i in range(120):
        name = NAMES[(i * 7) % 3]
        age, pressure = 30 + (i * 13) % 50, 90 + (i * 29) % 60
        died = int((age > 55) != (name == "Celle"))
        lines.append(f"{age},{pressure},{name},{int(i % 4 == 0)},{died}")
    (tmp_path / "hospital.csv").write_text("\n".join(lines))
    return tmp_path / "hospital.csv"


def of(table, **more) -> dict:
    return {
        "dataset": str(table),
        "target": "died",
        "client_column": "hospital",
        "features": ["age", "pressure"],
        "rounds": 4,
        "participation": "everyone",
        "local": {"lr": 0.1, "steps": 5},
        **more,
    }


def test_a_federation_knows_its_clients_by_name_and_whose_test_samples_are_whose(table):
    data = ff.read_table(table, "died", client="hospital", test="held")
    federation = ff.federate(data, "by-user")
    assert federation.client_names == NAMES
    assert len(federation.test) == 30
    owners = [NAMES[number] for number in federation.test_owners.tolist()]
    assert owners == [NAMES[(i * 7) % 3] for i in range(0, 120, 4)]
    assert ff.federate(data, "iid", clients=4).client_names == ()
    assert ff.federate(data, "iid", clients=4).name_of(2) == "2"
    held = federation.with_validation(0.2, 0)
    assert held.client_names == NAMES
    sizes = [int((held.test_owners == client).sum()) for client in range(3)]
    assert sizes == [round(0.2 * size) for size in federation.sizes]


def test_every_client_is_tested_on_its_own_samples(table, tmp_path):
    federation = ff.federate(ff.read_table(table, "died", client="hospital"), "by-user")
    settings = {"rounds": 5, "local": ff.LocalSGD(lr=0.1, steps=3), "clients_every": 2}
    run = ff.train(federation, "mlp", out=tmp_path / "run", **settings)
    rows = read_client_scores(tmp_path / "run")
    assert [(row["index"], row["client"]) for row in rows] == [(i, name) for i in (1, 3, 4) for name in NAMES]
    inputs, targets = federation.test.stored()
    with torch.no_grad():
        outputs = run.model(inputs)
    for number, row in enumerate(rows[-3:]):
        own = federation.test_owners == number
        assert row["samples"] == int(own.sum()) and row["on"] == "test"
        assert row["accuracy"] == pytest.approx(
            float((outputs[own].argmax(1) == targets[own]).float().mean())
        )
        assert row["loss"] == pytest.approx(float(F.cross_entropy(outputs[own], targets[own])), rel=1e-5)

    # a resumed run has every row once
    ff.train(federation, "mlp", out=tmp_path / "cut", stop=lambda: True, **settings | {"clients_every": 1})
    with (tmp_path / "cut" / "clients.jsonl").open("a") as file:
        file.write('{"index": 1, "client": "Aachen", "accuracy": 0.5}\n{"ind')
    ff.train(federation, "mlp", out=tmp_path / "cut", resume=True, **settings | {"clients_every": 1})
    again = read_client_scores(tmp_path / "cut")
    assert [(row["index"], row["client"]) for row in again] == [(i, name) for i in range(5) for name in NAMES]
    assert again[-3:] == rows[-3:]


def test_what_it_takes(table, tmp_path):
    federation = ff.federate(ff.read_table(table, "died", client="hospital"), "iid", clients=3)
    with pytest.raises(FedflatError, match="nobody knows which test sample is whose"):
        ff.train(federation, "mlp", rounds=1, clients_every=1, out=tmp_path / "run")
    with pytest.raises(FedflatError, match="name a directory"):
        ff.train(federation, "mlp", rounds=1, clients_every=1)
    ff.train(federation, "mlp", rounds=1, clients_every=1, validation=0.2, out=tmp_path / "held")
    rows = read_client_scores(tmp_path / "held")
    assert [(row["client"], row["on"]) for row in rows] == [(name, "validation") for name in "012"]
    (tmp_path / "held" / "clients.jsonl").write_text("[]\n{}\n")
    with pytest.raises(FedflatError, match="line 1, is no client's row"):
        read_client_scores(tmp_path / "held")


def test_names_on_the_command_line(table, tmp_path, fedflat):
    file, out = tmp_path / "hospital.yaml", tmp_path / "runs"
    file.write_text(yaml.safe_dump(of(table, test_per_client="held", clients_every=2)))
    code, _, errors = fedflat(
        "run", file, "--method", "fedavg", "--baseline", "local", "--baseline", "pooled", "--out", out
    )
    assert code == 0, errors
    assert len(read_client_scores(out / "fedavg")) == 2 * 3
    for name in ("fedavg", "local", "pooled"):
        last = json.loads((out / name / "metrics.jsonl").read_text().splitlines()[-1])
        found = client_accuracies(out / name)
        samples = [row["samples"] for row in read_client_scores(out / name)[-3:]]
        overall = sum(found[n] * s for n, s in zip(NAMES, samples, strict=True)) / sum(samples)
        assert math.isclose(overall, last["accuracy"], rel_tol=1e-6)
    assert client_accuracies(out / "local")["Celle"] > client_accuracies(out / "fedavg")["Celle"]

    code, _, errors = fedflat("compare", out, "--clients", "--out", tmp_path / "clients.csv")
    assert code == 0, errors
    lines = [line.split(",") for line in (tmp_path / "clients.csv").read_text().splitlines()]
    assert lines[0] == ["client", "fedavg", "local", "pooled"]
    assert [line[0] for line in lines[1:4]] == ["mean", "deviation", "worst tenth"]
    assert sorted(line[0] for line in lines[4:]) == sorted(NAMES)
    fedavg = client_accuracies(out / "fedavg")
    assert [line[0] for line in lines[4:]] == sorted(fedavg, key=lambda name: (fedavg[name], name))
    assert float(lines[3][1]) == pytest.approx(100 * min(fedavg.values()), abs=0.006)

    code, _, errors = fedflat("figure", "clients", out, "-o", tmp_path / "clients.svg")
    assert code == 0, errors
    drawn = (tmp_path / "clients.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in NAMES)
    page = Content([out]).page()
    (fedavg_shown,) = (run for run in page["runs"] if run["id"].endswith("fedavg"))
    assert any("lowest Celle" in note for note in fedavg_shown["notes"])
    assert page["splits"][0]["names"] == list(NAMES)


def test_names_in_split_tables(table, tmp_path, fedflat):
    code, said, errors = fedflat(
        *("split", table, "by-user", "--target", "died", "--client-column", "hospital"),
        *("--out", tmp_path / "split.svg"),
    )
    assert code == 0, errors
    assert all(name in said for name in NAMES)
    assert all(name in (tmp_path / "split.svg").read_text() for name in NAMES)


def test_test_rows_per_client(table, fedflat):
    from fedflat.experiments.build import make_federation
    from fedflat.experiments.files import make_experiment

    half = make_federation(make_experiment(of(table, test_per_client=0.5)), 0)
    assert [int((half.test_owners == client).sum()) for client in range(3)] == [20, 20, 20]
    with pytest.raises(FedflatError, match="test_per_client: digits has a test set"):
        make_federation(make_experiment({"test_per_client": 0.5}), 0)
