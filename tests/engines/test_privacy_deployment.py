"""What nodes let out and insist on, over a real SuperLink: replies as the server's app gets them."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.proto.message_pb2 import Message as ProtoMessage
from loopback import NODES, Loopback
from safetensors.torch import load_file

import fedflat as ff
from fedflat.engines.flower.privacy import hello, leaving
from fedflat.engines.flower.project import write_project
from fedflat.models import build_model

pytestmark = pytest.mark.slow

NOISY = "scaffold + private-uploads(clip=0.5, noise=2)"
LOCAL = ff.LocalSGD(lr=0.05, steps=3, batch_size=20)

SERVER = '''
import json
from pathlib import Path

from flwr.common.serde import message_to_proto
from flwr.serverapp import ServerApp

from fedflat.experiments.files import load_experiment
from fedflat.engines.flower.logs import to_console
from fedflat.engines.flower.server import read_settings, serve

app = ServerApp()


class Tapped:
    """Flower's grid, with every reply written down, and perhaps a file in the place of client 1's model."""

    def __init__(self, grid, place, file):
        self.grid, self.place, self.file = grid, place, file
        place.mkdir(parents=True, exist_ok=True)

    def __getattr__(self, name):
        return getattr(self.grid, name)

    def push_messages(self, messages):
        messages = list(messages)
        for message in messages:
            order = message.content.get("order")
            if self.file and order is not None and order["client"] == 1:
                order["terms"] = json.dumps({**json.loads(order["terms"]), "model": f"mlp:{self.file}"})
        return self.grid.push_messages(messages)

    def pull_messages(self, ids):
        replies = list(self.grid.pull_messages(ids))
        for reply in replies:
            name = f"{len(list(self.place.iterdir())):04d}"
            (self.place / name).write_bytes(message_to_proto(reply).SerializeToString())
        return replies


@app.main()
def main(grid, context):
    to_console()
    settings = dict(context.run_config)
    methods, files = settings.pop("methods").split(","), settings.pop("files").split(",")
    out, patience, report = read_settings(settings, "run")
    for index, method in enumerate(methods):
        changes = {"method": method.replace(";", ","), "rounds": 1, "local": {"lr": 0.05, "steps": 3}}
        experiment = load_experiment(Path(__file__).with_name("experiment.yaml"), changes)
        tapped = Tapped(grid, out / f"replies-{index}", files[index] if index < len(files) else "")
        serve(tapped, experiment, out / str(index), patience)
'''

SPILL = '''
_load = load


def load(node):
    """As before, but for what a test asks for: samples that are NaN, or after the first time an error with one."""
    from pathlib import Path

    if Path(node["state-dir"], "spoil").exists():
        inputs, targets = _load(node).client(0).stored()
        return ff.Federation([(inputs * float("nan"), targets)], classes=10)
    spill = Path(node["state-dir"], "spill")
    if spill.exists() and spill.read_text():
        raise OSError("row 17: 'Meier, diabetes' is no number")
    if spill.exists():
        spill.write_text("now")
    return _load(node)
'''


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    home = tmp_path_factory.mktemp("privacy")
    link = Loopback(home)
    app = home / "app"
    write_project(app)
    (app / "federated" / "server.py").write_text(SERVER)
    with (app / "federated" / "data.py").open("a") as file:
        file.write(SPILL)
    with (app / "pyproject.toml").open("a") as file:
        file.write('methods = "fedavg"\nfiles = ""\npoll = 0.2\n')
    try:
        link.start(["", "require-noise=1.0 require-clip=0.5", ""])
        yield link
    finally:
        link.close()


def weights() -> bytes:
    """A file that a node could start an MLP from, if it opened it."""
    from safetensors.torch import save

    return save(build_model("mlp", ff.federate("digits", clients=NODES), seed=0).state_dict())


def replies(place: Path) -> list[ProtoMessage]:
    return [ProtoMessage.FromString(path.read_bytes()) for path in sorted(place.iterdir())]


def fields_of(reply: ProtoMessage) -> dict[tuple[str, str], Any]:
    return {
        (item.key, inner.key): inner.value
        for item in reply.content.items
        for inner in getattr(item, item.WhichOneof("value")).items
    }


def test_a_node_insists_on_noise_and_no_reply_confirms_a_guess(loopback: Loopback):
    """First SCAFFOLD without noise, which node 1 refuses; then with noise, which it takes part in."""
    out = loopback.home / "runs" / "privacy"
    log = loopback.run("privacy", out="privacy", methods=f"scaffold,{NOISY.replace(',', ';')}")
    why = loopback.everything("privacy")
    sentence = (
        "This node insists on more privacy than the server's terms: the method must end with private-uploads"
    )
    assert f"refused: client 1, round 0: it refused: {sentence}(clip=0.5, noise=1)." in log, why
    assert "fedflat: round 0, 2 clients" in log, why
    assert sentence in loopback.log("node-1"), why
    assert "fedflat: round 0, 3 clients" in log, why

    refused = [reply for reply in replies(out / "replies-0") if ("refusal", "reason") in fields_of(reply)]
    assert len(refused) == 1
    assert fields_of(refused[0]).keys() == {("refusal", "reason")}

    method = ff.as_method(NOISY)
    found = leaving(method, LOCAL)
    said = {(field.part, field.name) for field in (*hello(method), *found.fields)}
    trained = [fields_of(reply) for reply in replies(out / "replies-1")]
    assert all(fields.keys() <= said for fields in trained)
    trained = [fields for fields in trained if ("vectors", "update") in fields]
    assert len(trained) == NODES
    for fields in trained:
        assert fields.keys() == {place for place in said if place[0] != "hello"}
        assert fields["numbers", "samples"].sint64 == 1
    guesses = set()
    for path in loopback.home.glob("state-*/**/*.safetensors"):
        ((name, vector),) = load_file(path).items()
        data = vector.numpy().tobytes()
        guesses |= {zlib.crc32(data), zlib.crc32(data, zlib.crc32(name.encode()))}
    assert len(guesses) >= 2 * NODES
    sent = {value.sint64 for fields in trained for value in fields.values() if hasattr(value, "sint64")}
    assert not guesses & sent
    logs = " ".join(loopback.log(f"node-{number}") for number in range(NODES))
    assert "state kept" in logs
    assert not any(f"{guess:08x}" in logs for guess in guesses)


def test_what_an_error_says_stays_on_the_node(loopback: Loopback):
    (loopback.home / "state-2").mkdir(exist_ok=True)
    (loopback.home / "state-2" / "spill").touch()
    try:
        log = loopback.run("spill", out="spill", methods=NOISY.replace(",", ";"), retries=0)
    finally:
        (loopback.home / "state-2" / "spill").unlink()
    why = loopback.everything("spill")
    assert (
        "refused: client 2, round 0: its node failed: OSError in the node's app; its own log says more."
        in log
    ), why
    assert "fedflat: round 0, 2 clients" in log, why
    assert "Meier, diabetes" in loopback.log("node-2"), why
    assert "Meier" not in log
    for path in (loopback.home / "runs" / "spill").rglob("*"):
        assert path.is_dir() or b"Meier" not in path.read_bytes()


def test_nan_and_files_stay_on_their_nodes(loopback: Loopback):
    """Node 0 has samples that are NaN; the server asks node 1 for a file that is there, then for one that is not."""
    there, missing = loopback.home / "there.safetensors", loopback.home / "missing.safetensors"
    there.write_bytes(weights())
    (loopback.home / "state-0").mkdir(exist_ok=True)
    (loopback.home / "state-0" / "spoil").touch()
    out, noisy = loopback.home / "runs" / "spoilt", NOISY.replace(",", ";")
    try:
        log = loopback.run("spoilt", out="spoilt", methods=f"{noisy},{noisy}", files=f"{there},{missing}")
    finally:
        (loopback.home / "state-0" / "spoil").unlink()
    why = loopback.everything("spoilt")
    assert log.count("fedflat: round 0, 2 clients") == 2, why

    answers = []
    for index in range(2):
        found = [fields_of(reply) for reply in replies(out / f"replies-{index}")]
        trained = {
            fields["numbers", "client"].sint64: fields for fields in found if ("numbers", "client") in fields
        }
        assert trained.keys() == {0, 2}, why
        for name in ("update", "control"):
            vector = torch.frombuffer(bytearray(trained[0]["vectors", name].data), dtype=torch.float32)
            assert torch.isfinite(vector).all()
            assert 0.9 < float(vector.std()) < 1.1  # nothing but the noise of clip times its multiplier
        assert all(value.sint64 != 2 for value in trained[0].values() if hasattr(value, "sint64"))
        answers += [fields["refusal", "reason"].string for fields in found if ("refusal", "reason") in fields]
    told = "client 0, round 0: update, control held NaN or infinite values and leave as zeros"
    assert loopback.log("node-0").count(told) == 2, why
    assert [path.read_text() for path in loopback.home.glob("state-0/*/client-0/zeroed")] == ["2", "2"]

    assert len(answers) == 2
    assert answers[0] == answers[1]
    assert "a node opens no file that a server asks for" in answers[0]
    assert "a node opens no file that a server asks for" in loopback.log("node-1"), why
