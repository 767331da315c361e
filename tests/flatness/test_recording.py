"""Flatness recorded while a run goes on, and measured of run directories afterwards."""

import json
import shutil
import warnings
from itertools import combinations

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedflat as ff
from fedflat import figures
from fedflat.cli import app
from fedflat.experiments.build import make_local
from fedflat.experiments.files import make_experiment
from fedflat.experiments.load_run import load_run
from fedflat.experiments.measure_run import read_flatness, read_landscape
from fedflat.experiments.run import run_experiment
from fedflat.flatness.recording import wanted
from fedflat.models import build_model
from fedflat.storage.checkpoint import read_checkpoint

SGD = ff.LocalSGD(lr=0.1, epochs=1, batch_size=20)


@pytest.fixture(scope="module")
def federation():
    return ff.federate("digits", ff.Dirichlet(0.5), clients=6, seed=3)


def train(federation, method="fedavg", **settings):
    settings = {"rounds": 2, "participation": 4, "seed": 3, **settings}
    return ff.train(federation, "mlp-200-100", method, SGD, **settings)


UPDATES: list[torch.Tensor] = []
ENDS: list[torch.Tensor] = []


class Kept(ff.Mechanism):
    """Remembers all updates."""

    name = "kept"

    def receive(self, server, upload):
        """Keep a copy."""
        UPDATES.append(upload.update.double().clone())


class Ends(ff.Mechanism):
    """Remembers where clients' local training ends, before another mechanism changes what they upload."""

    name = "ends"

    def end(self, local):
        """Keep a copy."""
        ENDS.append(local.update.double().clone())
        return {}


ACTIVE = ["fedgmt(server_rule='active', beta=1)", "fedspeed(dual_mean='active')"]
"""What these upload is not what they trained."""


@pytest.mark.parametrize("method", ["fedavg", "fednsam", "feddyn", *ACTIVE])
def test_distance_and_drift_are_those_of_the_local_models(federation, method):
    ENDS.clear()
    models = []
    composed = ff.Method("watched", [Ends(), *ff.as_method(method).mechanisms])
    run = train(
        federation,
        composed,
        rounds=3,
        measure=["distance", "drift"],
        on_round=lambda r: models.append((r.server.start.double(), r.server.w.double().clone())),
    )
    for index, (start, w) in enumerate(models):
        updates = ENDS[4 * index : 4 * index + 4]
        numbers = run.history[index]["measures"]
        average = sum(updates) / 4  # FedNSAM, Definition 1: clients count alike, whatever the server does
        spread = np.mean([torch.sum((u - average) ** 2).item() for u in updates])
        assert numbers["distance"] == pytest.approx(spread, rel=1e-4)
        far = np.mean([torch.sum((start + u - w) ** 2).item() for u in updates])
        assert numbers["distance to server"] == pytest.approx(far, rel=1e-4)
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
    assert numbers["discrepancy (active)"] == pytest.approx(alone.discrepancy, rel=1e-5)
    assert numbers["discrepancy (active) global sharpness"] == pytest.approx(alone.global_sharpness, rel=1e-5)
    expected = ff.sharpness(run.model, federation.union().thinned(300))
    assert numbers["sharpness"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("method", ["fedgmt", "fedwmsam", "fedacg", ACTIVE[0]])
def test_discrepancy_over_all_is_that_of_a_round_with_everyone(federation, method):
    first, some, everyone = [1, 4], [0, 2], [0, 1, 2, 3, 4, 5]
    over = {key: {"discrepancy": {"every": 1, "rho": 0.1, "clients": key}} for key in ("active", "all")}
    few = train(federation, method, participation=ff.Schedule([first, some]), measure=list(over.values()))
    whole = train(federation, method, participation=ff.Schedule([first, everyone]), measure=[over["active"]])
    numbers, expected = few.history[1]["measures"], whole.history[1]["measures"]
    for end in ("", " global sharpness", " local sharpness"):
        assert numbers[f"discrepancy{end}"] == expected[f"discrepancy (active){end}"]
    assert numbers["discrepancy"] != numbers["discrepancy (active)"]
    unmeasured = train(federation, method, participation=ff.Schedule([first, some]))
    assert torch.equal(few.server.w, unmeasured.server.w)


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


@pytest.mark.parametrize("method", ACTIVE)
def test_what_clients_trained_is_seen_from_every_engine(federation, method):
    asked = ["distance", "drift", {"discrepancy": {"every": 1}}]
    here, there = (
        train(federation, method, measure=asked, engine=engine) for engine in ("inprocess", "workers:2")
    )
    assert [row["measures"] for row in here.history] == [row["measures"] for row in there.history]
    assert torch.equal(here.server.w, there.server.w)
    assert torch.equal(here.server.w, train(federation, method).server.w)
    assert here.total("bytes_up") == train(federation, method).total("bytes_up")  # it only seems to travel


def test_local_sharpness_is_of_what_was_trained(federation):
    ENDS.clear()
    composed = ff.Method("watched", [Ends(), *ff.as_method(ACTIVE[0]).mechanisms])
    starts = []
    run = train(
        federation,
        composed,
        measure=[{"discrepancy": {"every": 1}}],
        on_round=lambda r: starts.append(r.server.start.clone()),
    )
    data = federation.to(torch.float32, "cpu")
    for index, row in enumerate(run.history):
        ends = [starts[index] + end.float() for end in ENDS[4 * index : 4 * index + 4]]
        pairs = list(zip(row["clients"], ends, strict=True))
        model = build_model("mlp-200-100", federation, 3)
        each = [ff.sharpness(model, data.client(client), at=end) for client, end in pairs]
        expected = np.average(each, weights=[data.size(client) for client in row["clients"]])
        assert row["measures"]["discrepancy (active) local sharpness"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("method", ["fedavg", ACTIVE[0]])
def test_of_private_uploads_no_more_is_seen_than_the_server_sees(federation, method):
    UPDATES.clear()
    composed = ff.Method(
        "watched", [*ff.as_method(method).mechanisms, ff.PrivateUploads(clip=0.5, noise=0.01), Kept()]
    )
    run = train(federation, composed, measure=["drift"])
    seen = np.sqrt(np.mean([(u @ u).item() for u in UPDATES[:4]]))
    assert run.history[0]["measures"]["drift norm"] == pytest.approx(seen, rel=1e-4)


def test_a_round_without_uploads_has_no_distance(federation):
    class Nothing(ff.Mechanism):
        """Uploads of nonsense."""

        name = "nothing"

        def end(self, local):
            """Not a number."""
            local.update.fill_(float("nan"))
            return {}

    measure = ["distance", {"sharpness": {"every": 1}}]
    with pytest.raises(ff.Diverged, match="every upload holds NaN") as ended:
        train(federation, ff.Method("nothing", [Nothing()]), rounds=2, measure=measure)
    row = ended.value.run.history[0]
    assert list(row["measures"]) == ["sharpness"]
    assert len(row["rejected"]) == 4


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
        ([{"discrepancy": {"clients": "some"}}], "clients must be active or all"),
        ([{"drift": {"clients": "all"}}], "drift has no setting 'clients'"),
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
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "fedsam"
    experiment = make_experiment({"method": "fedsam", "rounds": 2, "measure": ["drift"], "clients": 8})
    run_experiment(experiment, out)
    return out


@pytest.fixture
def run(finished, tmp_path):
    """A copy: what one test measures, no other finds."""
    return shutil.copytree(finished, tmp_path / "fedsam")


def test_the_model_of_a_run(run):
    trained = ff.load_run(run)
    vectors, _ = read_checkpoint(max((run / "checkpoints").glob("*.safetensors")))
    assert torch.equal(trained.model.vector, vectors["w"])
    assert trained.round == 2
    assert all(row["measures"]["drift"] > 0 for row in ff.read_metrics(run))


def test_the_model_of_an_unfinished_run(run, tmp_path):
    experiment = make_experiment({"method": "fedsam", "rounds": 2, "clients": 8})
    run_experiment(experiment, tmp_path / "half", stop=lambda: True)
    trained = load_run(tmp_path / "half")
    assert trained.round == 1
    whole = run_experiment(experiment, tmp_path / "half", resume=True)
    assert torch.equal(load_run(tmp_path / "half").model.vector, whole.server.w)
    assert torch.equal(whole.server.w, load_run(run).model.vector)


def test_flatness_of_a_run(run):
    shown = fedflat("flatness", run, "--top", "2", "--lpf", "--set", "low-pass.draws=4", "--samples", "200")
    trained = load_run(run)
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
    assert 0 < distances["distance"] < distances["distance to server"]  # FedSAM's average is weighted


FURTHER = {
    "clients": 5,
    "local": {"lr": 0.1, "lr_decay": 0.5, "epochs": 1, "batch_size": 20},
    "participation": [[0, 2], [1, 2], [3, 4], [0, 1, 2, 3, 4]],
    "model": "mlp-200-100",
    "measure": ["distance", "drift", {"discrepancy": {"every": 1}}],
}
"""Three rounds with some clients, then one with everyone."""


@pytest.mark.parametrize(
    "method", ["fedgf(threshold=0.5, window=3)", "fedgmt", "fednsam", "scaffold", "fedwmsam", ACTIVE[0]]
)
def test_a_run_s_next_round_is_what_going_on_records(method, tmp_path):
    run_experiment(make_experiment({**FURTHER, "method": method, "rounds": 3}), tmp_path)
    kept = {path: path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file()}
    fedflat("flatness", tmp_path, "-m", "distance", "-m", "drift", "-m", "discrepancy")
    measures = read_flatness(tmp_path)["measures"]
    assert kept == {path: path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file()}
    gone_on = make_experiment({**FURTHER, "method": method, "rounds": 4})
    expected = run_experiment(gone_on, tmp_path, resume=True).history[3]["measures"]
    for name in ("distance", "drift", "discrepancy"):
        for key, value in measures[name]["numbers"].items():
            recorded = key.replace("discrepancy", "discrepancy (active)")
            assert value == pytest.approx(expected[recorded], rel=1e-6), key
        about = measures[name]["trained"]
        assert about["method"] == f"{ff.as_method(method).name}: {ff.as_method(method)}"
        assert about["lr"] == 0.1 * 0.5**3
        assert (about["state"], about["round"]) == ("the run's", 3)


def test_a_run_s_next_round_needs_its_states(tmp_path):
    small = {**FURTHER, "participation": [[0, 2]], "rounds": 1}
    run_experiment(make_experiment({**small, "method": "fedgf"}), tmp_path / "gf", keep_states=False)
    with pytest.raises(
        ff.FedflatError, match=r"FedGF's next round depends on states.*were removed.*--keep-states"
    ):
        fedflat("flatness", tmp_path / "gf", "-m", "distance")
    few = ["--set", "low-pass.draws=2", "--set", "radius.directions=2", "--set", "density.steps=3"]
    shown = fedflat("flatness", tmp_path / "gf", "--all", "--samples", "60", *few)
    assert "Without distance: FedGF's next round depends on states" in shown
    assert set(ff.MEASURES) - set(read_flatness(tmp_path / "gf")["measures"]) == {
        "distance",
        "drift",
        "discrepancy",
    }
    run_experiment(make_experiment({**small, "method": "fedsam"}), tmp_path / "sam", keep_states=False)
    fedflat("flatness", tmp_path / "sam", "-m", "distance")  # it keeps nothing: the model is all there is
    about = read_flatness(tmp_path / "sam")["measures"]["distance"]["trained"]
    assert (about["lr"], about["state"]) == (0.05, "none is needed")


def test_another_method_s_first_round_can_still_be_asked_for(run):
    fedflat(
        "flatness",
        run,
        "-m",
        "distance",
        "--set",
        "distance.method=fedavg",
        "--set",
        "distance.clients=[1,2]",
    )
    one = read_flatness(run)["measures"]["distance"]
    trained = load_run(run)
    sgd = make_local(trained.experiment.with_defaults().local)
    expected = ff.flatness_distance(trained.model, trained.federation, sgd, "fedavg", [1, 2], seed=0)
    assert one["numbers"]["distance"] == pytest.approx(expected.distance)
    assert one["trained"]["state"] == "initial"
    fedflat("flatness", run, "-m", "distance")
    assert read_flatness(run)["measures"]["distance"]["numbers"] != one["numbers"]


def test_curves_are_shown_at_a_few_places(run):
    shown = fedflat(
        "flatness", run, "-m", "radius", "--set", "radius.directions=2", "--samples", "50", "--again"
    )
    trained = load_run(run)
    profile = ff.loss_along_radius(trained.model, trained.federation.union().thinned(50), directions=2)
    rows = {
        row.rsplit(maxsplit=1)[0].strip(): row.split()[-1] for row in shown.splitlines() if "radius" in row
    }
    for radius in (0, 5, 10, 15):
        assert rows[f"radius {radius}"] == f"{profile.random[radius].value:.4g}"
    for radius in (5, 10, 15):
        assert rows[f"radius {radius} uphill"] == f"{profile.gradient[radius]:.4g}"
    few = ff.loss_along_radius(trained.model, trained.federation.test, radii=(0.5, 2), directions=2)
    assert list(few.numbers()) == ["0.5", "0.5 uphill", "2", "2 uphill"]


def test_test_data_has_a_row_of_its_own(run):
    fedflat("flatness", run, "-m", "sharpness", "--part", "test")
    trained = load_run(run)
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
    trained = load_run(run)
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
        scalars, mean = run.history[index]["scalars"], torch.stack(cosines).mean().item()
        assert scalars["cosine"] == pytest.approx(mean, abs=1e-5)
        assert scalars["one-minus-cosine"] == pytest.approx(1 - mean, abs=1e-5)
    assert run.history[0]["scalars"]["cosine"] == run.history[0]["scalars"]["one-minus-cosine"] == 0
    (drawn,) = figures.traces({"FedWMSAM": run.history}, "one-minus-cosine").axes  # Figure 9, or 7
    assert drawn.lines[0].get_ydata()[1:] == pytest.approx(
        [1 - row["scalars"]["cosine"] for row in run.history[1:]], abs=1e-6
    )


def test_fedgf_records_how_long_updates_are(federation):
    UPDATES.clear()
    composed = ff.Method("watched", [*ff.as_method("fedgf").mechanisms, Kept()])
    run = train(federation, composed, rounds=3)
    for index, row in enumerate(run.history):
        lengths = [torch.linalg.vector_norm(u).item() for u in UPDATES[4 * index : 4 * index + 4]]
        assert row["scalars"]["divergence"] == pytest.approx(np.mean(lengths), rel=1e-5)  # D of Eq. 15


def test_fedgf_warns_where_its_threshold_does_not_fit(federation, tmp_path):
    with pytest.warns(UserWarning, match="interpolated-ascent") as caught:
        run = train(federation, "fedgf", rounds=12, eval_every=12, out=tmp_path)
    (sentence,) = {str(one.message) for one in caught}
    assert len(caught) == 1
    assert "threshold of 0.2" in sentence
    assert f"{run.history[9]['scalars']['divergence']:.3g}" in sentence
    assert sentence in (tmp_path / "log.txt").read_text()
    fitting = [
        f"fedgf(threshold={2 * run.history[0]['scalars']['divergence']})",
        "fedgf(c=1)",
        "fedgf(c=0.5)",
    ]
    for method in fitting:  # and whoever chose c knows it; a warning would be an error here
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(federation, method, rounds=12, eval_every=12)
