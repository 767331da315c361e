"""A real SuperLink with two honest nodes and one that lies in another way every round."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import NODES, Loopback
from safetensors.torch import load_file
from torch import nn

import fedflat as ff
from fedflat.engines.flower.project import write_project
from fedflat.engines.inprocess import InProcess
from fedflat.storage.metrics_file import read_metrics

pytestmark = pytest.mark.slow

LIAR = 1
SAMPLES = 2**40

MODEL = '''
"""A network with statistics."""

import torch
from torch import nn


def make(shape, classes):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes))
'''

EXPERIMENT = """
clients: 3
method: scaffold
local: {lr: 0.05, steps: 5, batch_size: 20}
participation: everyone
rounds: 6
norm_bound: {update: "median:5"}
"""

SERVER = """
from pathlib import Path

from fedflat.engines.flower import server_app

from .data import load_test
from .model import make

app = server_app(Path(__file__).with_name("experiment.yaml"), test=load_test, model=make)
"""

CLIENT = """
from pathlib import Path

import numpy as np
from flwr.app import Array, ConfigRecord
from flwr.clientapp import ClientApp

from fedflat.engines.flower import client_app

from .data import load
from .model import make

honest = client_app(load, model=make)
app = ClientApp()


def lies(context):
    return context.node_config["partition-id"] == 1


@app.query("hello")
def hello(message, context):
    reply = honest(message, context)
    if lies(context):
        said = reply.content["hello"]
        said["samples"] = 2**40
        before = Path(context.node_config["state-dir"]) / "said"
        if not before.exists():  # the first time
            before.parent.mkdir(parents=True, exist_ok=True)
            before.touch()
            said["shape"] = [2**20] * 8
    return reply


@app.train()
def train(message, context):
    reply = honest(message, context)
    if lies(context):
        content, round = reply.content, message.content["order"]["round"]
        content["numbers"]["samples"] = 2**40
        if round == 0:
            content["report"]["samples"] = 0
            content["numbers"]["loss"] = 1e308
        if round == 1:
            content["numbers"]["samples"] = 7
        if round in (2, 3):
            change(content, "update", lambda values: values.fill(3e38 if round == 2 else 4e9))
        if round == 4:
            change(content, "buffers", lambda values: values.__setitem__(20, -1))
        if round == 5:
            del content["numbers"]
            content["numbers"] = ConfigRecord({"client": "1", "round": [5]})
    return reply


def change(content, name, change):
    values = np.frombuffer(content["vectors"][name].data, "<f4").copy()
    change(values)
    content["vectors"][name] = Array("float32", values.shape, "fedflat.little-endian", values.tobytes())
"""


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    home = tmp_path_factory.mktemp("hostile")
    link = Loopback(home)
    app = home / "app"
    write_project(app)
    written = {"server.py": SERVER, "client.py": CLIENT, "model.py": MODEL, "experiment.yaml": EXPERIMENT}
    for name, text in written.items():
        (app / "federated" / name).write_text(text)
    settings = app / "pyproject.toml"
    settings.write_text(settings.read_text() + "poll = 0.2\n")
    try:
        link.start()
        yield link
    finally:
        link.close()


class SaysMore:
    """In process, with one client that says it has more samples than it has."""

    def __init__(self) -> None:
        self.engine = InProcess()
        self.open, self.evaluate, self.close = self.engine.open, self.engine.evaluate, self.engine.close

    def uploads(self, *given: Any) -> Iterator[Any]:
        for upload in self.engine.uploads(*given):
            yield replace(upload, samples=SAMPLES) if upload.client == LIAR else upload


def expected() -> ff.Run:
    """The same rounds here: all clients in the first, in which the liar weighs half, and the honest ones later."""
    from fedflat.engines.flower.template.federated import data

    nodes = [data.load({"partition-id": n, "num-partitions": NODES}) for n in range(NODES)]
    test = data.load_test().test
    assert test is not None
    scope: dict[str, Any] = {}
    exec(MODEL, scope)  # the app's own model
    model: nn.Module = scope["make"]((1, 8, 8), 10)
    honest = [n for n in range(NODES) if n != LIAR]
    return ff.train(
        ff.Federation([n.client(0).stored() for n in nodes], test=test.stored(), classes=10),
        model,
        "scaffold",
        local=ff.LocalSGD(lr=0.05, steps=5, batch_size=20),
        participation=ff.Schedule([list(range(NODES)), *[honest] * 5]),
        rounds=6,
        engine=SaysMore(),
        max_share=0.5,
        norm_bound={"update": "median:5"},
    )


def test_a_node_that_lies_in_every_round_hurts_nobody_else(loopback: Loopback):
    log = loopback.run("hostile", out="hostile")
    place: Path = loopback.home / "runs" / "hostile"
    assert (place / "model.safetensors").exists(), loopback.everything("hostile")
    assert "is left out for now: its samples have the shape [1048576, " in log
    rows = read_metrics(place)
    assert [row["clients"] for row in rows] == [[0, 1, 2], *[[0, 2]] * 5], log
    assert [sentence.split(": ")[1] for sentence in rows[0]["dropped"]] == [
        "its training loss of 1e+308 is left out.",
        "its report is left out",
    ]
    (counts,) = rows[0]["clipped"]
    assert counts.startswith(f"client 1, round 0: {SAMPLES} samples would be") and "counts 50.0%" in counts
    reasons = [row["rejected"][0] for row in rows[1:]]
    for reason, sentence in zip(
        reasons,
        (
            f"it says 7 samples, {SAMPLES} are agreed on",
            "'update' holds 3e+38; no number of an upload may exceed 4.3e+09",
            "'update' has length",
            "its buffers hold a negative variance or count",
            "its numbers are missing",
        ),
        strict=True,
    ):
        assert sentence in reason
    found, wanted = load_file(place / "model.safetensors"), expected().model.state_dict()
    assert all(torch.isfinite(value).all() for value in found.values())
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
