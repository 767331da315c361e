"""A real SuperLink and three SuperNodes on this machine, with TLS and a key for every node."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loopback import NODES, PATIENCE, Loopback, descendants, end, started, wait_for
from safetensors.torch import load_file

import fedflat as ff
from fedflat.engines.flower.client_state import KeptState
from fedflat.engines.flower.project import write_project
from fedflat.engines.flower.server import run_name

METHODS = {"fedavg": 1, "feddyn": 2, "fedsmoo": 2, "fedgmt_v2": 2, "fedwmsam": 2}
"""Rounds of each; the sixth, SCAFFOLD, is the one that nodes and servers die under."""

SERVER = '''
from pathlib import Path

from flwr.serverapp import ServerApp

from fedflat.experiments.files import load_experiment
from fedflat.engines.flower.logs import to_console
from fedflat.engines.flower.nodes import Nodes
from fedflat.engines.flower.server import read_settings, serve

from .data import load_test

app = ServerApp()


@app.main()
def main(grid, context):
    """Several methods, one after the other."""
    to_console()
    settings = dict(context.run_config)
    methods, epochs = settings.pop("methods"), settings.pop("epochs")
    settings.pop("mischief")
    out, patience, report = read_settings(settings, "run")
    nodes = Nodes(grid, 3, patience)
    for text in methods.split(","):
        method, rounds = text.split(":")
        changes = {"method": method, "rounds": int(rounds), "local.epochs": epochs}
        experiment = load_experiment(Path(__file__).with_name("experiment.yaml"), changes)
        serve(grid, experiment, out / method, patience, load_test, nodes=nodes)
'''

CLIENT = """
import time

from flwr.app import Array
from flwr.clientapp import ClientApp

from fedflat.engines.flower import client_app

from .data import load

honest = client_app(load)
app = ClientApp()


@app.query("hello")
def hello(message, context):
    return honest(message, context)


@app.train()
def train(message, context):
    reply = honest(message, context)
    number = context.node_config["partition-id"]
    if context.run_config["mischief"] and number == 1:
        size = reply.content["vectors"]["update"].shape
        reply.content["vectors"]["update"] = Array("object", size, "pickle", b"cos\\nsystem\\n(S'true'\\ntR.")
    if context.run_config["mischief"] and number == 2:
        time.sleep(1000)
    return reply
"""


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    home = tmp_path_factory.mktemp("loopback")
    link = Loopback(home)
    app = home / "app"
    write_project(app)
    (app / "federated" / "server.py").write_text(SERVER)
    (app / "federated" / "client.py").write_text(CLIENT)
    settings = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(
        settings + 'methods = "fedavg:1"\nepochs = 1\nmischief = false\npoll = 0.2\n'
    )
    try:
        link.start()
        yield link
    finally:
        link.close()


def in_process(method: str, rounds: int, epochs: int) -> ff.Run:
    """The same experiment on the same data, here."""
    from fedflat.engines.flower.template.federated import data
    from fedflat.experiments.build import make_local
    from fedflat.experiments.files import load_experiment

    nodes = [data.load({"partition-id": n, "num-partitions": NODES}) for n in range(NODES)]
    pairs = [node.client(0).stored() for node in nodes]
    test = data.load_test().test
    assert test is not None
    template = Path(data.__file__).with_name("experiment.yaml")
    experiment = load_experiment(template, {"local.epochs": epochs})
    return ff.train(
        ff.Federation(pairs, test=test.stored(), classes=10),
        "mlp",
        method,
        local=make_local(experiment.with_defaults().local),
        rounds=rounds,
    )


def same_model(place: Path, expected: ff.Run) -> None:
    found = load_file(place / "model.safetensors")
    wanted = expected.model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def log(loopback: Loopback) -> str:
    """What a first run said: a round of SCAFFOLD, whose nodes keep states."""
    return loopback.run("first", methods="scaffold:1", out="first")


def test_a_round_has_the_bits_of_one_process(loopback: Loopback, log: str):
    place = loopback.home / "runs" / "first" / "scaffold"
    assert (place / "model.safetensors").exists(), loopback.everything("first")
    same_model(place, in_process("scaffold", rounds=1, epochs=1))
    assert f"in {place}" in log
    assert all(
        KeptState(loopback.home / f"state-{n}", run_name(place), n).rounds() == [0] for n in range(NODES)
    )


@pytest.mark.slow
def test_methods_have_the_bits_of_one_process(loopback: Loopback):
    wanted = ",".join(f"{method}:{rounds}" for method, rounds in METHODS.items())
    log = loopback.run("five", methods=wanted, out="five")
    for method, rounds in METHODS.items():
        place = loopback.home / "runs" / "five" / method
        assert (place / "model.safetensors").exists(), loopback.everything("five")
        same_model(place, in_process(method, rounds, epochs=1))
        assert f"in {place}" in log
    told = re.findall(r"fedflat: round 1, 3 clients, accuracy [\d.]+%, clients' accuracy [\d.]+%", log)
    assert len(told) == len(METHODS) - 1


@pytest.mark.slow
def test_a_killed_node_and_a_killed_server_app_change_nothing(loopback: Loopback):
    """A SuperNode dies in round 1 and comes back, then the server's app dies in round 2: the same bits."""
    place = loopback.home / "runs" / "crash" / "scaffold"

    def explain() -> str:
        return loopback.everything("crash")

    process = loopback.submit("crash", methods="scaffold:3", out="crash", epochs=20)
    wait_for(lambda: "fedflat: round 0," in loopback.log("crash"), PATIENCE, explain)
    kept = KeptState(loopback.home / "state-1", run_name(place), 1)
    assert kept.rounds() == [0]
    (state,) = kept.directory.glob("*.safetensors")

    def in_round_1() -> bool:  # not in the last moments of round 0
        apps = descendants(loopback.processes["node-1"].pid, "flwr-clientapp")
        return any(started(app) > state.stat().st_mtime for app in apps)

    wait_for(in_round_1, PATIENCE, explain)
    assert kept.rounds() == [0]
    loopback.kill("node-1")
    loopback.revive(1)
    wait_for(lambda: "fedflat: round 1, 3 clients" in loopback.log("crash"), PATIENCE, explain)
    assert "it is asked again" in loopback.log("crash")
    (server,) = descendants(loopback.processes["superlink"].pid, "flwr-serverapp")
    end(server, signal.SIGKILL)
    wait_for(lambda: process.poll() is not None, PATIENCE, explain)
    assert not (place / "model.safetensors").exists()
    log = loopback.run("again", methods="scaffold:3", out="crash", epochs=20)
    assert "fedflat: round 1," not in log, log
    same_model(place, in_process("scaffold", rounds=3, epochs=20))
    assert kept.rounds() == [0, 1, 2]


@pytest.mark.slow
def test_strangers_are_refused(loopback: Loopback):
    """A node whose key nobody registered, one without a key, and one that speaks no TLS."""
    root = ("--root-certificates", f"{loopback.keys}/ca.crt")
    strangers = {
        "unregistered": (*root, "--auth-supernode-private-key", f"{loopback.keys}/node-{NODES}"),
        "nameless": root,
        "plaintext": ("--insecure", "--max-retries", "1"),
    }
    reasons = {
        "unregistered": "[code: 2004] Failed to activate SuperNode",
        "nameless": "[code: 2001] SuperNode authentication is enabled",
        "plaintext": "Failed to initialize the connection",
    }
    before = loopback.log("superlink").count("[ApiError:")
    for name, secure in strangers.items():
        loopback.start_node(NODES, name, secure)
    for name in strangers:
        process = loopback.processes[name]
        wait_for(lambda p=process: p.poll() is not None, PATIENCE, lambda n=name: loopback.everything(n))
        assert process.returncode != 0
        assert reasons[name] in loopback.log(name), loopback.log(name)
        assert "SuperNode ID" not in loopback.log(name)
    assert loopback.log("superlink").count("[ApiError:") >= before + 2, loopback.log("superlink")


@pytest.mark.slow
def test_a_malformed_upload_and_a_silent_node_do_not_stop_the_round(loopback: Loopback):
    log = loopback.run(
        "mischief", out="mischief", deadline=40, mischief=True, methods="fedavg:1", min_replies=0.3
    )
    assert "refused: client 1, round 0: 'update' came as pickle, not as plain numbers." in log, log
    assert "refused: client 2, round 0: it did not answer in time (deadline 40 s)." in log
    assert "fedflat: round 0, 1 clients" in log
    assert (loopback.home / "runs" / "mischief" / "fedavg" / "model.safetensors").exists()


def test_no_secret_is_in_logs_or_runs(loopback: Loopback, log: str):
    secrets = [
        "".join((loopback.keys / name).read_text().splitlines()[1:3])
        for name in ["ca.key", "server.key", *(f"node-{n}" for n in range(NODES))]
    ]
    places = [*loopback.home.glob("*.log"), *(p for p in (loopback.home / "runs").rglob("*") if p.is_file())]
    for place in places:
        text = place.read_bytes()
        assert b"PRIVATE KEY" not in text
        assert not any(secret[:40].encode() in text for secret in secrets)
    node = (loopback.home / "state-0" / "secret").read_bytes()
    assert not any(node in place.read_bytes() for place in places)
    assert (loopback.home / "state-0" / "secret").stat().st_mode & 0o077 == 0
