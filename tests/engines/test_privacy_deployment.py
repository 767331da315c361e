"""What nodes let out and insist on, over a real SuperLink: replies as the server's app gets them."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.proto.message_pb2 import Message as ProtoMessage
from loopback import NODES, Loopback
from safetensors.torch import load_file

import fedflat as ff
from fedflat.engines.flower.privacy import hello, leaving
from fedflat.engines.flower.project import write_project

pytestmark = pytest.mark.slow

NOISY = "scaffold + private-uploads(clip=0.5, noise=2)"
LOCAL = ff.LocalSGD(lr=0.05, steps=3, batch_size=20)

SERVER = '''
from pathlib import Path

from flwr.common.serde import message_to_proto
from flwr.serverapp import ServerApp

from fedflat.experiments.files import load_experiment
from fedflat.engines.flower.logs import to_console
from fedflat.engines.flower.server import read_settings, serve

app = ServerApp()


class Tapped:
    """Flower's grid, with every reply written down."""

    def __init__(self, grid, place):
        self.grid, self.place = grid, place
        place.mkdir(parents=True, exist_ok=True)

    def __getattr__(self, name):
        return getattr(self.grid, name)

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
    methods = settings.pop("methods")
    out, patience, report = read_settings(settings, "run")
    for index, method in enumerate(methods.split(",")):
        changes = {"method": method.replace(";", ","), "rounds": 1, "local": {"lr": 0.05, "steps": 3}}
        experiment = load_experiment(Path(__file__).with_name("experiment.yaml"), changes)
        tapped = Tapped(grid, out / f"replies-{index}")
        serve(tapped, experiment, out / str(index), patience)
'''

SPILL = '''
_load = load


def load(node):
    """As before, but for an error that holds a sample, from the second time on that a test asks for one."""
    from pathlib import Path

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
        file.write('methods = "fedavg"\npoll = 0.2\n')
    try:
        link.start(["", "require-noise=1.0 require-clip=0.5", ""])
        yield link
    finally:
        link.close()


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
