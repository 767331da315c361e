"""Flatness recorded while a run goes on, and measured of run directories afterwards."""

import json
from itertools import combinations

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedflat as ff
from fedflat.checkpoint import read_checkpoint
from fedflat.cli import app
from fedflat.experiments.flatness_of import read_flatness, read_landscape
from fedflat.experiments.model_of import model_of
from fedflat.experiments.reading import make_experiment
from fedflat.experiments.running import run_experiment
from fedflat.flatness.recording import wanted
from fedflat.models import build_model

SGD = ff.LocalSGD(lr=0.1, epochs=1, batch_size=20)


@pytest.fixture(scope="module")
def federation():
    return ff.federate("digits", ff.Dirichlet(0.5), clients=6, seed=3)


def train(federation, method="fedavg", **settings):
    settings = {"rounds": 2, "participation": 4, "seed": 3, **settings}
    return ff.train(federation, "mlp-200-100", method, SGD, **settings)


UPDATES: list[torch.Tensor] = []


class Kept(ff.Mechanism):
    """Remembers all updates."""

    name = "kept"

    def receive(self, server, upload):
        """Keep a copy."""
        UPDATES.append(upload.update.double().clone())


@pytest.mark.parametrize("method", ["fedavg", "fednsam", "feddyn"])
def test_distance_and_drift_are_those_of_the_uploads(federation, method):
    UPDATES.clear()
    models = []
    composed = ff.Method("watched", [*ff.as_method(method).mechanisms, Kept()])
    run = train(
        federation,
        composed,
        rounds=3,
        measure=["distance", "drift"],
        on_round=lambda r: models.append((r.server.start.double(), r.server.w.double().clone())),
    )
    for index, (start, w) in enumerate(models):
        updates = UPDATES[4 * index : 4 * index + 4]
        numbers = run.history[index]["measures"]
        far = np.mean([torch.sum((start + u - w) ** 2).item() for u in updates])
        assert numbers["distance"] == pytest.approx(far, rel=1e-4)
        cosines = [torch.cosine_similarity(a, b, dim=0).item() for a, b in combinations(updates, 2)]
        assert numbers["drift cosine"] == pytest.approx(np.mean(cosines), abs=1e-5)
        diversity = sum(u @ u for u in updates) / torch.sum(sum(updates) ** 2)
        assert numbers["drift"] == pytest.approx(diversity.item(), rel=1e-4)


def test_recorded_is_what_the_functions_say(federation):
    measures = [{"discrepancy": {"rho": 0.1, "every": 1}}, {"sharpness": {"every": 1, "samples": 300}}]
    run = train(federation, "fedsam", measure=measures, rounds=1)
    first = build_model("mlp-200-100", federation, 3)
    alone = ff.flatness_discrepancy(first, federation, 0.1, SGD, "fedsam", run.history[0]["clients"], seed=3)
    numbers = run.history[0]["measures"]
    assert numbers["discrepancy"] == pytest.approx(alone.discrepancy, rel=1e-5)
    assert numbers["discrepancy global sharpness"] == pytest.approx(alone.global_sharpness, rel=1e-5)
    expected = ff.sharpness(run.model, federation.union().thinned(300))
    assert numbers["sharpness"] == pytest.approx(expected, rel=1e-5)


def test_each_measure_has_its_rounds_and_the_last_has_all(federation):
    asked = ["drift", {"sharpness": {"every": 2}}, {"sharpness": {"every": 3, "part": "test"}}]
    rows = train(federation, rounds=5, measure=asked).history
    taken = [
        sorted({name.split(" ")[0] if "(" not in name else name for name in row["measures"]}) for row in rows
    ]
    test = "sharpness (test)"
    assert taken == [
        ["drift"],
        ["drift", "sharpness"],
        ["drift", test],
        ["drift", "sharpness"],
        ["drift", "sharpness", test],
    ]


def test_measuring_changes_nothing_and_engines_agree(federation):
    every = ["distance", "drift", *({name: {"every": 1}} for name in ("discrepancy", "sharpness", "trace"))]
    plain = train(federation, "fedwmsam")
    here = train(federation, "fedwmsam", measure=every)
    there = train(federation, "fedwmsam", measure=every, engine="workers:2")
    assert torch.equal(plain.server.w, here.server.w)
    assert torch.equal(plain.server.w, there.server.w)
    assert [row["measures"] for row in here.history] == [row["measures"] for row in there.history]
    assert len(here.history[0]["measures"]) > 8


def test_a_round_without_uploads_has_no_distance(federation):
    class Nothing(ff.Mechanism):
        """Uploads of nonsense."""

        name = "nothing"

        def end(self, local):
            """Not a number."""
            local.update.fill_(float("nan"))
            return {}

    run = train(federation, ff.Method("nothing", [Nothing()]), rounds=1, measure=["distance", "sharpness"])
    assert list(run.history[0]["measures"]) == ["sharpness"]
    assert len(run.history[0]["rejected"]) == 4


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["sharpnes"], "Did you mean"),
        ([{"sharpness": {"rhoo": 1}}], "no setting 'rhoo'"),
        ([{"sharpness": {"every": 0}}], "every must be a whole number"),
        ([{"sharpness": {"samples": True}}], "samples must be a whole number"),
        ([{"sharpness": {"part": "tset"}}], "part 'tset' is not possible"),
        ([{"drift": {"part": "test"}}], "do not go with it"),
        ([{"sharpness": 3}], "write sharpness"),
        ([{"sharpness": {}, "trace": {}}], "write each measure"),
        (["drift", {"drift": {"every": 2}}], "drift twice"),
    ],
)
def test_wrong_measures_are_refused(given, says):
    with pytest.raises(ff.FedflatError, match=says):
        wanted(given)
    with pytest.raises(ff.FedflatError, match=says.replace("Did", "[Dd]id")):
        make_experiment({"measure": given})


# -- of run directories ----------------------------------------------------------------------------


def fedflat(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "fedsam"
    experiment = make_experiment({"method": "fedsam", "rounds": 2, "measure": ["drift"], "clients": 8})
    run_experiment(experiment, out)
    return out


def test_the_model_of_a_run(run):
    trained = ff.model_of(run)
    vectors, _ = read_checkpoint(max((run / "checkpoints").glob("*.safetensors")))
    assert torch.equal(trained.model.vector, vectors["w"])
    assert trained.round == 2
    assert all(row["measures"]["drift"] > 0 for row in ff.read_metrics(run))


def test_the_model_of_an_unfinished_run(run, tmp_path):
    experiment = make_experiment({"method": "fedsam", "rounds": 2, "clients": 8})
    run_experiment(experiment, tmp_path / "half", stop=lambda: True)
    trained = model_of(tmp_path / "half")
    assert trained.round == 1
    whole = run_experiment(experiment, tmp_path / "half", resume=True)
    assert torch.equal(model_of(tmp_path / "half").model.vector, whole.server.w)
    assert torch.equal(whole.server.w, model_of(run).model.vector)


def test_flatness_of_a_run(run):
    shown = fedflat("flatness", run, "--top", "2", "--lpf", "--set", "low-pass.draws=4", "--samples", "200")
    trained = model_of(run)
    data = trained.federation.union().thinned(200)
    measures = read_flatness(run)["measures"]
    assert set(measures) == {"sharpness", "client-sharpness", "worst-case", "eigenvalues", "low-pass"}
    assert measures["sharpness"]["numbers"]["sharpness"] == pytest.approx(ff.sharpness(trained.model, data))
    values = ff.hessian_eigenvalues(trained.model, data, top=2).values
    assert measures["eigenvalues"]["result"]["values"] == pytest.approx(list(values), rel=1e-3)
    assert measures["low-pass"]["result"]["filtered"]["draws"] == 4
    assert f"{ff.sharpness(trained.model, data):.4g}" in shown


def test_what_is_known_is_not_measured_again(run):
    small = ("flatness", run, "-m", "sharpness", "--samples", "100")
    fedflat(*small)
    first = read_flatness(run)["measures"]["sharpness"]
    fedflat(*small)
    assert read_flatness(run)["measures"]["sharpness"] == first
    fedflat(*small[:-1], "150")
    assert read_flatness(run)["measures"]["sharpness"]["settings"]["samples"] == 150
    fedflat(*small, "--set", "sharpness.rho=0.2")
    assert read_flatness(run)["measures"]["sharpness"]["settings"]["rho"] == 0.2


def test_every_measure_there_is(run):
    few = ["--set", "low-pass.draws=2", "--set", "radius.directions=2", "--set", "density.steps=3"]
    fedflat("flatness", run, "--all", "--samples", "60", *few)
    content = json.loads((run / "flatness.json").read_text())
    assert set(content["measures"]) >= set(ff.MEASURES)
    distances = content["measures"]["distance"]["numbers"]
    assert distances["distance"] == pytest.approx(
        distances["distance to average"], rel=1e-4
    )  # FedSAM averages


def test_test_data_has_a_row_of_its_own(run):
    fedflat("flatness", run, "-m", "sharpness", "--part", "test")
    trained = model_of(run)
    expected = ff.sharpness(trained.model, trained.federation.test)
    numbers = read_flatness(run)["measures"]["sharpness (test)"]["numbers"]
    assert numbers == {"sharpness (test)": pytest.approx(expected)}


@pytest.mark.parametrize("line", [False, True])
def test_landscape_of_a_run(run, line):
    options = ["--line"] if line else []
    fedflat(
        "landscape", run, "--points", "3", "--samples", "50", "--part", "train", "--part", "test", *options
    )
    content = read_landscape(run)
    trained = model_of(run)
    for part, data in (("train", trained.federation.union()), ("test", trained.federation.test)):
        losses = np.array(content["losses"][part])
        assert losses.shape == ((3,) if line else (3, 3))
        middle = ff.Surface(trained.model, data.thinned(50)).value()
        assert losses[(1,) * losses.ndim] == pytest.approx(middle, rel=1e-6)
    assert not (run / "landscape-points.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["flatness", "RUN", "-m", "sharp"], "no measure 'sharp'"),
        (["flatness", "RUN", "--part", "tests"], "part='tests'"),
        (["flatness", "RUN", "--set", "rho=1"], "sharpness.rho=0.1"),
        (["flatness", "RUN", "--set", "sharpness.r=1"], "no setting 'r'"),
        (["flatness", "nowhere"], "nowhere"),
        (["landscape", "RUN", "--part", "tests"], "write train or test"),
        (["landscape", "RUN", "--reach", "0"], "reach above 0"),
    ],
)
def test_mistakes_are_sentences(run, arguments, says):
    arguments = [str(run) if argument == "RUN" else argument for argument in arguments]
    with pytest.raises(ff.FedflatError, match=says.replace(".", r"\.")):
        fedflat(*arguments)


def test_fedwmsam_traces_the_cosine_that_moves_alpha(federation):
    UPDATES.clear()
    momenta = []
    composed = ff.Method("watched", [*ff.as_method("fedwmsam").mechanisms, Kept()])
    run = train(
        federation,
        composed,
        rounds=3,
        on_round=lambda r: momenta.append(r.server.vector("gradient").double().clone()),
    )
    for index in (1, 2):
        cosines = [
            -torch.cosine_similarity(u, momenta[index - 1], dim=0) for u in UPDATES[4 * index : 4 * index + 4]
        ]
        assert run.history[index]["scalars"]["cosine"] == pytest.approx(
            torch.stack(cosines).mean().item(), abs=1e-5
        )
    assert run.history[0]["scalars"]["cosine"] == 0
