"""Over Flower's grid, in one process: the same bits as in process, and answers that are not as they should be."""

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Error, Message
from torch import nn

import fedflat as ff
from fedflat.engines.flower.client import client_app
from fedflat.engines.flower.client_state import KeptState
from fedflat.engines.flower.engine import RECEIPT, Flower
from fedflat.engines.flower.limits import Limits
from fedflat.engines.flower.localgrid import LocalGrid
from fedflat.engines.flower.nodes import Nodes
from fedflat.engines.flower.privacy import withholds_samples
from fedflat.engines.flower.remote_federation import RemoteFederation
from fedflat.engines.flower.server import read_settings, run_name, serve
from fedflat.experiments.run import run_experiment
from fedflat.experiments.schema import Experiment
from fedflat.models.conv.conv2d import Conv2d

CLIENTS = 4
SETTINGS: dict[str, Any] = {
    "local": ff.LocalSGD(lr=0.1, momentum=0.5, weight_decay=1e-3, epochs=2, batch_size=8),
    "participation": 3,
}
QUICK = Limits(deadline=30, connect=2, poll=0.01)


def federation() -> ff.Federation:
    rng = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(n, 6, generator=rng) + i, torch.randint(3, (n,), generator=rng))
        for i, n in enumerate([5, 40, 12, 30])
    ]
    test = (torch.randn(500, 6, generator=rng), torch.randint(3, (500,), generator=rng))
    result = ff.Federation(clients, test)
    result.set_test_groups(torch.arange(500) % 3, ("a", "b", "c"))
    return result


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def load(node: Any) -> ff.Federation:
    shard = federation().client(node["partition-id"] % CLIENTS)
    return ff.Federation([(shard.inputs, shard.targets)], classes=3)


def grid_at(home: Path, norm: bool = False) -> LocalGrid:
    app = client_app(load, model=lambda shape, classes: network(norm))
    return LocalGrid(app, [{"partition-id": n, "state-dir": str(home)} for n in range(CLIENTS)])


def train(
    method: Any, grid: LocalGrid, rounds: int = 5, patience: Limits = QUICK, norm: bool = False, **more: Any
) -> ff.Run:
    nodes = Nodes(grid, CLIENTS, patience, samples=not withholds_samples(ff.as_method(method)))
    facts = nodes.wait()
    roster = RemoteFederation(CLIENTS, facts.shape, facts.classes, facts.vocabulary, federation())
    engine = Flower(grid, nodes, run="test", patience=patience)
    return ff.train(roster, network(norm), method, rounds=rounds, engine=engine, **{**SETTINGS, **more})


def alone(method: Any, rounds: int = 5, norm: bool = False, **more: Any) -> ff.Run:
    return ff.train(federation(), network(norm), method, rounds=rounds, **{**SETTINGS, **more})


ONLY_HERE = ("seconds", "reported", "client_accuracy")


def same(ours: ff.Run, theirs: ff.Run) -> None:
    assert ours.server.w.equal(theirs.server.w)
    rows = [
        [{k: v for k, v in row.items() if k not in ONLY_HERE} for row in r.history] for r in (ours, theirs)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("method", sorted(ff.METHODS))
def test_all_methods_have_the_bits_of_one_process(method: str, tmp_path: Path):
    expected = alone(method)
    grid = grid_at(tmp_path)
    run = train(method, grid)
    same(run, expected)
    for client in expected.clients.clients():  # what clients keep is on their nodes; the server has a receipt
        receipt = run.clients.get(client)[RECEIPT].tolist()
        kept = KeptState(tmp_path, "test", client).read((receipt[0], receipt[1]))
        state = expected.clients.get(client)
        assert kept.keys() == state.keys()
        assert all(kept[name].equal(state[name]) for name in state)
    if not expected.clients.clients():
        assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("policy", ["average", "local", "server", "reset"])
def test_buffers_travel_too(policy: str, tmp_path: Path):
    expected = alone("scaffold", norm=True, buffers=policy)
    run = train("scaffold", grid_at(tmp_path, norm=True), norm=True, buffers=policy)
    same(run, expected)
    states = [r.model.state_dict() for r in (run, expected)]
    assert all(states[0][name].equal(states[1][name]) for name in states[0])


def test_nodes_convolve_as_the_server_s_processor_is_quickest(tmp_path: Path, monkeypatch):
    def convolutional(processor: str) -> nn.Module:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: processor)
        torch.manual_seed(1)
        layers = [nn.Linear(6, 128), nn.Unflatten(1, (128, 1, 1)), Conv2d(128, 128, 3, padding=1)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 3))

    expected = ff.train(federation(), convolutional("AVX2"), "fedavg", rounds=2, **SETTINGS)
    app = client_app(load, model=lambda shape, classes: convolutional("AVX512"))
    grid = LocalGrid(app, [{"partition-id": n, "state-dir": str(tmp_path)} for n in range(CLIENTS)])
    nodes = Nodes(grid, CLIENTS, QUICK)
    facts = nodes.wait()
    roster = RemoteFederation(CLIENTS, facts.shape, facts.classes, facts.vocabulary, federation())
    engine = Flower(grid, nodes, run="test", patience=QUICK)
    same(ff.train(roster, convolutional("AVX2"), "fedavg", rounds=2, engine=engine, **SETTINGS), expected)
    other = ff.train(federation(), convolutional("AVX512"), "fedavg", rounds=2, **SETTINGS)
    assert not other.server.w.equal(expected.server.w), "the choice makes no difference"


def test_clients_test_what_they_receive(tmp_path: Path):
    run = train("fedavg", grid_at(tmp_path), participation=None, rounds=2)
    reported = run.history[1]["reported"]
    assert reported["samples"] == 5 + 40 + 12 + 30
    after_one = alone("fedavg", participation=None, rounds=1).model
    right = samples = 0
    for client in range(CLIENTS):
        x, y = federation().client(client).stored()
        hits = int((after_one(x).argmax(1) == y).sum())
        assert reported["clients"][str(client)]["accuracy"] == pytest.approx(hits / len(y))
        right, samples = right + hits, samples + len(y)
    assert reported["accuracy"] == pytest.approx(right / samples)


# -- replies that do not come, or are not as they should be ----------------------------------------


def from_client(number: int, action: Any) -> Any:
    """Do something to the replies of one client to orders to train."""

    def tamper(message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type == "train" and message.content["order"]["client"] == number:
            return action(message, reply)
        return reply

    return tamper


def edited(change: Any) -> Any:
    def action(message: Message, reply: Message) -> Message:
        change(reply.content)
        return reply

    return action


def poison(value: float) -> Any:
    def change(content: Any) -> None:
        size = content["vectors"]["update"].shape[0]
        data = np.full(size, value, dtype="<f4").tobytes()
        content["vectors"]["update"] = Array("float32", (size,), "fedflat.little-endian", data)

    return change


def put(part: str, name: str, value: Any) -> Any:
    def change(content: Any) -> None:
        content[part][name] = value

    return change


def array(
    dtype: str = "float32",
    shape: tuple[int, ...] = (83,),
    layout: str = "fedflat.little-endian",
    n: int = 332,
):
    return Array(dtype, shape, layout, bytes(n))


BAD = {
    "a pickle": (put("vectors", "update", array(layout="pickle")), "came as pickle, not as plain numbers"),
    "npy": (lambda c: c["vectors"].update(update=Array(np.zeros(83, "float32"))), "came as numpy.ndarray"),
    "another type": (put("vectors", "update", array("float64", n=664)), "has type float64"),
    "objects": (put("vectors", "update", array("object")), "has type object"),
    "a matrix": (put("vectors", "update", array(shape=(83, 1))), r"has shape \(83, 1\)"),
    "too short": (put("vectors", "update", array(shape=(82,), n=328)), r"has shape \(82,\)"),
    "a lie about its length": (put("vectors", "update", array(n=4)), "has 4 bytes, expected 332"),
    "a huge lie": (put("vectors", "update", array(shape=(2**60,))), "expected"),
    "a vector too many": (put("vectors", "extra", array()), "extra was not asked for"),
    "no control": (lambda c: c["vectors"].pop("control"), "'control' is missing"),
    "no vectors": (lambda c: c.pop("vectors"), "not as arrays"),
    "no numbers": (lambda c: c.pop("numbers"), "numbers are missing"),
    "another client": (put("numbers", "client", 2), "answered as client 2"),
    "another round": (put("numbers", "round", 7), "for round 7"),
    "half a sample": (put("numbers", "samples", 0.5), "samples is 0.5"),
    "no sample": (put("numbers", "samples", 0), "0 samples"),
    "absurd values": (poison(-1e30), r"'update' holds 1e\+30; no number of an upload may exceed 4.3e\+09"),
    "impossible passes": (put("numbers", "forward", 10**9), "1000000000 forward passes"),
    "more spared than made": (put("numbers", "spared_backward", 999), "999 of them spared"),
    "other steps": (put("numbers", "steps", 1), "it says 1 steps; with what is agreed on it takes 10"),
    "something else": (lambda c: c.update(code=ConfigRecord({"run": "me"})), "code, which was not asked for"),
    "nan": (poison(math.nan), "NaN or infinite"),
    "infinity": (poison(math.inf), "NaN or infinite"),
    "a line break": (put("vectors", "x\ny" * 90, array()), r"x\?y"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_reply_is_refused_and_touches_nothing(kind: str, tmp_path: Path):
    change, sentence = BAD[kind]
    grid = grid_at(tmp_path)
    grid.tamper = from_client(1, edited(change))
    run = train("scaffold", grid, rounds=2, participation=None)
    grid = grid_at(tmp_path / "without")
    grid.offline = {2}
    without = train(
        "scaffold", grid, rounds=2, participation=None, patience=Limits(connect=2, poll=0.01, min_clients=3)
    )
    assert run.server.w.equal(without.server.w)
    for row in run.history:
        (told,) = row["rejected"]
        assert told.startswith("client 1, round ")
        assert re.search(sentence, told), told
        assert "\n" not in told


def test_a_long_upload_is_refused_or_clipped(tmp_path: Path):
    for over, where in (("skip", "rejected"), ("clip", "clipped")):
        grid = grid_at(tmp_path / over)
        grid.tamper = from_client(1, edited(poison(1e9)))
        run = train(
            "fedavg", grid, rounds=1, participation=None, norm_bound={"update": 50.0}, over_bound=over
        )
        (told,) = run.history[0][where]
        assert "client 1, round 0: 'update' ha" in told
        assert torch.isfinite(run.server.w).all()
        # the mean moves by no more than a client of weight 40/87 may
        start = nn.utils.parameters_to_vector(network().parameters()).detach()
        assert float((run.server.w - start).norm()) < 50
    refused = alone("fedavg", rounds=1, participation=None, norm_bound=1e-6)
    assert len(refused.history[0]["rejected"]) == CLIENTS
    given = {"method": "fedavg", "rounds": 1, "norm_bound": 0.001, "over_bound": "clip"}
    experiment = Experiment.model_validate(given)
    clipped = run_experiment(experiment).history[0]["clipped"]
    assert len(clipped) == 5 and all("clipped to 0.001" in sentence for sentence in clipped)
    with pytest.raises(ff.FedflatError, match="uploads no 'controll'"):
        alone("scaffold", norm_bound={"controll": 1.0})


def test_a_client_that_never_answers_does_not_stop_the_round(tmp_path: Path):
    grid = grid_at(tmp_path)
    grid.tamper = from_client(0, lambda message, reply: None)
    began = time.monotonic()
    run = train("scaffold", grid, rounds=2, participation=None, patience=Limits(deadline=0.7, poll=0.01))
    assert time.monotonic() - began < 20
    assert [row["clients"] for row in run.history] == [[1, 2, 3]] * 2
    assert "did not answer in time (deadline 0.7 s)" in run.history[0]["rejected"][0]


def test_a_client_whose_node_fails_is_asked_again(tmp_path: Path):
    grid = grid_at(tmp_path)
    failures = []

    def fail_first(message: Message, reply: Message) -> Message:
        failures.append(message.content["order"]["round"])
        if failures.count(failures[-1]) == 1:
            return Message(Error(5, "Node Unavailable"), reply_to=message)
        return reply

    grid.tamper = from_client(2, fail_first)
    run = train("scaffold", grid, participation=None)
    same(run, alone("scaffold", participation=None))  # its state did not advance twice
    assert failures == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    grid.tamper = from_client(2, lambda m, r: Message(Error(2, "it\nbroke"), reply_to=m))
    run = train("scaffold", grid, participation=None, rounds=1)
    assert run.history[0]["rejected"] == ["client 2, round 0: its node failed: it?broke."]


def test_a_lost_or_refused_reply_does_not_advance_the_state(tmp_path: Path):
    """Client 1's replies of rounds 1 and 2 do not arrive: as if it had not taken part."""
    grid = grid_at(tmp_path)
    grid.tamper = from_client(1, lambda m, r: None if m.content["order"]["round"] in (1, 2) else r)
    patience = Limits(deadline=0.5, poll=0.01)
    run = train("feddyn", grid, patience=patience, participation=None)
    everyone, absent = [0, 1, 2, 3], [0, 2, 3]
    schedule = ff.Schedule([everyone, absent, absent, everyone, everyone])
    expected = alone("feddyn", participation=schedule)
    assert run.server.w.equal(expected.server.w)


def test_a_client_that_is_refused_for_long_still_has_the_state_that_the_server_knows(tmp_path: Path):
    grid = grid_at(tmp_path)
    change = edited(put("numbers", "samples", 0))
    bad = from_client(1, lambda m, r: change(m, r) if 0 < m.content["order"]["round"] < 6 else r)
    grid.tamper = bad
    run = train("scaffold", grid, rounds=7, participation=None)
    everyone, others = [0, 1, 2, 3], [0, 2, 3]
    expected = alone("scaffold", rounds=7, participation=ff.Schedule([everyone, *[others] * 5, everyone]))
    assert run.server.w.equal(expected.server.w)


def test_too_few_replies_stop_the_run_or_skip_the_round(tmp_path: Path):
    def silent(message: Message, reply: Message) -> Message | None:
        order = message.content.get("order")
        return None if order is not None and order["round"] == 1 and order["client"] > 0 else reply

    grid = grid_at(tmp_path)
    grid.tamper = silent
    patience = Limits(deadline=0.5, poll=0.01)
    with pytest.raises(ff.FedflatError, match=r"round 1: 1 of 4 clients answered as they should, 2 must"):
        train("scaffold", grid, patience=patience, participation=None)
    grid = grid_at(tmp_path / "skip")
    grid.tamper = silent
    skipping = Limits(deadline=0.5, poll=0.01, too_few="skip")
    run = train("scaffold", grid, rounds=3, patience=skipping, participation=None)
    assert [len(row["clients"]) for row in run.history] == [4, 0, 4]
    assert "1 of 4 clients answered as they should, 2 must" in run.history[1]["rejected"][0]
    everyone = list(range(CLIENTS))
    expected = alone("scaffold", rounds=3, participation=ff.Schedule([everyone, [], everyone]))
    assert run.server.w.equal(expected.server.w)


def test_nodes_that_do_not_come_are_not_waited_for_without_bound(tmp_path: Path):
    grid = grid_at(tmp_path)
    grid.offline = {1, 3}
    with pytest.raises(
        ff.FedflatError, match=r"2 of 4 clients connected within 0.3 s \(clients 1, 3\). Start the"
    ):
        train("fedavg", grid, patience=Limits(connect=0.3, poll=0.01))
    run = train("fedavg", grid, patience=Limits(poll=0.01, min_clients=2), participation=None, rounds=1)
    assert run.history[0]["rejected"][0] == "client 0, round 0: its node is not connected."


def test_a_node_that_says_it_is_somebody_else_is_left_out(tmp_path: Path, monkeypatch):
    app = client_app(load, model=lambda shape, classes: network())
    configs = [{"partition-id": n, "state-dir": str(tmp_path)} for n in (0, 1, 1, 9)]
    grid = LocalGrid(app, [*configs, {"state-dir": str(tmp_path)}])
    nodes = Nodes(grid, CLIENTS, Limits(connect=0.1, poll=0.01))
    told: list[str] = []
    monkeypatch.setattr("fedflat.engines.flower.nodes.say", lambda level, sentence: told.append(sentence))
    with pytest.raises(ff.FedflatError, match="2 of 4 clients"):
        nodes.wait()
    assert "node 3 is left out for now: it says that it is client 1, which another node is." in told
    assert "node 4 is left out for now: it says that it is client 9; there are 0 to 3." in told
    assert any("node 5 is left out for now: it refused" in sentence for sentence in told)


def test_a_node_that_never_says_who_it_is_delays_nobody(tmp_path: Path):
    grid = grid_at(tmp_path)
    grid.contexts[9] = grid.contexts[1]  # one more node
    silent = [0]

    def mute(message: Message, reply: Message) -> Message | None:
        if message.metadata.dst_node_id == 9:
            silent[0] += 1
            return None
        return reply

    grid.tamper = mute
    began = time.monotonic()
    run = train("fedavg", grid, rounds=2)
    assert time.monotonic() - began < 60  # it has two minutes to say it
    assert silent[0]
    assert [len(row["clients"]) for row in run.history] == [3, 3]


# -- states on nodes, and going on -----------------------------------------------------------------


def test_a_state_survives_and_a_damaged_or_lost_one_is_noticed(tmp_path: Path):
    kept = KeptState(tmp_path, "run", 3)
    assert kept.read(None) == {}
    receipts = [kept.write(n, {"dual": torch.full((5,), float(n))}, mark=n) for n in range(6)]
    assert kept.rounds() == [3, 4, 5]
    assert kept.read(receipts[4])["dual"].eq(4).all()
    with pytest.raises(ff.FedflatError, match="its state after round 1 is not in"):
        kept.read(receipts[1])
    with pytest.raises(ff.FedflatError, match="another one than the server was told of"):
        kept.read((5, 123))
    path = kept.directory / "round-0000005.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ff.FedflatError, match="damaged"):
        kept.read(receipts[5])
    assert path.parent.stat().st_mode & 0o077 == 0


def test_a_client_that_lost_its_state_is_refused_or_starts_anew(tmp_path: Path):
    def forget(message: Message, reply: Message) -> Message:
        if message.content["order"]["round"] == 1:
            for path in tmp_path.rglob("client-1/*.safetensors"):
                path.unlink()
        return reply

    grid = grid_at(tmp_path)
    grid.tamper = from_client(1, forget)
    run = train("feddyn", grid, participation=None, rounds=3)
    assert [len(row["clients"]) for row in run.history] == [4, 4, 3]
    assert "it refused: its state after round 1 is not in" in run.history[2]["rejected"][0]
    grid = grid_at(tmp_path)
    grid.tamper = from_client(1, forget)
    patience = Limits(poll=0.01, lost_state="restart")
    run = train("feddyn", grid, participation=None, rounds=3, patience=patience)
    assert [len(row["clients"]) for row in run.history] == [4, 4, 4]


EXPERIMENT = Experiment.model_validate(
    {
        "clients": CLIENTS,
        "method": "fedsmoo",
        "local": {"lr": 0.1, "epochs": 1, "batch_size": 8},
        "participation": 3,
        "rounds": 6,
    }
)


def serve_in(home: Path, grid: LocalGrid) -> ff.Run:
    return serve(
        grid, EXPERIMENT, home / "run", QUICK, test=federation, model=lambda shape, classes: network()
    )


@pytest.mark.parametrize("moment", ["before it answers", "after it has answered"])
@pytest.mark.parametrize("round", [0, 3])
def test_a_server_that_stops_goes_on_with_the_same_bits(moment: str, round: int, tmp_path: Path):
    """Stopped while client states of the round under way are already on disk."""
    expected = serve_in(tmp_path / "whole", grid_at(tmp_path / "whole"))
    grid = grid_at(tmp_path / "nodes")

    class PowerCut(BaseException):
        pass

    def stop(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.content["order"]["round"] == round:
            stopped.append(message.content["order"]["client"])
            if len(stopped) == (1 if moment == "before it answers" else 2):
                raise PowerCut
        return reply

    stopped: list[int] = []
    grid.tamper = stop
    with pytest.raises(PowerCut):
        serve_in(tmp_path, grid)
    grid.tamper = None
    run = serve_in(tmp_path, grid)
    same(run, expected)
    assert run_name(tmp_path / "run") != run_name(tmp_path / "whole" / "run")
    written = json.dumps([p.read_text("utf-8", "ignore") for p in (tmp_path / "run").rglob("*.json*")])
    assert "secret" not in written


def test_measures_that_need_local_models_are_refused(tmp_path: Path):
    """They would read what a mechanism has made of an update, or be left out without a word."""
    grid = grid_at(tmp_path)
    with pytest.raises(
        ff.FedflatError, match="measure: distance, drift and discrepancy are of what clients train"
    ):
        train("fedgmt(server_rule='active')", grid, rounds=1, measure=["drift"])
    asked = EXPERIMENT.model_copy(update={"measure": ["drift"]})
    with pytest.raises(ff.FedflatError, match="measure: a real federation records no measures"):
        serve(grid, asked, tmp_path / "run", QUICK)


def test_settings_of_an_app(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("FEDFLAT_RUNS", str(tmp_path))
    out, patience, report = read_settings({"deadline": 5, "min-replies": 0.2, "report": False}, "first")
    assert (out, patience, report) == (tmp_path / "first", Limits(deadline=5, min_replies=0.2), False)
    with pytest.raises(ff.FedflatError, match=r"no setting 'dead_line'\. Did you mean 'deadline'"):
        read_settings({"dead-line": 5}, "first")
    with pytest.raises(ff.FedflatError, match="deadline must be above 0"):
        read_settings({"deadline": 0}, "first")


# -- nothing received is unpickled -----------------------------------------------------------------


def test_a_client_refuses_orders_that_are_not_as_agreed(tmp_path: Path):
    app = client_app(load, model=lambda shape, classes: network())

    def answer(change: Any) -> str:
        grid = grid_at(tmp_path)
        sent: list[Message] = []

        def catch(message: Message, reply: Message) -> Message:
            if message.metadata.message_type == "train":
                sent.append(message)
            return reply

        grid.tamper = catch
        train("scaffold", grid, rounds=1)
        change(sent[0].content)
        node = sent[0].metadata.dst_node_id
        reply = app(sent[0], grid.contexts[node])
        return str(reply.content["refusal"]["reason"])

    def terms(**changes: Any) -> Any:
        def change(content: Any) -> None:
            order = content["order"]
            order["terms"] = json.dumps({**json.loads(order["terms"]), **changes})

        return change

    assert "names a run that cannot be" in answer(terms(run="../../etc"))
    assert "speaks format 99" in answer(terms(format=99))
    assert "as part of a method" in answer(terms(method="__import__('os')"))
    assert "this is" in answer(put("order", "client", 17))
    assert "came as pickle" in answer(lambda c: c["common"].update(start=array(layout="pickle")))
    assert "was not asked for" in answer(lambda c: c["common"].update(more=array()))
