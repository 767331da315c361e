"""What `fedflat privacy` says against intercepted bytes, and its ε against somebody who tries to break it."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from test_flower_grid import CLIENTS, federation, network, train

import fedflat as ff
from fedflat.cli import console, main
from fedflat.client.round import ClientRound
from fedflat.core.messages import Download
from fedflat.engines.flower.client import client_app
from fedflat.engines.flower.localgrid import LocalGrid
from fedflat.engines.flower.privacy import hello, leaving, spent
from fedflat.engines.flower.reply import reply_of, take_part

LOCAL = ff.LocalSGD(lr=0.05, steps=12, batch_size=8)
FRAME = {
    *("run_id", "message_id", "src_node_id", "dst_node_id", "reply_to_message_id", "group_id", "ttl"),
    *("message_type", "created_at", "src_task_id", "dst_task_id"),
}
"""What Flower writes around every message: who, to whom, about what, when."""

Said = dict[tuple[str, str], str]
"""What a field tells of samples, by part and name."""


# -- every byte ------------------------------------------------------------------------------------


def said_by_command(method: str, capsys: Any, monkeypatch: Any, *changes: str) -> Said:
    """The table that `fedflat privacy METHOD` prints."""
    monkeypatch.setattr(console, "_width", 300)
    sets = [word for change in ("local.steps=12", *changes) for word in ("--set", change)]
    monkeypatch.setattr(sys, "argv", ["fedflat", "privacy", method, *sets])
    with pytest.raises(SystemExit):
        main()
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    kinds = ("nothing", "as it is", "with noise")
    return {(row[0], row[1]): row[2] for row in cells if len(row) == 4 and row[2] in kinds}


def intercepted(home: Path, method: str, rounds: int, shift: int = 0, **more: Any) -> list[bytes]:
    """Replies of a federation, as the bytes that Flower makes of them; `shift` deals the samples to other nodes."""

    def load(node: Any) -> ff.Federation:
        shard = federation().client((node["partition-id"] + shift) % CLIENTS)
        return ff.Federation([(shard.inputs, shard.targets)], classes=3)

    home.mkdir()
    (home / "secret").write_bytes(b"s" * 32)
    norm = bool(more.get("norm"))
    app = client_app(load, model=lambda shape, classes: network(norm))
    grid = LocalGrid(app, [{"partition-id": n, "state-dir": str(home)} for n in range(CLIENTS)])
    seen: list[bytes] = []

    def look(message: Message, reply: Message) -> Message:
        seen.append(message_to_proto(reply).SerializeToString())
        return reply

    grid.tamper = look
    train(method, grid, rounds=rounds, participation=None, local=LOCAL, **more)
    return seen


def fields_of(reply: ProtoMessage) -> dict[tuple[str, str], Any]:
    """The protobuf messages of the values in a reply."""
    found = {}
    for item in reply.content.items:
        for inner in getattr(item, item.WhichOneof("value")).items:
            found[item.key, inner.key] = inner.value
    return found


def built_again(reply: ProtoMessage, said: Said, sizes: dict[str, int]) -> bytes:
    """A reply from nothing but what was said to be in it: names, kinds and lengths; only values are taken over."""
    values = fields_of(reply)
    content = ProtoRecordDict()
    for part in dict.fromkeys(part for part, _ in said):
        item = content.items.add(key=part)
        for name in [name for place, name in said if place == part]:
            value = values[part, name]
            if part == "vectors":
                inner = item.array_record.items.add(key=name)
                inner.value.dtype, inner.value.stype = "float32", "fedflat.little-endian"
                inner.value.shape.append(sizes.get(name, sizes["update"]))
                assert len(value.data) == 4 * inner.value.shape[0]
                inner.value.data = value.data
            elif part == "hello":
                item.config_record.items.add(key=name).value.CopyFrom(value)
            elif value.WhichOneof("value") == "double":
                item.metric_record.items.add(key=name).value.double = value.double
            else:
                item.metric_record.items.add(key=name).value.sint64 = value.sint64
    assert {field.name for field, _ in reply.metadata.ListFields()} <= FRAME
    return ProtoMessage(metadata=reply.metadata, content=content).SerializeToString()


def audit(said: Said, home: Path, method: str, noisy: bool, **more: Any) -> None:
    """Hold what was said against two federations whose nodes have each other's samples."""
    model = ff.FlatModel(network(bool(more.get("norm"))))
    held = model.read_buffers()
    sizes = {"update": model.size, "buffers": 0 if held is None else held.numel()}
    here = intercepted(home / "here", method, 2, **more)
    there = intercepted(home / "there", method, 1, 1, **more)
    assert len(here) == 3 * CLIENTS and len(there) == 2 * CLIENTS
    for raw in (*here, *there):
        reply = ProtoMessage.FromString(raw)
        part = {k: v for k, v in said.items() if (k[0] == "hello") == (reply.content.items[0].key == "hello")}
        assert built_again(reply, part, sizes) == raw
    differ: set[tuple[str, str]] = set()
    for ours, theirs in zip(here, there, strict=False):  # the first round's orders are the same
        values = [fields_of(ProtoMessage.FromString(raw)) for raw in (ours, theirs)]
        assert values[0].keys() == values[1].keys()
        differ |= {
            k for k in values[0] if values[0][k].SerializeToString() != values[1][k].SerializeToString()
        }
    told = {key for key, kind in said.items() if kind != "nothing"}
    told -= {("hello", name) for name in ("shape", "scalar", "classes", "vocabulary")}  # alike on all nodes
    assert differ <= told
    assert {key for key in told if key[0] != "report"} <= differ
    for raw in here:
        for (part, name), value in fields_of(ProtoMessage.FromString(raw)).items():
            if (
                noisy and part == "vectors" and name != "buffers"
            ):  # longer by far than what was clipped to 0.1
                assert torch.frombuffer(bytearray(value.data), dtype=torch.float32).norm() > 0.5


@pytest.mark.parametrize("noise", [False, True], ids=["plain", "noisy"])
@pytest.mark.parametrize("name", sorted(ff.METHODS))
def test_what_leaves_is_what_the_command_says(name: str, noise: bool, tmp_path: Path, capsys, monkeypatch):
    """Every byte of every reply of a real client app, for a method without and with noise."""
    method = f"{name} + private-uploads(clip=0.1, noise=1)" if noise else name
    said = said_by_command(method, capsys, monkeypatch)
    audit(said, tmp_path, method, noise)
    found = leaving(ff.as_method(method), LOCAL)
    expected = (*hello(ff.as_method(method)), *found.fields)
    assert {(field.part, field.name): field.kind for field in expected} == said
    expected = "with noise" if noise else "as it is"
    assert {said["vectors", vector] for vector in found.vectors} == {expected}
    if noise:
        assert all(said[key] == "nothing" for key in said if key[0] not in ("vectors", "hello"))
    assert (
        bool(found.kept)
        == bool(list(tmp_path.rglob("client-0/*.safetensors")))
        == (("receipt", "mark") in said)
    )


@pytest.mark.parametrize("method", ["scaffold", "fedavg + private-uploads(clip=0.1, noise=1)"])
@pytest.mark.parametrize("policy", ["average", "local", "server", "reset"])
def test_statistics_are_accounted_for_too(policy: str, method: str, tmp_path: Path):
    found = leaving(ff.as_method(method), LOCAL, policy, has_buffers=True)
    said = {(field.part, field.name): field.kind for field in (*hello(ff.as_method(method)), *found.fields)}
    audit(said, tmp_path, method, "private" in method, norm=True, buffers=policy)
    assert (("vectors", "buffers") in said) == (policy in ("average", "reset"))
    assert said.get(("vectors", "buffers"), "as it is") == "as it is"


def test_a_field_that_nobody_explained_is_not_passed_over(monkeypatch):
    from fedflat.core import messages

    monkeypatch.setattr(messages, "NUMBERS", (*messages.NUMBERS, "bytes"))
    with pytest.raises(ff.FedflatError, match=r"holds 'bytes' \(numbers\), which is not described"):
        leaving(ff.fedavg())


# -- somebody who tries ----------------------------------------------------------------------------

RUNS = 1000
DELTA = 1e-5


def neighbours() -> list[ff.Federation]:
    """Two data sets for one client's place, as far apart as can be: one's gradient is minus the other's."""
    inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 0, 1, 1, 0])
    return [ff.Federation([(inputs, labels)], classes=2) for labels in (targets, 1 - targets)]


def replies(
    method: str, data: ff.Federation, runs: int, first: int = 0, report: bool = False
) -> list[dict[str, Any]]:
    """What a client answers to one order, run by run with other secrets."""
    module = torch.nn.Linear(3, 2)
    model = ff.FlatModel(module)
    model.vector.zero_()
    made = ff.as_method(method)
    local = ff.LocalSGD(lr=1.0, steps=1, batch_size=None)
    training = ClientRound(model, made, local, torch.nn.functional.cross_entropy, seed=0)
    values = {name: torch.zeros(model.size) for name in made.down}
    download = Download(0, 1.0, torch.zeros(model.size), values)
    found = []
    for run in range(first, first + runs):
        training.secret = run.to_bytes(32, "little")
        found.append(reply_of(take_part(training, 0, data, download, {}, report), None))
    return found


def epsilon_found(method: str, quiet: str) -> float:
    """The ε that an attack shows to be needed, at a confidence of 99%: it guesses whose data is behind a reply.

    It knows both data sets, and what each would upload without noise; the threshold is chosen beforehand. Whoever has
    (ε, δ) has `TPR ≤ exp(ε) FPR + δ`, with rates bounded by Clopper and Pearson.
    """
    from scipy.stats import beta

    one, other = neighbours()
    directions = [replies(quiet, data, 1)[0]["vectors"] for data in (one, other)]
    between = torch.cat([directions[0][name] - directions[1][name] for name in directions[0]])
    between /= between.norm()
    scores = []
    for place, data in enumerate((one, other)):
        found = [
            torch.cat([*reply["vectors"].values()]) for reply in replies(method, data, RUNS, place * RUNS)
        ]
        scores.append(torch.stack(found) @ between)
    spread = max(float(scores[1].std()), 1e-9)
    middle = float(between @ torch.cat([(directions[0][n] + directions[1][n]) / 2 for n in directions[0]]))
    hits, false = (int((score > middle + spread).sum()) for score in scores)
    if spread < 1e-6:  # nothing is in the way: any threshold between the two
        hits, false = (int((score > middle).sum()) for score in scores)
    lowest = beta.ppf(0.005, hits, RUNS - hits + 1) if hits else 0.0
    highest = beta.ppf(0.995, false + 1, RUNS - false) if false < RUNS else 1.0
    return math.log(max(lowest - DELTA, 1e-12) / highest)


@pytest.mark.parametrize(("method", "vectors"), [("fedavg", 1), ("scaffold", 2)])
def test_an_attack_stays_within_epsilon_and_breaks_what_has_less_noise(method: str, vectors: int):
    """1,000 runs with each of two data sets; the claim is for one round."""
    noise = 4 * math.sqrt(vectors)
    private = [f"{method} + private-uploads(clip=0.1, noise={value})" for value in (noise, noise / 4, 0.0)]
    claim = spent(ff.as_method(private[0]), LOCAL, ff.Everyone(), clients=1, rounds=1, delta=DELTA)
    assert claim.vectors == vectors
    assert 1.5 < claim.epsilon < 2.5
    full, quarter, none = (epsilon_found(text, private[2]) for text in private)
    assert 0.1 < full < claim.epsilon  # it does find something
    assert quarter > claim.epsilon  # and would find out that there is less noise than claimed
    assert none > claim.epsilon + 2


@pytest.mark.parametrize("method", ["scaffold", "fedsmoo", "fedgmt_v2"])
def test_nothing_beside_the_vectors_tells_two_data_sets_apart(method: str):
    noisy = f"{method} + private-uploads(clip=0.1, noise=1)"
    numbers = [
        [
            {k: v for k, v in reply["numbers"].items() if v == v}
            for reply in replies(noisy, data, 20, report=True)
        ]
        for data in neighbours()
    ]
    assert numbers[0] == numbers[1]
    assert not any("report" in reply for reply in replies(noisy, neighbours()[0], 1, report=True))
