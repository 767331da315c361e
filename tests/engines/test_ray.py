"""Ray actors give the same bits as one process, also when they die; stragglers are bounded."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import Slow, federation, network, same, score_twice, send_with_their_classes, train
from torch import nn

import fedflat as ff
from fedflat.engines.base import make_engine
from fedflat.engines.ray import engine as engine_module
from fedflat.engines.ray.arrays import pack, unpack
from fedflat.experiments.build import make_ray
from fedflat.experiments.files import load_experiment, make_experiment


@pytest.fixture(scope="module")
def engine() -> Iterator[ff.Ray]:
    """Two actors, kept from test to test; Ray needs seconds to start."""
    send_with_their_classes(sys.modules[__name__])
    with ff.Ray(actors=2) as engine:
        yield engine


@pytest.fixture
def settings(engine: ff.Ray, monkeypatch: pytest.MonkeyPatch):
    """Changes settings of the engine for one test."""
    return lambda **changes: [monkeypatch.setattr(engine, name, value) for name, value in changes.items()]


@pytest.mark.parametrize("method", sorted(ff.METHODS))
def test_all_methods_have_the_same_bits_on_ray(method, engine):
    same(train(method, engine), train(method, "inprocess"))


def test_measures_on_ray_see_what_was_trained(engine):
    """Not what a mechanism has made of it for the server."""
    method, asked = "fedgmt(server_rule='active', beta=1)", ["distance", "drift"]
    there, here = (train(method, e, measure=asked) for e in (engine, "inprocess"))
    same(there, here)
    assert [row["measures"] for row in there.history] == [row["measures"] for row in here.history]


@pytest.mark.parametrize("policy", ["average", "local", "server", "reset"])
def test_buffers_travel_too(policy, engine):
    runs = [train("scaffold", e, module=network(norm=True), buffers=policy) for e in ("inprocess", engine)]
    same(*runs)
    states = [run.model.state_dict() for run in runs]
    assert all(states[0][name].equal(states[1][name]) for name in states[0])


def test_a_run_goes_on_elsewhere(engine, tmp_path):
    """From Ray to another engine and back, with a method whose clients keep something."""
    expected = train("fedsmoo", "inprocess", rounds=6)
    train("fedsmoo", engine, rounds=2, out=tmp_path)
    train("fedsmoo", ff.Workers(2), rounds=4, out=tmp_path, resume=True)
    same(train("fedsmoo", engine, rounds=6, out=tmp_path, resume=True), expected)


def test_images_with_channels_last_have_the_same_bits(engine):
    rng = torch.Generator().manual_seed(0)
    images = torch.randn(60, 3, 8, 8, generator=rng).to(memory_format=torch.channels_last)
    labels = torch.randint(4, (60,), generator=rng)
    data = ff.Federation.from_indices((images, labels), torch.arange(60).view(4, 15), (images, labels))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    local = ff.LocalSGD(lr=0.1, epochs=2, batch_size=6)
    runs = [ff.train(data, model, "fedgmt", local, rounds=3, engine=e) for e in ("inprocess", engine)]
    same(*runs)


class Jitter(ff.Mechanism):
    """One of a test's own, which actors do not know."""

    size: float = ff.number(default=0.1, at_least=0)

    def direction(self, step, d):
        d.mul_(1 + self.size * (step.local.client % 2))


def test_mechanisms_of_ones_own_reach_the_actors(engine):
    method = ff.Method("mine", [Jitter(size=0.2), ff.ControlVariates()])
    same(train(method, engine), train(method, "inprocess"))


# -- things die ------------------------------------------------------------------------------------


class Traced(Slow):
    """Says which process it is in."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (self.folder / str(os.getpid())).touch()
        return super().forward(x)


@pytest.mark.parametrize("method", ["scaffold", "fedgmt_v2"])
def test_an_actor_killed_in_the_middle_changes_nothing(method, engine, tmp_path):
    expected = train(method, "inprocess", rounds=3, module=Slow())
    killed: list[int] = []

    def kill() -> None:
        while not killed and not finished.wait(0.01):
            for file in tmp_path.iterdir():
                if int(file.name) != os.getpid() and not killed:
                    os.kill(int(file.name), signal.SIGKILL)
                    killed.append(int(file.name))

    finished = threading.Event()
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        run = train(method, engine, rounds=3, module=Traced(tmp_path))
    finally:
        finished.set()
        killer.join()
    assert killed
    same(run, expected)


class Deadly(nn.Module):
    """Takes its process down."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.home = os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(x)


def test_a_client_that_always_kills_its_actor_ends_the_run(engine, settings):
    settings(attempts=2)
    with pytest.raises(
        ff.FedflatError, match=r"client \d, round 0: its Ray actor was lost 2 times.*memory"
    ) as e:
        train("fedavg", engine, module=Deadly())
    assert "\n" not in str(e.value) and len(str(e.value)) < 500


# -- mistakes --------------------------------------------------------------------------------------


def test_a_failure_in_an_actor_names_client_and_round(engine):
    with pytest.raises(ff.FedflatError, match=r"^client \d, round 0: training failed in step 0 .* shapes"):
        train("fedavg", engine, module=nn.Linear(5, 3))


class Careless(ff.Mechanism):
    """Asks for something that is not there."""

    def direction(self, step, d):
        d.mul_({}["nothing"])


def test_a_failure_in_a_mechanism_is_a_sentence(engine):
    method = ff.Method("careless", [Careless()])
    with pytest.raises(ff.FedflatError, match=r"^client \d, round 0: training failed: KeyError: 'nothing'$"):
        train(method, engine)


def test_a_bad_upload_is_reported_as_on_other_engines(engine):
    runs = [train("fedavg", e, rounds=2, module=NotANumber()) for e in ("inprocess", engine)]
    assert any("holds NaN" in sentence for sentence in runs[1].history[0]["rejected"])
    same(*runs)


class NotANumber(nn.Module):
    """Fails on the samples of client 3."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (float("nan") if 2.5 < float(x.mean()) < 3.5 else 1.0)


def test_what_cannot_be_sent_is_a_sentence(engine):
    module = network()
    module.lock = threading.Lock()
    with pytest.raises((ff.FedflatError, TypeError), match="lock"):
        train("fedavg", engine, module=module)
    lock = threading.Lock()
    with pytest.raises(ff.FedflatError, match=r"cannot be sent to Ray actors .*lock"):
        train("fedavg", engine, loss=lambda a, b: lock and nn.functional.cross_entropy(a, b))


def test_another_version_elsewhere_is_refused(engine, monkeypatch):
    here = engine_module.versions()
    monkeypatch.setattr(engine_module, "versions", lambda: {**here, "torch": "1.0"})
    with pytest.raises(
        ff.FedflatError, match=r"Ray node .* has torch 2.*this process has 1\.0.*same version"
    ):
        train("fedavg", engine)


def test_no_room_for_actors_is_a_sentence(engine):
    with pytest.raises(ff.FedflatError, match=r"within 1 s: each asks for 1 CPUs and 3 GPUs.*has 0 CPUs"):
        train("fedavg", ff.Ray(actors=1, gpus_per_actor=3, patience=1))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"actors": 0}, "actors=0.*at least 1"),
        ({"ahead": -1}, "ahead=-1.*at least 0"),
        ({"deadline": 0}, "deadline=0.*above 0"),
        ({"cpus_per_actor": 0}, "more than 0 CPUs"),
        ({"on_deadline": "skipp"}, "Did you mean 'skip'"),
        ({"address": "ray://somewhere:10001"}, "Ray Client is not supported"),
    ],
)
def test_impossible_settings(arguments, says):
    with pytest.raises(ff.FedflatError, match=says):
        ff.Ray(**arguments)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(engine_module, "find_spec", lambda name: None)
    with pytest.raises(ff.FedflatError, match=r"needs ray, which is not installed.*fedflat\[ray\]"):
        make_engine("ray")


def test_engines_by_name():
    engine = make_engine("ray:3")
    assert isinstance(engine, ff.Ray) and engine.actors == 3
    with pytest.raises(ff.FedflatError, match="'ray:many' is not possible"):
        make_engine("ray:many")


def test_settings_in_an_experiment_file(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "ray.md").read_text("utf-8")
    (tmp_path / "some.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    experiment = load_experiment(tmp_path / "some.yaml", {"ray.data": "nodes"})
    engine = make_ray(experiment, 0)
    assert (engine.address, engine.actors, engine.deadline, engine.on_deadline) == ("auto", 16, 120, "skip")
    assert engine.data is not None and len(engine.data()) == 20
    assert make_experiment(experiment.to_dict()) == experiment
    with pytest.raises(ff.FedflatError, match=r"actros.*Did you mean 'actors'"):
        make_experiment({"engine": "ray", "ray": {"actros": 2}})
    with pytest.raises(ff.FedflatError, match="settings of the engine ray: choose it as well"):
        make_experiment({"engine": "workers", "ray": {"actors": 2}})


# -- stragglers ------------------------------------------------------------------------------------


class Straggler(nn.Module):
    """Takes its time over the samples of client 5, elsewhere than at home."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds, self.home = network(), seconds, os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and float(x.mean()) > 4.4 and os.getpid() != self.home:
            time.sleep(self.seconds)
        return self.inner(x)


def test_stragglers_are_skipped(engine, settings):
    settings(deadline=4.0, on_deadline="skip")
    run = train(
        "scaffold", engine, rounds=2, module=Straggler(600), participation=ff.Schedule([[1, 5, 3], [0, 2]])
    )
    assert run.history[0]["rejected"] == ["client 5, round 0: it gave no upload within 4 s and was left out."]
    without = train(
        "scaffold", "inprocess", rounds=2, participation=ff.Schedule([[1, 3], [0, 2]]), module=network()
    )
    assert [row["clients"] for row in run.history] == [[1, 3], [0, 2]]
    assert run.server.w.equal(without.server.w)
    assert run.clients.clients() == without.clients.clients() == [0, 1, 2, 3]


def test_stragglers_are_waited_for(engine, settings):
    settings(deadline=0.5, on_deadline="wait")
    schedule = ff.Schedule([[1, 5, 3]])
    with pytest.warns(UserWarning, match=r"client 5, round 0: no upload within 0.5 s .* it is waited for"):
        run = train("scaffold", engine, rounds=1, module=Straggler(0.3), participation=schedule)
    same(run, train("scaffold", "inprocess", rounds=1, module=network(), participation=schedule))


def test_stragglers_stop_the_run(engine, settings):
    settings(deadline=2.0, on_deadline="stop")
    with pytest.raises(
        ff.FedflatError, match=r"client 5, round 0: no upload within 2 s .*on_deadline='skip'"
    ):
        train("scaffold", engine, rounds=1, module=Straggler(600), participation=ff.Schedule([[1, 5, 3]]))


# -- data ------------------------------------------------------------------------------------------


def test_nodes_load_the_data_themselves(engine, settings):
    settings(data=federation)
    same(train("fedavg", engine), train("fedavg", "inprocess"))
    settings(data=lambda: federation(seed=1))
    with pytest.raises(ff.FedflatError, match=r"Ray node .* has other data.*Put the same files there"):
        train("fedavg", engine)
    settings(data=lambda: ff.federate("cifar-1000"))
    with pytest.raises(ff.FedflatError, match=r"Ray node .* cannot load the data: .*cifar-1000"):
        train("fedavg", engine)


def test_packed_tensors_keep_their_order_and_are_sent_once():
    whole = torch.arange(48.0).view(2, 3, 2, 4)
    things = {
        "last": whole.to(memory_format=torch.channels_last),
        "slices": [whole[0], whole[1], whole[:, 1:]],
        "labels": torch.tensor([3, 1]),
    }
    pickled, pieces = pack(things)
    assert sum(piece.nbytes for piece in pieces) == 48 * 4 + 48 * 4 + 2 * 8
    for piece in pieces:
        piece.flags.writeable = False
    again = unpack(pickled, pieces)
    assert again["last"].stride() == things["last"].stride()
    assert again["last"].equal(things["last"]) and again["labels"].equal(things["labels"])
    assert all(a.equal(b) for a, b in zip(again["slices"], things["slices"], strict=True))
    assert np.shares_memory(again["slices"][1].numpy(), again["slices"][2].numpy())


# -- tests while clients run -----------------------------------------------------------------------


def test_the_same_score_on_ray(engine):
    score_twice(engine)


@pytest.mark.parametrize("eval_every", [1, 2])
def test_models_are_tested_while_the_next_round_trains(engine, eval_every, monkeypatch):
    given: list[bool] = []
    let_test, open_engine = ff.Ray._let_test, ff.Ray.open

    def watched(self, actor):
        busy = [a for a in self._pool.busy() if not isinstance(a.task, range)]
        found = let_test(self, actor)
        if found and busy:
            given.append(True)
        return found

    def open_all(self, job):
        """With one actor there would be none to test on."""
        open_engine(self, job)
        while self._pool.up < 2:
            assert not self._pool.wait()

    monkeypatch.setattr(ff.Ray, "_let_test", watched)
    monkeypatch.setattr(ff.Ray, "open", open_all)
    options = {"eval_every": eval_every, "participation": 1, "module": Slow()}
    apart = train("scaffold", engine, overlap=False, **options)
    assert not given
    same(train("scaffold", engine, overlap=True, **options), apart)
    assert given
    same(apart, train("scaffold", "inprocess", **options))
