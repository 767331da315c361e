"""What a node lets out and what it insists on, over Flower's grid in one process."""

import json
import logging
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file
from test_flower_grid import CLIENTS, QUICK, alone, federation, grid_at, load, network, same, train

import fedflat as ff
from fedflat.client.round import ClientRound
from fedflat.engines.flower import Require
from fedflat.engines.flower.client import client_app
from fedflat.engines.flower.client_state import KeptState, LostState, mark_of
from fedflat.engines.flower.limits import Limits
from fedflat.engines.flower.localgrid import LocalGrid

STEPS = ff.LocalSGD(lr=0.1, steps=3, batch_size=8)


def nodes_at(home: Path, data: Any = load, norm: bool = False, app: Any = None, **config: Any) -> LocalGrid:
    """A grid whose nodes load other data, insist on something, or have more in their config."""
    made = client_app(data, model=lambda shape, classes: network(norm), **(app or {}))
    configs = [{"partition-id": n, "state-dir": str(home), **config} for n in range(CLIENTS)]
    return LocalGrid(made, configs)


def replies_of(grid: LocalGrid, method: str, rounds: int = 2, **more: Any) -> list[Message]:
    """What nodes answered to orders to train."""
    seen: list[Message] = []

    def look(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            seen.append(reply)
        return reply

    grid.tamper = look
    train(method, grid, rounds=rounds, participation=None, **more)
    return seen


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What the apps write into their logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("fedflat.engines.flower")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lines
    log.removeHandler(handler)


# -- receipts --------------------------------------------------------------------------------------


def checksums(state: dict[str, torch.Tensor]) -> set[int]:
    """What somebody who guesses a state could compare with: CRC-32s of it, whole and vector by vector."""
    total = 0
    found = set()
    for name in sorted(state):
        data = state[name].numpy().tobytes()
        found |= {zlib.crc32(data), zlib.crc32(data, zlib.crc32(name.encode()))}
        total = zlib.crc32(data, zlib.crc32(name.encode(), total))
    return found | {total}


def numbers_in(message: Message) -> set[float]:
    return {
        value for part, record in message.content.items() if part != "vectors" for value in record.values()
    }


def test_no_reply_and_no_log_confirms_a_guess_of_the_state(tmp_path: Path, told: list[str]):
    replies = replies_of(grid_at(tmp_path), "fedsmoo + private-uploads(clip=0.5, noise=1)", local=STEPS)
    states = [load_file(path) for path in tmp_path.rglob("*.safetensors")]
    assert len(states) == 2 * CLIENTS
    guesses = set().union(*map(checksums, states))
    assert all("receipt" in reply.content for reply in replies)
    for reply in replies:
        assert not guesses & numbers_in(reply)
    text = " ".join(told)
    assert "state kept" in text
    assert not any(f"{guess:08x}" in text or str(guess) in text for guess in guesses)


def test_receipts_are_of_the_order_not_of_the_samples(tmp_path: Path):
    """The same first order to a node with other samples has the same receipt, and another secret another one."""

    def others(node: Any) -> ff.Federation:
        shard = federation().client(node["partition-id"])
        return ff.Federation([(shard.inputs * 2 + 1, (shard.targets + 1) % 3)], classes=3)

    (tmp_path / "b").mkdir()
    (tmp_path / "a").mkdir()
    for name in ("a", "b"):
        (tmp_path / name / "secret").write_bytes(b"s" * 32)
    method = "scaffold + private-uploads(clip=0.5, noise=1)"
    marks = [
        [dict(reply.content["receipt"]) for reply in replies_of(grid, method, rounds=1, local=STEPS)]
        for grid in (nodes_at(tmp_path / "a"), nodes_at(tmp_path / "b", others), nodes_at(tmp_path / "c"))
    ]
    assert marks[0] == marks[1]
    assert all(ours["mark"] != theirs["mark"] for ours, theirs in zip(marks[0], marks[2], strict=True))
    states = [load_file(tmp_path / name / "test" / "client-1" / "round-0000000.safetensors") for name in "ab"]
    assert not states[0]["control"].equal(states[1]["control"])
    assert len({mark["mark"] for mark in marks[0]}) == CLIENTS


def test_an_order_that_is_carried_out_again_has_the_same_receipt(tmp_path: Path):
    """However late a first attempt ends, the state on disk is the one that the server has a receipt for."""
    grid = grid_at(tmp_path)
    receipts: list[list[dict[str, Any]]] = []

    def twice(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            again = grid.app(message, grid.contexts[message.metadata.dst_node_id])
            receipts.append([dict(r.content["receipt"]) for r in (reply, again)])
            assert all(
                ours.data == theirs.data
                for ours, theirs in zip(
                    reply.content["vectors"].values(), again.content["vectors"].values(), strict=True
                )
            )
        return reply

    grid.tamper = twice
    same(train("feddyn", grid, rounds=3, participation=None), alone("feddyn", rounds=3, participation=None))
    assert len(receipts) == 3 * CLIENTS
    assert all(first == second for first, second in receipts)
    order = {"order": {"round": 1}, "common": {"start": torch.ones(2)}}
    marks = {
        mark_of(order, b"k" * 32),
        mark_of(order, b"k" * 32, anew=True),
        mark_of(order, b"l" * 32),
        mark_of({**order, "common": {"start": torch.zeros(2)}}, b"k" * 32),
    }
    assert len(marks) == 4
    assert all(0 <= mark < 2**48 for mark in marks)


def test_a_state_from_before_there_were_marks_is_read(tmp_path: Path):
    from fedflat.storage.checkpoint import write_checkpoint

    kept = KeptState(tmp_path, "run", 0)
    kept.directory.mkdir(parents=True)
    write_checkpoint(kept.directory / "round-0000004.safetensors", {"dual": torch.ones(2)}, {"checksum": 77})
    assert kept.read((4, 77))["dual"].equal(torch.ones(2))
    with pytest.raises(LostState, match="another one than the server was told of"):
        kept.read((4, 78))


# -- what a node insists on ------------------------------------------------------------------------

NOISY = "scaffold + private-uploads(clip=0.5, noise=2)"
REFUSED = {
    "no noise": (Require(noise=1.0), {}, "scaffold", {}, r"private-uploads\(noise=1\)"),
    "too little noise": (Require(noise=3.0), {}, NOISY, {}, "noise is 2, at least 3 is needed"),
    "noise switched off": (
        Require(noise=0.1),
        {},
        "fedavg + private-uploads(noise=0)",
        {},
        "noise is 0, at least 0.1",
    ),
    "vectors too long": (Require(clip=0.4), {}, NOISY, {}, "clip is 0.5, at most 0.4"),
    "another vector too long": (
        Require(clip=0.5),
        {},
        "scaffold + private-uploads(clip=0.5, noise=2, clip_extra=7)",
        {},
        "clip is 7, at most 0.5",
    ),
    "epochs": (Require(noise=1.0), {}, NOISY, {"local": ff.LocalSGD(epochs=1)}, "steps, not epochs"),
    "statistics": (Require(noise=1.0), {}, NOISY, {"norm": True}, "BatchNorm statistics would leave"),
    "a number of samples": (
        Require(withheld=("samples",)),
        {},
        "fedavg",
        {},
        "number of samples would leave",
    ),
    "a loss": (Require(withheld=("loss",)), {}, "fedavg", {}, "training loss would leave"),
    "a report": (Require(withheld=("report",)), {}, "fedavg", {}, "a report would leave"),
    "the node's config": (None, {"require-noise": 3.0}, NOISY, {}, "noise is 2, at least 3"),
    "the node's clip": (None, {"require-clip": 0.1}, NOISY, {}, "clip is 0.5, at most 0.1"),
    "the node's words": (
        None,
        {"require-withheld": "loss, report"},
        "fedavg",
        {},
        "loss would leave. a report",
    ),
    "the stricter of both": (
        Require(noise=1.0),
        {"require-noise": 2.5},
        NOISY,
        {},
        "noise is 2, at least 2.5",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_node_refuses_terms_below_its_floor(case: str, tmp_path: Path, told: list[str]):
    require, config, method, more, sentence = REFUSED[case]
    norm = bool(more.get("norm"))
    grid = nodes_at(tmp_path, norm=norm, app={"require": require}, **config)
    with pytest.raises(ff.FedflatError, match=rf"it refused: This node insists on more privacy .*{sentence}"):
        train(method, grid, rounds=1, **{"local": STEPS, **more})
    assert sum("This node insists on more privacy" in line for line in told) == 3
    assert not any("leaving:" in line for line in told)


def test_a_node_takes_part_at_or_above_its_floor(tmp_path: Path, told: list[str]):
    require = Require(noise=2.0, clip=0.5)
    run = train(NOISY, nodes_at(tmp_path / "a", app={"require": require}), rounds=1, local=STEPS)
    assert len(run.history[0]["clients"]) == 3
    (line, *_) = [line for line in told if "leaving:" in line]
    assert "leaving: update, control, client, round, samples, steps" in line
    config = {"require-noise": 2, "require-clip": 0.5, "require-withheld": "samples report loss buffers"}
    run = train(NOISY, nodes_at(tmp_path / "b", **config), rounds=1, local=STEPS)
    assert len(run.history[0]["clients"]) == 3
    run = train(
        NOISY,
        nodes_at(tmp_path / "c", norm=True, app={"require": require}),
        rounds=1,
        local=STEPS,
        norm=True,
        buffers="server",
    )
    assert len(run.history[0]["clients"]) == 3


def test_one_node_that_refuses_does_not_stop_the_others(tmp_path: Path):
    grid = nodes_at(tmp_path)
    grid.contexts[2].node_config["require-noise"] = 1.0
    run = train("fedavg", grid, rounds=1, participation=None)
    assert run.history[0]["clients"] == [0, 2, 3]
    assert "client 1, round 0: it refused: This node insists on" in run.history[0]["rejected"][0]


def test_the_generated_app_insists_on_what_its_experiment_promises(tmp_path: Path, told: list[str]):
    promised = tmp_path / "experiment.yaml"
    promised.write_text("method: fedavg + private-uploads(clip=2, noise=1.5)\n")
    require = Require.promised_by(promised)
    assert (require.noise, require.clip) == (1.5, 2.0)
    with pytest.raises(ff.FedflatError, match=r"noise is 1, at least 1\.5 is needed"):
        require.check(_trained_by("fedavg + private-uploads(clip=1, noise=1)"), report=False)
    with pytest.raises(ff.FedflatError, match=r"must end with private-uploads\(clip=2, noise=1\.5\)"):
        require.check(_trained_by("fedavg"), report=False)
    require.check(_trained_by("fedavg + private-uploads(clip=2, noise=1.5)"), report=False)
    promised.write_text("method: fedavg\n")
    assert Require.promised_by(promised) == Require()


def _trained_by(method: str) -> ClientRound:
    """A node's training with that method."""
    return ClientRound(
        ff.FlatModel(torch.nn.Linear(3, 2)),
        ff.as_method(method),
        ff.LocalSGD(steps=2),
        torch.nn.functional.cross_entropy,
        0,
    )


def test_a_mistake_in_what_is_insisted_on_is_not_passed_over(tmp_path: Path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr("fedflat.engines.flower.nodes.say", lambda level, sentence: told.append(sentence))
    for config, sentence in (
        ({"require-nosie": 1.0}, "no setting 'require-nosie'. Did you mean 'require-noise'"),
        ({"require_noise": 1.0}, "no setting 'require_noise'. Did you mean 'require-noise'"),
        ({"require-noise": "much"}, "noise must be a number, not 'much'"),
        ({"require-noise": -1.0}, "noise must be above 0"),
        ({"require-withheld": "names"}, "withheld has 'names'"),
    ):
        grid = nodes_at(tmp_path, **config)
        with pytest.raises(ff.FedflatError, match="0 of 4 clients connected"):
            train("fedavg", grid, rounds=1, patience=Limits(connect=0.05, poll=0.01))
        assert any(sentence in line for line in told), told
        told.clear()


def test_a_mechanism_after_the_noise_makes_it_worth_nothing(tmp_path: Path):
    class Tattler(ff.Mechanism):
        def leave(self, local: Any, upload: Any) -> None:
            upload.samples = local.samples

    from fedflat.client.round import ClientRound

    model = ff.FlatModel(network())
    for parts, good in (([ff.PrivateUploads(), Tattler()], False), ([Tattler(), ff.PrivateUploads()], True)):
        training = ClientRound(model, ff.Method("mine", parts), STEPS, torch.nn.functional.cross_entropy, 0)
        if good:
            Require(noise=1.0).check(training, report=True)
        else:
            with pytest.raises(ff.FedflatError, match="must end with private-uploads"):
                Require(noise=1.0).check(training, report=True)


# -- NaN and infinity ------------------------------------------------------------------------------


def test_vectors_that_are_not_finite_leave_as_zeros_and_noise(tmp_path: Path, told: list[str]):
    def broken(node: Any) -> ff.Federation:
        shard = federation().client(node["partition-id"])
        inputs = shard.inputs.clone()
        if node["partition-id"] == 1:
            inputs[:, 0] = math.nan
        if node["partition-id"] == 2:
            inputs[0, 0] = math.inf
        return ff.Federation([(inputs, shard.targets)], classes=3)

    method = "scaffold + private-uploads(clip=0.5, noise=1)"
    replies = replies_of(nodes_at(tmp_path, broken, norm=True), method, rounds=2, local=STEPS, norm=True)
    assert len(replies) == 2 * CLIENTS
    for reply in replies:
        for name, array in reply.content["vectors"].items():
            vector = torch.frombuffer(bytearray(array.data), dtype=torch.float32)
            assert torch.isfinite(vector).all(), name
            if name != "buffers":
                assert 0.25 < float(vector.std()) < 1.0
    warned = [line for line in told if "NaN or infinite values" in line]
    assert warned[0] == (
        "client 1, round 0: update, control, buffers held NaN or infinite values and leave as zeros, buffers as "
        "received (3 vectors of this run so far)."
    )
    assert sum("client 1" in line for line in warned) == 2
    assert (tmp_path / "test" / "client-1" / "zeroed").read_text() == "6"
    assert not (tmp_path / "test" / "client-0" / "zeroed").exists()
    sent = {value for reply in replies for value in numbers_in(reply) if value == value}
    assert 6 not in sent


def test_a_simulation_warns_of_vectors_that_are_not_finite():
    broken = federation()
    broken._arrays[1] = (broken._arrays[1][0] * math.nan, broken._arrays[1][1])
    method = "fedavg + private-uploads(clip=0.5, noise=0)"
    with pytest.warns(UserWarning, match="private-uploads: vectors that hold NaN or infinite values leave"):
        run = ff.train(broken, network(), method, rounds=1, local=STEPS, weighting="uniform")
    assert not run.history[0]["rejected"]
    assert torch.isfinite(run.server.w).all()


# -- what a server may name ------------------------------------------------------------------------


def ordered(
    home: Path, changes: dict[str, Any], model: Any = None, data: Any = load, words: str = "train"
) -> Message:
    """What a node answers to an order whose terms have been changed on the way."""
    sent: list[Message] = []
    grid = grid_at(home)
    grid.tamper = lambda message, reply: sent.append(message) or reply
    train("scaffold", grid, rounds=1)
    content, node = sent[-1].content, sent[-1].metadata.dst_node_id
    order = content["order"]
    order["terms"] = json.dumps({**json.loads(str(order["terms"])), **changes})
    reply = client_app(data, model=model)(Message(content, node, words), grid.contexts[node])
    assert reply is not None
    return reply


@pytest.mark.parametrize("extension", ["safetensors", "pt"])
def test_a_server_names_no_file_on_a_node(extension: str, tmp_path: Path):
    """Neither one that is there nor one that is not: the two answers are the same."""
    there, missing = tmp_path / f"there.{extension}", tmp_path / f"missing.{extension}"
    there.write_bytes(b"secret contents")
    answers = [
        str(ordered(tmp_path, {"model": f"mlp:{path}"}).content["refusal"]["reason"])
        for path in (there, missing)
    ]
    assert answers[0] == answers[1]
    assert "a node opens no file that a server asks for" in answers[0]
    assert str(tmp_path) not in answers[0]


def test_weights_in_a_file_of_the_server_travel_without_their_name(tmp_path: Path):
    """A run that starts from a file has the bits of one process, though no node has the file."""
    from fedflat.engines.flower.server import serve
    from fedflat.experiments.schema import Experiment

    settings = {"clients": CLIENTS, "method": "fedavg", "rounds": 1, "local": {"steps": 2}}
    trained = ff.train(federation(), "mlp", "fedavg", rounds=1, out=tmp_path / "before", local=STEPS)
    file = tmp_path / "here.safetensors"
    (tmp_path / "before" / "model.safetensors").rename(file)
    experiment = Experiment.model_validate({**settings, "model": f"mlp:{file}", "participation": "everyone"})
    grid = LocalGrid(
        client_app(load), [{"partition-id": n, "state-dir": str(tmp_path / "nodes")} for n in range(CLIENTS)]
    )
    sent: list[str] = []

    def look(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            sent.append(str(message.content["order"]["terms"]))
            if file.exists():
                file.rename(tmp_path / "gone")
        return reply

    grid.tamper = look
    run = serve(grid, experiment, tmp_path / "run", QUICK)
    assert sent and all(str(tmp_path) not in text for text in sent)
    filled = experiment.with_defaults()
    expected = ff.train(
        federation(),
        trained.model,
        "fedavg",
        rounds=1,
        local=ff.LocalSGD(lr=filled.local.lr, steps=2, batch_size=filled.local.batch_size),
        seed=0,
    )
    assert run.server.w.equal(expected.server.w)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": "load"}, "type of numbers that cannot be"),
        ({"dtype": ["float32"]}, "type of numbers that cannot be"),
        ({"run": 7}, "names a run that cannot be"),
        ({"local": {"lr": 0.1, "file": "/etc/passwd"}}, "no readable terms"),
        ({"model": "no-such-model"}, "There is no model"),
        ({"model": "../mlp"}, "opens no file"),
    ],
)
def test_terms_that_cannot_be_are_one_sentence(changes: dict[str, Any], sentence: str, tmp_path: Path):
    own = None if "model" in changes else lambda shape, classes: network()
    assert sentence in str(ordered(tmp_path, changes, own).content["refusal"]["reason"])


# -- what errors say -------------------------------------------------------------------------------


def said(reply: Message) -> str:
    """Why a node did not do as it was asked."""
    return str(reply.error.reason if reply.has_error() else reply.content["refusal"]["reason"])


@pytest.mark.parametrize("kind", [ff.FedflatError, KeyError, OSError])
def test_the_text_of_an_error_stays_on_the_node(kind: type[Exception], tmp_path: Path, told: list[str]):
    """The data hook's may hold a sample: the server is told that there is an error, and no more."""

    def spill(node: Any) -> ff.Federation:
        raise kind("row 17: 'Meier, diabetes' is no number")

    for words in ("query.hello", "train"):
        reply = ordered(tmp_path, {}, lambda shape, classes: network(), spill, words)
        assert "Meier" not in said(reply)
        assert "own log says" in said(reply)
        assert any("Meier" in line for line in told)
        told.clear()


@pytest.mark.parametrize("report", [True, False])
def test_labels_do_not_leave_with_an_error_of_training(report: bool, tmp_path: Path, told: list[str]):
    def two_classes(shape: Any, classes: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))

    reply = ordered(tmp_path, {"report": report}, two_classes)
    assert "bounds" not in said(reply)
    assert "own log says" in said(reply)
    assert any("out of bounds" in line for line in told), told


def test_no_path_of_a_node_leaves_with_an_error(tmp_path: Path, told: list[str]):
    """A state that is lost, one that is damaged, and a secret that is."""
    home = tmp_path / "clinic-of-doctor-meier"
    for spoil, where in (
        (
            lambda: [p.unlink() for p in home.rglob("client-2/*.safetensors")],
            "is not in the node's state directory",
        ),
        (lambda: [p.write_bytes(b"x") for p in home.rglob("client-2/*.safetensors")], "own log says why"),
        (lambda: (home / "secret").write_bytes(b"x"), "own log says why"),
    ):
        grid = nodes_at(home)
        replies: list[Message] = []

        def look(
            message: Message, reply: Message, spoil: Any = spoil, replies: list[Message] = replies
        ) -> Message:
            order = message.content.get("order", {})
            if order.get("client") == 2:
                replies.append(reply)
                spoil()
            return reply

        grid.tamper = look
        train("feddyn", grid, rounds=2, participation=None, patience=Limits(poll=0.01, too_few="skip"))
        assert where in said(replies[1])
        assert "meier" not in said(replies[1])
        assert any("meier" in line for line in told)
        told.clear()
        (home / "secret").unlink()
