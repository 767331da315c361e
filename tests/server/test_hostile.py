"""One client can hurt nobody but itself: replies, sample counts, buffers, shapes and updates that lie."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from hypothesis import HealthCheck, given, settings, strategies as st
from scipy.stats import trim_mean
from test_buffers import CONSTANT, Masked
from test_flower_grid import (
    CLIENTS,
    QUICK,
    alone,
    array,
    edited,
    federation,
    from_client,
    grid_at,
    load,
    network,
    poison,
    put,
    same,
    train,
)
from torch import Tensor, nn

import fedflat as ff
from fedflat.core.messages import Upload
from fedflat.engines.flower import nodes as nodes_module
from fedflat.engines.flower.client import client_app
from fedflat.engines.flower.engine import Flower
from fedflat.engines.flower.limits import Limits
from fedflat.engines.flower.localgrid import LocalGrid
from fedflat.engines.flower.nodes import Given, Nodes
from fedflat.engines.flower.remote_federation import RemoteFederation
from fedflat.engines.flower.server import serve
from fedflat.experiments.schema import Experiment
from fedflat.server.aggregates import Middle
from fedflat.server.server import Server
from fedflat.server.shares import largest_weight
from fedflat.server.uploads import RejectedUpload

pytestmark = pytest.mark.filterwarnings("ignore:client:UserWarning")
SIZES = [5, 40, 12, 30]
EVERYONE = {"participation": None, "rounds": 2}
STEPS = ff.LocalSGD(lr=0.1, steps=3, batch_size=8)


def strictly(rows: list[dict[str, Any]], place: Path) -> None:
    """What is written down is JSON, and nothing of it is NaN."""
    text = place.read_text()
    assert len(rows) == len([json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()])


# -- every number of a reply -----------------------------------------------------------------------


BAD_REPORTS = {
    "no samples": put("report", "samples", 0),
    "fewer than none": put("report", "samples", -3.0),
    "too many": put("report", "samples", 10**300),
    "half of all": put("report", "accuracy", 1.5),
    "nan": put("report", "loss", math.nan),
    "infinite": put("report", "loss", math.inf),
    "a list": put("report", "loss", [1.0, 2.0]),
    "one name too many": put("report", "f1", 0.5),
    "nothing": lambda content: content["report"].clear(),
    "another kind": lambda content: content.update(report=ConfigRecord({"samples": "many"})),
    "a million names": lambda c: c.update(report=MetricRecord({str(n): n for n in range(10**4)})),
}


@pytest.mark.parametrize("kind", BAD_REPORTS)
def test_a_bad_report_is_dropped_and_its_upload_counts(kind: str, tmp_path: Path):
    grid = grid_at(tmp_path)
    grid.tamper = from_client(1, edited(BAD_REPORTS[kind]))
    run = train("scaffold", grid, **EVERYONE)
    assert run.server.w.equal(alone("scaffold", **EVERYONE).server.w)
    for row in run.history:
        (told,) = row["dropped"]
        assert told.startswith(f"client 1, round {row['index']}: its report is left out: ")
        assert set(row["reported"]["clients"]) == {"0", "2", "3"}
        assert row["reported"]["samples"] == sum(SIZES) - SIZES[1]
        assert math.isfinite(row["reported"]["loss"])


@pytest.mark.parametrize(
    "loss", [1e308, -1e308, math.inf, 10**400], ids=["large", "small", "infinite", "whole"]
)
def test_an_absurd_loss_is_dropped_and_hides_no_other(loss: float, tmp_path: Path):
    grid = grid_at(tmp_path)
    grid.tamper = from_client(1, edited(put("numbers", "loss", loss)))
    run = train("fedavg", grid, **EVERYONE)
    honest = alone("fedavg", **EVERYONE)
    assert run.server.w.equal(honest.server.w)
    others = train("fedavg", without(tmp_path / "others"), patience=THREE, **EVERYONE)
    for row, other in zip(run.history[:1], others.history, strict=False):
        assert row["train_loss"] == pytest.approx(other["train_loss"])
        assert "client 1, round 0: its training loss of" in row["dropped"][0]


THREE = Limits(deadline=30, connect=2, poll=0.01, min_clients=3)


def without(home: Path, client: int = 1) -> LocalGrid:
    grid = grid_at(home)
    grid.offline = {client + 1}
    return grid


NUMBERS = st.one_of(
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, -1, 1, 2**53, 2**63, 10**5000, 0.5, math.nan, math.inf, -math.inf, 1e308, 5e-324]),
    st.floats(),
    st.lists(st.floats(), max_size=3),
)
ARRAYS = st.builds(
    lambda dtype, shape, layout, data: Array(dtype, tuple(shape), layout, data),
    st.sampled_from(["float32", "float64", "object", "", "int64"]),
    st.lists(st.integers(-5, 2**62), max_size=3) | st.just([83]),
    st.sampled_from(["fedflat.little-endian", "pickle", "numpy.ndarray"]),
    st.binary(max_size=16) | st.just(bytes(332)),
)
PARTS = ("vectors", "numbers", "report", "receipt", "refusal", "más")
NAMES = st.sampled_from(
    ["client", "round", "samples", "steps", "loss", "accuracy", "forward", "spared_forward", "checksum", "x"]
)


@st.composite
def mutations(draw: st.DrawFn) -> list[Any]:
    """Some things that a reply may have done to it; none makes another, plausible update."""
    changes: list[Any] = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["number", "remove", "drop", "replace", "array"]))
        part = draw(st.sampled_from(PARTS))
        if kind == "number":
            part, name, value = draw(st.sampled_from(["numbers", "report"])), draw(NAMES), draw(NUMBERS)
            changes.append(lambda c, p=part, n=name, v=value: c[p].update({n: v}) if p in c else None)
        elif kind == "remove":
            name = draw(NAMES)
            changes.append(lambda c, p=part, n=name: c[p].pop(n, None) if p in c else None)
        elif kind == "drop":
            changes.append(lambda c, p=part: c.pop(p, None))
        elif kind == "replace":
            records = [
                ConfigRecord({"a": ["b"], "reason": 1}),
                MetricRecord({"loss": 1}),
                ArrayRecord(),
            ]
            record = draw(st.sampled_from(records))
            changes.append(lambda c, p=part, r=record: c.update({p: r}))
        else:
            name, value = draw(st.sampled_from(["update", "control", "buffers", "x"])), draw(ARRAYS)
            if value.shape == (83,) and value.dtype == "float32" and len(value.data) == 332:
                value = array(layout="pickle")  # not one that is as agreed on
            changes.append(
                lambda c, n=name, v=value: (
                    c["vectors"].update({n: v}) if isinstance(c.get("vectors"), ArrayRecord) else None
                )
            )
    return changes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    """The models of a round with all clients, and without client 1."""
    home = tmp_path_factory.mktemp("outcomes")
    one = {"participation": None, "rounds": 1}
    left_out = train("scaffold", without(home), patience=THREE, **one)
    return [alone("scaffold", **one).server.w, left_out.server.w]


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(mutations())
def test_whatever_is_in_a_reply_the_round_goes_on(outcomes, tmp_path_factory, changes):
    """Its client counts or it does not; nothing else can happen to the model."""

    def change(content: Any) -> None:
        for one in changes:
            one(content)

    home = tmp_path_factory.mktemp("mutated")
    grid = grid_at(home)
    grid.tamper = from_client(1, edited(change))
    run = train("scaffold", grid, participation=None, rounds=1)
    assert any(run.server.w.equal(outcome) for outcome in outcomes)
    (row,) = run.history
    json.dumps(row, allow_nan=False)
    assert len(row["clients"]) + len(row["rejected"]) == CLIENTS
    assert math.isfinite(row["train_loss"])


def test_a_reply_that_flower_cannot_put_together_is_a_bad_one(tmp_path: Path):
    class Broken(LocalGrid):
        def pull_messages(self, message_ids: Any) -> list[Message]:
            names = list(message_ids)
            sent = [self._messages[n] for n in names if n in self._messages]
            if any("order" in m.content and m.content["order"]["client"] == 1 for m in sent):
                raise ValueError("Invalid object")
            return super().pull_messages(names)

    grid = grid_at(tmp_path)
    grid.__class__ = Broken
    run = train("fedavg", grid, **EVERYONE)
    assert run.history[1]["rejected"] == ["client 1, round 1: its reply cannot be read."]


# -- sample counts ---------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.floats(1.0, 1e9), min_size=1, max_size=12), st.floats(0.05, 1.0))
def test_no_weight_is_more_than_its_share(weights: list[float], share: float):
    most = largest_weight(weights, share)
    if share * len(weights) < 1 - 1e-9:
        assert most == 0
        return
    left = [min(weight, most) for weight in weights]
    assert max(left) <= share * sum(left) * (1 + 1e-6)
    if most < max(
        weights
    ):  # nobody is cut down further than it takes: the cap's own share is the whole share
        assert most == pytest.approx(share * sum(left), rel=1e-6)
    assert largest_weight([*weights, 3.0], share) >= most * (1 - 1e-6)


def uploads(sizes: list[int], round: int = 0, width: int = 6, seed: int = 0) -> Iterator[Upload]:
    rng = torch.Generator().manual_seed(seed)
    for client, samples in enumerate(sizes):
        yield Upload(client, round, samples, 1, torch.randn(width, generator=rng))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([10**12, 30, 20, 50], [100, 30, 20, 50]),
        ([30, 20, 10**12, 50], [30, 20, 100, 50]),
        ([7, 1000], [7, 7]),
        ([9], [9]),
        ([10, 20, 30], [10, 20, 30]),
    ],
)
def test_the_excess_of_a_client_s_weight_is_cut_off(sizes: list[int], expected: list[int]):
    server = Server(torch.zeros(6, dtype=torch.float64), ff.fedavg(), len(sizes))
    server.limit(max_share=0.5)
    server.open(0, 0.1)
    sent = [replace(upload, update=upload.update.double()) for upload in uploads(sizes)]
    for upload in sent:
        server.receive(replace(upload, borrowed=True))
    server.close()
    mean = np.average([u.update.numpy() for u in sent], axis=0, weights=expected)
    np.testing.assert_allclose(server.w.numpy(), mean, rtol=1e-12)
    cut = [i for i, (size, weight) in enumerate(zip(sizes, expected, strict=True)) if size != weight]
    assert len(server.clipped) == len(cut)
    assert all(f"client {i}, round 0: {sizes[i]} samples would be" in server.clipped[0] for i in cut)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.sampled_from([0.1, 0.3, 0.5]))
def test_where_nobody_weighs_too_much_the_bits_are_the_same(sizes: list[int], share: float):
    servers = [Server(torch.zeros(6), ff.fedcm(), len(sizes)) for _ in range(2)]
    servers[0].limit(max_share=share)
    for server in servers:
        server.open(0, 0.1)
        for upload in uploads(sizes):
            server.receive(upload)
        server.close()
    cut = max(sizes) > share * sum(sizes)
    assert bool(servers[0].clipped) == (cut and len(set(sizes)) > 1)
    if not cut and len(sizes) <= 16:
        assert servers[0].w.equal(servers[1].w)
        assert servers[0].vector("gradient").equal(servers[1].vector("gradient"))
    elif not cut:
        torch.testing.assert_close(servers[0].w, servers[1].w)


EXPERIMENT = Experiment.model_validate(
    {
        "clients": CLIENTS,
        "method": "fedcm",
        "local": {"lr": 0.1, "steps": 4, "batch_size": 8},
        "participation": "everyone",
        "rounds": 2,
    }
)


def served(home: Path, grid: LocalGrid, patience: Limits = QUICK, **changes: Any) -> ff.Run:
    return serve(
        grid,
        EXPERIMENT.model_copy(update=changes),
        home / "run",
        patience,
        model=lambda shape, classes: network(),
    )


def hello_of(node: int, change: Any) -> Any:
    """Let a node say something else about itself."""

    def tamper(message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type == "query.hello" and message.metadata.dst_node_id == node:
            return change(message, reply)
        return reply

    return tamper


def test_a_client_that_says_it_has_everything_weighs_half(tmp_path: Path):
    grid = grid_at(tmp_path)
    lie = hello_of(2, edited(put("hello", "samples", 2**40)))

    def tamper(message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type == "train" and message.content["order"]["client"] == 1:
            reply.content["numbers"]["samples"] = 2**40
        return lie(message, reply)

    grid.tamper = tamper
    run = served(tmp_path, grid, rounds=1)
    sent: dict[int, Tensor] = {}
    fine = ff.train(
        federation(),
        network(),
        "fedcm",
        ff.LocalSGD(lr=0.1, steps=4, batch_size=8),
        rounds=1,
        on_round=lambda r: None,
        engine=Spy(sent),
    )
    assert not run.server.w.equal(fine.server.w)
    weights = [5, 5 + 12 + 30, 12, 30]
    start = nn.utils.parameters_to_vector(network().parameters()).detach()
    mean = np.average([sent[i].numpy() for i in range(CLIENTS)], axis=0, weights=weights)
    np.testing.assert_allclose((run.server.w - start).numpy(), mean, atol=1e-6)
    (told,) = run.history[0]["clipped"]
    assert told.startswith(
        "client 1, round 0: 1099511627776 samples would be 100.0% of the round; it counts 50.0%"
    )


class Spy:
    """Runs clients in process, and looks at their uploads."""

    def __init__(self, sent: dict[int, Tensor]) -> None:
        from fedflat.engines.inprocess import InProcess

        self.engine, self.sent = InProcess(), sent
        self.open, self.evaluate, self.close = self.engine.open, self.engine.evaluate, self.engine.close

    def uploads(self, *given: Any) -> Iterator[Any]:
        for upload in self.engine.uploads(*given):
            self.sent[upload.client] = upload.update.clone()
            yield upload


@pytest.mark.parametrize("asked", [True, False])
def test_a_sample_count_is_agreed_on_once(asked: bool, tmp_path: Path):
    """At hello, or where nobody asked then, in the first reply."""
    grid = grid_at(tmp_path)

    def grow(message: Message, reply: Message) -> Message:
        if message.content["order"]["round"] > 0:
            reply.content["numbers"]["samples"] = 4000
        return reply

    grid.tamper = from_client(1, grow)
    run = served(tmp_path, grid) if asked else train("fedavg", grid, **EVERYONE)
    assert [row["clients"] for row in run.history] == [[0, 1, 2, 3], [0, 2, 3]]
    assert "it says 4000 samples, 40 are agreed on" in run.history[1]["rejected"][0]


def test_hello_has_no_sample_count_where_the_method_withholds_it(tmp_path: Path):
    said: dict[str, list[Any]] = {}
    for method in ("fedavg", "fedavg + private-uploads(clip=1, noise=1)"):
        grid = grid_at(tmp_path / method[:9])

        def listen(message: Message, reply: Message, method: str = method) -> Message:
            if message.metadata.message_type == "query.hello":
                said.setdefault(method, []).append(dict(reply.content["hello"]))
            return reply

        grid.tamper = listen
        run = served(tmp_path / method[7:], grid, method=method)
        assert [len(row["clients"]) for row in run.history] == [4, 4]
    assert sorted(hello["samples"] for hello in said["fedavg"]) == sorted(SIZES)
    (private,) = [hellos for method, hellos in said.items() if "private" in method]
    assert len(private) == CLIENTS and not any("samples" in hello for hello in private)


def test_a_real_federation_has_the_bits_of_a_simulation_where_nobody_weighs_too_much(tmp_path: Path):
    local = ff.LocalSGD(lr=0.1, steps=4, batch_size=8)
    run = served(tmp_path, grid_at(tmp_path))  # 40 of 87 samples
    expected = ff.train(federation(), network(), "fedcm", local, rounds=2)
    assert run.server.w.equal(expected.server.w)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["max_share"] == 0.5


# -- buffers ---------------------------------------------------------------------------------------


def change_buffers(change: Any) -> Any:
    def edit(content: Any) -> None:
        values = np.frombuffer(content["vectors"]["buffers"].data, "<f4").copy()
        change(values)  # running mean (8), running variance (8), count
        content["vectors"]["buffers"] = Array(
            "float32", values.shape, "fedflat.little-endian", values.tobytes()
        )

    return edit


def entry(index: int, value: float) -> Any:
    return change_buffers(lambda values: values.__setitem__(index, value))


BAD_BUFFERS = {
    "nan": (entry(3, math.nan), "its buffers hold NaN"),
    "infinite": (entry(9, math.inf), "its buffers hold NaN or infinite"),
    "a negative variance": (entry(9, -1e-3), "a negative variance or count"),
    "a negative count": (entry(16, -1), "a negative variance or count"),
    "a count of everything": (entry(16, 1e9), "count more batches than 10 steps"),
    "far away": (entry(0, 1e6), "'buffers' has length 1e[+]06, more than 50"),
    "absurd": (entry(9, 1e38), "'buffers' holds 1e[+]38"),
}


@pytest.mark.parametrize("kind", BAD_BUFFERS)
def test_bad_buffers_are_refused(kind: str, tmp_path: Path):
    change, sentence = BAD_BUFFERS[kind]
    grid = grid_at(tmp_path, norm=True)
    grid.tamper = from_client(1, edited(change))
    bound = {"norm_bound": {"buffers": 50.0}}
    run = train("fedavg", grid, norm=True, **EVERYONE, **bound)
    honest = grid_at(tmp_path / "others", norm=True)
    honest.offline = {2}
    others = train("fedavg", honest, norm=True, patience=THREE, **EVERYONE, **bound)
    states = [r.model.state_dict() for r in (run, others)]
    assert all(states[0][name].equal(states[1][name]) for name in states[0])
    for row in run.history:
        (told,) = row["rejected"]
        assert re.search(sentence, told), told


def test_buffers_are_clipped_without_their_counters(tmp_path: Path):
    grid = grid_at(tmp_path, norm=True)
    grid.tamper = from_client(1, edited(entry(0, 1e6)))
    run = train(
        "fedavg",
        grid,
        norm=True,
        rounds=1,
        participation=None,
        norm_bound={"buffers": 50.0},
        over_bound="clip",
    )
    (told,) = run.history[0]["clipped"]
    assert "client 1, round 0: 'buffers' had length 1e+06, clipped to 50" in told
    state = run.model.state_dict()
    assert abs(float(state["1.running_mean"][0])) < 50
    assert int(state["1.num_batches_tracked"]) == round(np.average([2, 10, 4, 8], weights=SIZES))


def masked(home: Path, change: Any = None, **more: Any) -> ff.Run:
    """A federation whose model has a mask of -inf, large whole numbers and a truth table among its buffers."""
    app = client_app(load, model=lambda shape, classes: Masked())
    grid = LocalGrid(app, [{"partition-id": n, "state-dir": str(home)} for n in range(CLIENTS)])
    if change is not None:
        grid.tamper = from_client(1, edited(change_buffers(change)))
    nodes = Nodes(grid, CLIENTS, QUICK, samples=True)
    facts = nodes.wait()
    roster = RemoteFederation(CLIENTS, facts.shape, facts.classes, facts.vocabulary, federation())
    engine = Flower(grid, nodes, run="test", patience=QUICK)
    return ff.train(roster, Masked(), "fedavg", STEPS, rounds=2, engine=engine, **more)


def place_of(name: str) -> int:
    """Where a buffer of `Masked` begins in the vector of all of them."""
    sizes = [(other, buffer.numel()) for other, buffer in Masked().named_buffers()]
    return sum(size for _, size in sizes[: [other for other, _ in sizes].index(name)])


@pytest.mark.parametrize("masks", [True, False])
def test_masks_and_large_whole_numbers_travel(masks: bool, tmp_path: Path, monkeypatch):
    if not masks:
        monkeypatch.setattr(Masked, "LEAST", 0.0)
    run = masked(tmp_path)
    assert [row["clients"] for row in run.history] == [[0, 1, 2, 3]] * 2
    same(run, ff.train(federation(), Masked(), "fedavg", STEPS, rounds=2))
    for name in CONSTANT:
        assert getattr(run.model, name).equal(getattr(Masked(), name)), name


def test_behind_a_mask_of_infinity_no_number_is_too_large(tmp_path: Path):
    run = masked(tmp_path, lambda values: values.__setitem__(place_of("norm.running_mean"), 3e38))
    for row in run.history:
        assert row["clients"] == [0, 2, 3]
        assert "'buffers' holds 3e+38; no number of an upload may exceed 9.2e+18" in row["rejected"][0]


@pytest.mark.parametrize("aggregate", ["mean", "median"])
@pytest.mark.parametrize("name", ["ids", "few", "truths"])
def test_one_client_cannot_change_a_table_of_whole_numbers(name: str, aggregate: str, tmp_path: Path):
    """An index that is off by one would end the training of everybody."""

    def change(values: np.ndarray) -> None:
        values[place_of(name) :][:2] = [5.0, 17.0]

    run = masked(tmp_path, change, aggregate=aggregate)
    assert [row["clients"] for row in run.history] == [[0, 1, 2, 3]] * 2
    for constant in CONSTANT:
        assert getattr(run.model, constant).equal(getattr(Masked(), constant)), constant


def test_whole_numbers_that_every_client_changes_are_averaged():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)
            self.register_buffer("seen", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen += len(x)
            return self.inner(x)

    local = ff.LocalSGD(lr=0.1, epochs=1, batch_size=None)
    run = ff.train(federation(), Counting(), "fedavg", local, rounds=1, weighting="uniform")
    assert run.model.seen.item() == round(sum(SIZES) / CLIENTS)


# -- a round that would not be finite --------------------------------------------------------------


def standing(server: Server) -> dict[str, Any]:
    vectors, numbers = server.snapshot()
    kept = {f"{c} {n}": v for c in server.per_client.clients() for n, v in server.per_client.get(c).items()}
    return {**{n: v.clone() for n, v in {**vectors, **kept}.items()}, **numbers}


@pytest.mark.parametrize("method", sorted(ff.METHODS))
def test_an_overflow_is_undone_whatever_the_method_keeps(method: str):
    server = Server(torch.zeros(6), ff.METHODS[method](), 3, buffers=torch.ones(2))

    def round(index: int, scale: float) -> None:
        server.open(index, 0.1)
        for upload in uploads([1, 2], index, seed=index):
            vectors = dict.fromkeys(server.method.up, upload.update + 1)
            server.receive(
                replace(upload, update=upload.update.sign() * scale, vectors=vectors, buffers=torch.ones(2))
            )
        server.close()

    round(0, 0.5)
    before = standing(server)
    assert server.undone is None and server.accepted == 2
    server.open(1, 0.1)
    for client in (0, 1):
        update = torch.full((6,), 3e38)
        vectors = dict.fromkeys(server.method.up, update)
        server.receive(Upload(client, 1, 1, 1, update, vectors, torch.ones(2)))
    server.close()
    assert server.undone is not None and "NaN or infinite" in server.undone
    after = standing(server)
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name], name
    round(2, 0.5)
    assert server.undone is None and torch.isfinite(server.w).all()


class Explode(ff.Mechanism):
    """Overflows in one round."""

    def combine(self, server: Server, update: Tensor) -> Tensor:
        return update.mul_(math.inf) if server.round == 1 else update


@pytest.mark.parametrize("engine", ["inprocess", "workers:2", "flower"])
@pytest.mark.parametrize("method", ["scaffold", "fedwmsam"])
def test_an_undone_round_is_as_if_nobody_had_taken_part(engine: str, method: str, tmp_path: Path):
    composed = ff.Method("exploding", [*ff.METHODS[method]().mechanisms, Explode()])
    everyone = list(range(CLIENTS))
    expected = alone(method, rounds=4, participation=ff.Schedule([everyone, [], everyone, everyone]))
    rounds = {"rounds": 4, "participation": None, "on_divergence": "restore"}
    if engine == "flower":
        run = train(composed, grid_at(tmp_path), **rounds)
    else:
        run = alone(composed, engine=engine, out=tmp_path / "run", checkpoint_every=1, **rounds)
        strictly(run.history, tmp_path / "run" / "metrics.jsonl")
    assert run.server.w.equal(expected.server.w)
    row = run.history[1]
    assert row["undone"].startswith("the model would hold NaN or infinite values.") and row["clients"] == []
    assert row["rejected"] == [
        f"client {n}, round 1: the round is undone, since the model would hold NaN or infinite values."
        for n in everyone
    ]
    with pytest.raises(ff.FedflatError, match="client 0, round 1: the round is undone"):
        alone(composed, **rounds, on_bad_upload="stop")


def test_a_poisoned_run_recovers(tmp_path: Path):
    """Of an attacker that sends the largest numbers it may, a bound leaves nothing."""
    grid = grid_at(tmp_path)
    attack = from_client(1, edited(poison(4e9)))
    grid.tamper = lambda m, r: attack(m, r) if m.content.get("order", {}).get("round") in (0, 2) else r
    run = train("fedavg", grid, rounds=5, participation=None, norm_bound="median:5")
    everyone, others = [0, 1, 2, 3], [0, 2, 3]
    expected = alone(
        "fedavg", rounds=5, participation=ff.Schedule([others, everyone, others, everyone, everyone])
    )
    assert run.server.w.equal(expected.server.w)
    assert "client 1, round 0: 'update' has length" in run.history[0]["rejected"][0]


# -- hello -----------------------------------------------------------------------------------------

ABSURD = {
    "a huge sample": put("hello", "shape", [2**20] * 8),
    "a long shape": put("hello", "shape", [1] * 1000),
    "an empty sample": put("hello", "shape", [0]),
    "a negative size": put("hello", "shape", [-6]),
    "a word": put("hello", "shape", ["six"]),
    "classes without end": put("hello", "classes", 2**31 - 1),
    "no classes": put("hello", "classes", 0),
    "many words": put("hello", "vocabulary", 2**30),
    "no number": put("hello", "client", 0.5),
    "samples without end": put("hello", "samples", 2**60),
    "no samples": put("hello", "samples", 0),
    "nothing": lambda content: content.clear(),
}


@pytest.mark.parametrize("kind", ABSURD)
def test_an_absurd_hello_is_left_out_before_anything_is_made_of_it(kind: str, tmp_path: Path):
    grid = grid_at(tmp_path)
    grid.tamper = hello_of(1, edited(ABSURD[kind]))  # the first to answer
    run = served(tmp_path, grid, THREE)
    assert [row["clients"] for row in run.history] == [[1, 2, 3]] * 2
    expected = served(tmp_path / "without", without(tmp_path / "without", client=0), THREE)
    assert run.server.w.equal(expected.server.w)


def test_no_single_node_decides_what_samples_look_like(tmp_path: Path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(nodes_module, "say", lambda level, sentence: told.append(sentence))
    for name, value in (("shape", [7]), ("classes", 9)):
        grid = grid_at(tmp_path)
        grid.tamper = hello_of(1, edited(put("hello", name, value)))
        facts = Nodes(grid, CLIENTS, QUICK).wait()
        assert (facts.shape, facts.classes) == ((6,), 3)
        assert any("node 1 is left out for now: it" in sentence for sentence in told)
        told.clear()
    grid = grid_at(tmp_path)
    grid.offline = {3, 4}
    grid.tamper = hello_of(1, edited(put("hello", "classes", 9)))
    pair = Limits(poll=0.01, min_clients=2, connect=2)
    with pytest.raises(
        ff.FedflatError, match=r"do not agree on the classes .*\(9, 3\).*server_app\(..., classes="
    ):
        Nodes(grid, CLIENTS, pair).wait()
    assert Nodes(grid, CLIENTS, Limits(poll=0.01, min_clients=1), Given((6,), 3)).wait().classes == 3


def test_the_server_s_test_set_or_settings_say_what_samples_look_like(tmp_path: Path):
    grid = grid_at(tmp_path)

    def lie(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "query.hello" and message.metadata.dst_node_id < 4:
            reply.content["hello"]["classes"] = 50  # three of four
        return reply

    grid.tamper = lie
    one = Limits(deadline=30, connect=2, poll=0.01, min_clients=1, min_replies=0.1)
    for more in ({"test": federation}, {"given": Given((6,), 3)}):
        out = tmp_path / next(iter(more))
        run = serve(grid, EXPERIMENT, out, one, model=lambda shape, classes: network(), **more)
        assert json.loads((out / "run.json").read_text())["federation"]["classes"] == 3
        assert run.history[0]["clients"] == [3]


def test_what_the_server_is_told_must_be_possible():
    for given_, sentence in (
        ({"shape": (2**20, 2**20)}, "shape="),
        ({"shape": (0,)}, "shape="),
        ({"classes": 0}, "classes=0"),
        ({"vocabulary": 2**40}, "vocabulary="),
    ):
        with pytest.raises(ff.FedflatError, match=sentence):
            Given(**given_)


def test_a_node_whose_hello_failed_is_asked_again(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(nodes_module, "AGAIN", 0.01)
    grid = grid_at(tmp_path)
    answers = [
        lambda m, r: Message(Error(2, "its file is not there"), reply_to=m),
        edited(put("hello", "client", 99)),
        lambda m, r: r,
    ]
    grid.tamper = hello_of(2, lambda m, r: answers.pop(0)(m, r))
    run = train("fedavg", grid, **EVERYONE)
    assert not answers
    assert run.server.w.equal(alone("fedavg", **EVERYONE).server.w)


# -- robust options --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("text", ["median", "trimmed:0.1", "trimmed:.3"])
def test_middles_are_those_of_numpy_and_scipy(text: str, count: int, monkeypatch):
    monkeypatch.setattr("fedflat.server.aggregates.PIECE", 40)  # several pieces
    vectors = torch.randn(count, 23, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    expected = np.median(vectors, axis=0) if text == "median" else trim_mean(vectors, float(text[8:]), axis=0)
    np.testing.assert_allclose(Middle(text)(list(vectors)), expected, rtol=1e-12)


def test_a_median_is_not_moved_by_one_client():
    sent: dict[int, Tensor] = {}
    settings_ = {"participation": None, "rounds": 1}
    alone("fedavg", engine=Spy(sent), **settings_)
    start = nn.utils.parameters_to_vector(network().parameters()).detach()
    for text in ("median", "trimmed:0.25"):
        run = alone("fedavg", aggregate=text, **settings_)
        stacked = np.stack([sent[n].numpy() for n in range(CLIENTS)])
        middle = np.median(stacked, axis=0) if text == "median" else trim_mean(stacked, 0.25, axis=0)
        np.testing.assert_allclose((run.server.w - start).numpy(), middle, atol=1e-6)
    server = Server(torch.zeros(6), ff.fedavg(), 9)
    server.limit(aggregate="median")
    server.open(0, 0.1)
    honest = list(uploads([5] * 9))
    for upload in honest[:-1]:
        server.receive(upload)
    server.receive(replace(honest[-1], update=torch.full((6,), 1e9), samples=10**9))
    server.close()
    good = torch.stack([upload.update for upload in honest[:-1]])
    assert (server.w >= good.min(0).values).all() and (server.w <= good.max(0).values).all()


def test_a_middle_takes_methods_that_sum_updates_only(monkeypatch):
    with pytest.raises(ff.FedflatError, match="SCAFFOLD sums uploads in control-variates too"):
        alone("scaffold", aggregate="median")
    for text in ("middle", "trimmed:0.5", "trimmed", "trimmed:0"):
        with pytest.raises(ff.FedflatError, match="aggregate"):
            alone("fedavg", aggregate=text)
    monkeypatch.setattr("fedflat.server.server.HELD", 3)
    with pytest.raises(ff.FedflatError, match="holds all uploads of a round, at most 3"):
        alone("fedavg", aggregate="median", participation=None)


def test_a_bound_adapts_to_the_rounds_before():
    server = Server(torch.zeros(2), ff.fedavg(), 5)
    server.bound("median:2", clip=False)
    accepted: list[list[float]] = []

    def round(index: int, lengths: list[float]) -> list[int]:
        """The clients that are left out."""
        server.open(index, 0.1)
        left_out = []
        for client, length in enumerate(lengths):
            try:
                server.receive(Upload(client, index, 1, 1, torch.tensor([length, 0.0])))
            except RejectedUpload:
                left_out.append(client)
        server.close()
        left_out += [client for client, _ in server.refused]
        accepted.append([length for client, length in enumerate(lengths) if client not in left_out])
        return left_out

    assert round(0, [1e9, 1.0, 2.0, 3.0, 1.5]) == [0]  # against the median of the round itself, 2
    for index, lengths in enumerate([[1.0, 2.0, 4.1, 1e9, 1.0], [3.0, 3.0, 1.0], [2.0, 2.5, 6.0]], start=1):
        bound = 2 * np.median([np.median(past) for past in accepted])
        assert round(index, lengths) == [c for c, length in enumerate(lengths) if length > bound]
        assert server.norm_bounds.now == {"update": pytest.approx(bound)}


def test_a_bound_that_adapts_goes_on_with_the_same_bits(tmp_path: Path):
    asked: dict[str, Any] = {"norm_bound": {"update": "median:1"}, "over_bound": "clip", "participation": 3}
    whole = alone("scaffold", rounds=6, **asked)
    alone("scaffold", rounds=3, out=tmp_path, **asked)
    resumed = alone("scaffold", rounds=6, out=tmp_path, resume=True, **asked)
    assert any(row["clipped"] for row in whole.history[3:])
    same(resumed, whole)


def test_bounds_and_middles_in_an_experiment_file():
    said = {
        "norm_bound": {"update": "median:3", "control": 5.0},
        "max_share": 0.3,
        "aggregate": "trimmed:0.2",
    }
    assert Experiment.model_validate(said).to_dict()["norm_bound"] == said["norm_bound"]
    for wrong in ({"norm_bound": "mean"}, {"max_share": 0}, {"max_share": 1.5}, {"aggregate": "mode"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Experiment.model_validate(wrong)
    for wrong, sentence in (("median:0.5", "at least median:1"), ("medium", "median:5")):
        with pytest.raises(ff.FedflatError, match=sentence):
            alone("fedavg", norm_bound=wrong)
    with pytest.raises(ff.FedflatError, match="max_share must be above 0 and at most 1, not 2"):
        alone("fedavg", max_share=2)
