"""What is checked when a method is built, what it costs, and methods written as text."""

import dataclasses
import math

import pytest
import torch
import yaml
from test_identities import train_small, trajectory
from test_reference import SCHEDULE, VARIANTS, names_of, problem

import fedflat as ff
from fedflat.methods import mechanisms
from fedflat.methods.mechanism import registry

# -- names that are read and written -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reader", "name", "givers"),
    [
        (ff.MomentumAscent(), "momentum", ["server-momentum", "nesterov-momentum", "look-ahead-momentum"]),
        (ff.TargetAscent(), "gradient", ["momentum-blend", "personal-blend"]),
        (ff.AdaptiveWeight(), "gradient", ["momentum-blend", "personal-blend"]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_reading_what_nobody_writes(reader, name, givers):
    with pytest.raises(ff.FedflatError) as caught:
        ff.Method("mine", [ff.LocalAscent(), reader])
    message = str(caught.value)
    assert f"'mine': {reader.name} reads '{name}'" in message
    assert all(giver in message.split("Add")[1] for giver in givers)
    for giver in givers:
        provider = ff.as_method(giver).mechanisms[0]
        order = [reader, provider] if isinstance(reader, ff.AdaptiveWeight) else [provider, reader]
        assert ff.Method("mine", order).mechanisms == tuple(order)


@pytest.mark.parametrize(
    ("pair", "name"),
    [
        ([ff.ServerMomentum(), ff.NesterovMomentum()], "momentum"),
        ([ff.LookAheadMomentum(), ff.ServerMomentum(0.5)], "momentum"),
        ([ff.MomentumBlend(), ff.PersonalBlend()], "gradient"),
        ([ff.DualCorrection(), ff.DynamicRegulariser()], "dual"),
        ([ff.DualCorrection(mean="active"), ff.DynamicRegulariser(mean="active")], "dual"),
        ([ff.ControlVariates(), ff.ControlVariates()], "control"),
        ([ff.TrajectoryLoss(), ff.TrajectoryLoss(alpha=0.5)], "ema"),
        ([ff.OwnTrajectoryLoss(), ff.OwnTrajectoryLoss(alpha=0.1)], "ema"),
        ([ff.HistoryAscent(), ff.HistoryAscent(rho=0.1)], "last_model"),
    ],
    ids=lambda value: " + ".join(m.name for m in value) if isinstance(value, list) else value,
)
def test_two_writers_of_one_name(pair, name):
    with pytest.raises(ff.FedflatError) as caught:
        ff.Method("mine", pair)
    for word in ("'mine'", pair[0].name, pair[1].name, f"'{name}'"):
        assert word in str(caught.value)


def test_the_same_name_in_different_places_is_no_conflict():
    """The server's moving average and the client's own are two things."""
    method = ff.Method("both averages", [ff.TrajectoryLoss(), ff.OwnTrajectoryLoss()])
    assert train_small(method, SCHEDULE[:2]).server.w.isfinite().all()


WRONG_ORDERS = [
    # what stands first here but must stand second, and the other way round
    (ff.NesterovMomentum(), ff.DynamicRegulariser()),
    (ff.NesterovMomentum(), ff.ControlVariates()),
    (ff.ServerMomentum(), ff.DualCorrection()),
    (ff.LookAheadMomentum(), ff.DualCorrection()),
    (ff.LocalAscent(), ff.NesterovMomentum()),
    (ff.AdaptiveAscent(), ff.NesterovMomentum()),
    (ff.SharedPerturbation(), ff.NesterovMomentum()),
    (ff.InterpolatedAscent(), ff.NesterovMomentum()),
    (ff.DynamicRegulariser(), ff.LocalAscent(mix=0.5)),
    (ff.DualCorrection(), ff.LocalAscent(mix=0.5)),
    (ff.ControlVariates(), ff.LocalAscent(mix=0.5)),
    (ff.Proximal(), ff.LocalAscent(mix=0.5)),
    (ff.MomentumBlend(), ff.LocalAscent(mix=0.5)),
    (ff.ControlVariates(), ff.MomentumBlend()),
    (ff.DualCorrection(), ff.MomentumBlend()),
    (ff.Proximal(), ff.MomentumBlend()),
    (ff.ServerStep(0.5), ff.ServerMomentum()),
    (ff.ServerStep(0.5), ff.DualCorrection()),
]


@pytest.mark.parametrize(
    ("second", "first"), WRONG_ORDERS, ids=[f"{a.name} + {b.name}" for a, b in WRONG_ORDERS]
)
def test_wrong_order(second, first):
    with pytest.raises(ff.FedflatError, match=f"'mine': {second.name} must come after {first.name}"):
        ff.Method("mine", [second, ff.TrajectoryLoss(), first])
    assert ff.Method("mine", [first, ff.TrajectoryLoss(), second]).mechanisms[0] is first


def test_ascent_without_mixing_may_stand_after_corrections():
    a, b = ff.LocalAscent(0.1), ff.ControlVariates()
    paths = [trajectory(ff.Method("mine", order)) for order in ([a, b], [b, a])]
    assert torch.equal(*paths)


class Undeclared(ff.Mechanism):
    """Keeps or uploads what its contract does not name, or returns nothing where a vector is expected."""

    what: str = ff.choice("keep", "upload", "promise", "combine", "start", default="keep")

    def contract(self):
        return ff.Contract(up=("extra",) if self.what == "promise" else ())

    def start(self, server, w):
        return None if self.what == "start" else w

    def leave(self, local, upload):
        if self.what == "keep":
            local.state["memo"] = upload.update.clone()

    def end(self, local):
        return {"extra": local.update.clone()} if self.what == "upload" else {}

    def combine(self, server, update):
        return None if self.what == "combine" else update


@pytest.mark.parametrize("engine", ["inprocess", "workers:2"])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "keep",
            r"mine: clients keep 'memo', which no contract names. Write Contract\(client=\('memo',\)\).",
        ),
        (
            "upload",
            r"mine: clients upload 'extra', which no contract names. Write Contract\(up=\('extra',\)\).",
        ),
        ("promise", r"mine: a contract names the upload 'extra', but it is not among what `end` returns."),
        ("combine", r"undeclared: combine returns nothing; it must return a vector."),
        ("start", r"undeclared: start returns nothing; it must return a vector."),
    ],
)
def test_a_mechanism_that_breaks_its_contract_is_an_error_at_once(what, message, engine):
    data = [(torch.randn(6, 3), torch.randint(2, (6,))) for _ in range(3)]
    method = ff.Method("mine", [Undeclared(what)])
    with pytest.raises(ff.FedflatError, match=f"^{message}$"):
        ff.train(ff.Federation(data), torch.nn.Linear(3, 2), method, rounds=1, engine=engine)


def test_a_contract_has_tuples_of_names():
    with pytest.raises(ff.FedflatError, match=r"write down=\('ema',\), a tuple of names, not 'ema'"):
        ff.Contract(down="ema")


@pytest.mark.parametrize("thing", [ff.LocalAscent, "local-ascent", None, ff.fedsam()])
def test_not_a_mechanism(thing):
    with pytest.raises(ff.FedflatError, match=r"Method 'mine': .* is not a mechanism"):
        ff.Method("mine", [ff.ControlVariates(), thing])


# -- hyper-parameters ----------------------------------------------------------------------------------

# every number and every choice of every mechanism, with values it must refuse
REFUSED = {
    ff.LocalAscent: {"rho": [-0.1], "mix": [-0.1, 1.1]},
    ff.AdaptiveAscent: {"rho": [-0.1], "eta": [-0.1]},
    ff.AdaptiveWeight: {"alpha": [0, 1, 1.5], "decay": [-0.1, 1.1], "rule": ["both"]},
    ff.ControlVariates: {},
    ff.DualCorrection: {"beta": [0, -1], "mean": ["some"]},
    ff.DynamicRegulariser: {"beta": [0, -1], "mean": ["some"], "prox": ["cube"]},
    ff.HistoryAscent: {"rho": [-0.1], "source": ["client"]},
    ff.InterpolatedAscent: {
        "rho": [-0.1],
        "threshold": [-1],
        "window": [0, -3],
        "rho_global": [-0.1],
        "c": [-0.1, 1.1],
    },
    ff.LookAheadMomentum: {"momentum": [-0.1, 1]},
    ff.MomentumAscent: {"rho": [-0.1]},
    ff.MomentumBlend: {"alpha": [0, -1, 1.1]},
    ff.NesterovMomentum: {"momentum": [-0.1, 1]},
    ff.NotTrueDistillation: {"gamma": [-1], "tau": [0, -1]},
    ff.OwnTrajectoryLoss: {"alpha": [-0.1, 1.1], "gamma": [-1], "tau": [0], "first": ["w0"]},
    ff.PersonalBlend: {"alpha": [0, 1, 1.1]},
    ff.PrivateUploads: {"clip": [0, -1], "noise": [-1], "clip_extra": [0, -1]},
    ff.Proximal: {"mu": [-0.1]},
    ff.ServerMomentum: {"momentum": [-0.1, 1]},
    ff.ServerStep: {"lr": [0, -1]},
    ff.SharedPerturbation: {"rho": [-0.1]},
    ff.TargetAscent: {"rho": [-0.1]},
    ff.TrajectoryLoss: {"alpha": [-0.1, 1.1], "gamma": [-1], "tau": [0]},
}
SWITCHES = {"normalize", "apply"}


def test_every_parameter_of_every_mechanism_is_checked():
    assert {m.__name__ for m in REFUSED} == {*mechanisms.__all__}
    for mechanism, parameters in REFUSED.items():
        assert {f.name for f in dataclasses.fields(mechanism)} - SWITCHES == {*parameters}


@pytest.mark.parametrize(
    ("mechanism", "parameter", "value"),
    [
        (mechanism, parameter, value)
        for mechanism, parameters in REFUSED.items()
        for parameter, refused in parameters.items()
        for value in [*refused, True, math.nan, "much"]
    ],
)
def test_refused_parameters(mechanism, parameter, value):
    with pytest.raises(ff.FedflatError, match=rf"{mechanism.name}: {parameter} must be .* not "):
        mechanism(**{parameter: value})


@pytest.mark.parametrize("mechanism", [ff.ServerMomentum, ff.NesterovMomentum, ff.LookAheadMomentum])
@pytest.mark.parametrize("value", ["no", 0, None])
def test_a_switch_is_true_or_false(mechanism, value):
    with pytest.raises(ff.FedflatError, match=f"{mechanism.name}: apply must be True or False"):
        mechanism(apply=value)
    with pytest.raises(ff.FedflatError, match="local-ascent: normalize must be True or False"):
        ff.LocalAscent(normalize=value)


def test_a_window_is_a_whole_number():
    with pytest.raises(ff.FedflatError, match="window"):
        ff.InterpolatedAscent(window=2.5)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("local-ascent(normalize=false)", "local-ascent(normalize=False)"),
        ("server-momentum(apply=no)", "server-momentum(apply=False)"),
        ("fedwmsam(sam=false)", "fedwmsam(sam=False)"),
        ("fednsam(nesterov=off)", "fednsam(nesterov=False)"),
    ],
)
def test_a_word_is_never_taken_for_true(written, meant):
    """A switch that is turned off in other words must be understood or refused."""
    try:
        understood = ff.as_method(written)
    except ff.FedflatError:
        return
    assert understood.mechanisms == ff.as_method(meant).mechanisms


def test_mechanisms_are_values():
    assert ff.LocalAscent(0.1) == ff.LocalAscent(0.1) != ff.LocalAscent(0.2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ff.LocalAscent(0.1).rho = 0.2


# -- costs ---------------------------------------------------------------------------------------------

# per active client and round: vectors down and up; per local step: passes; what every client keeps
COSTS = [
    ("fedavg", 1, 1, 1, 1, []),
    ("fedavgm", 1, 1, 1, 1, []),
    ("fedprox", 1, 1, 1, 1, []),
    ("scaffold", 2, 2, 1, 1, ["control"]),
    ("feddyn", 1, 1, 1, 1, ["dual"]),
    ("fedcm", 2, 1, 1, 1, []),
    ("fedacg", 1, 1, 1, 1, []),
    ("fedntd", 1, 1, 2, 1, []),
    ("fedsam", 1, 1, 2, 2, []),
    ("fedasam", 1, 1, 2, 2, []),
    ("mofedsam", 2, 1, 2, 2, []),
    ("fedgamma", 2, 2, 2, 2, ["control"]),
    ("fedspeed", 1, 1, 2, 2, ["dual"]),
    ("fedsmoo", 2, 2, 2, 2, ["dual", "multiplier"]),
    ("fedsmoo(beta=None)", 2, 2, 2, 2, ["multiplier"]),
    ("fedlesam", 1, 1, 1, 1, ["last_model"]),
    ("fedlesam(direction=server)", 2, 1, 1, 1, []),
    ("fedlesam_s", 2, 2, 1, 1, ["control", "last_model"]),
    ("fedlesam_d", 1, 1, 1, 1, ["dual", "last_model"]),
    ("fedgf", 2, 1, 2, 2, []),
    ("fedgmt", 2, 1, 2, 1, ["dual"]),
    ("fedgmt_v2", 1, 1, 2, 1, ["dual", "ema"]),
    ("fedwmsam", 2, 1, 1, 1, []),
    ("fednsam", 2, 1, 1, 1, []),
    ("fednsam_s", 3, 2, 1, 1, ["control"]),
    ("fednsam_d", 2, 1, 1, 1, ["dual"]),
    ("fedavg_nesterov", 2, 1, 1, 1, []),
    ("fedsam_nesterov", 2, 1, 2, 2, []),
]
SERVER_KEEPS_PER_CLIENT = {"fedwmsam": ["corrector"]}
SCALARS_DOWN = {"fedgf": ["c"], "fedwmsam": ["alpha"]}
# beside the model
SERVER_KEEPS = {
    "fedavg": [],
    "fedavgm": ["momentum"],
    "scaffold": ["control"],
    "feddyn": ["dual"],
    "fedcm": ["gradient"],
    "fedacg": ["momentum"],
    "fedsmoo": ["dual", "perturbation"],
    "fedlesam": [],
    "fedgmt": ["dual", "ema"],
    "fedgmt_v2": ["dual"],
    "fedwmsam": ["corrector", "gradient"],
    "fednsam_d": ["dual", "momentum"],
}
costs = pytest.mark.parametrize(
    ("method", "down", "up", "forward", "backward", "client"), COSTS, ids=[row[0] for row in COSTS]
)


def test_the_table_is_complete():
    assert {row[0].split("(")[0] for row in COSTS} == {*ff.METHODS}


@costs
def test_declared_costs(method, down, up, forward, backward, client):
    cost = ff.as_method(method).cost
    assert (cost.down, cost.up, cost.forward, cost.backward) == (down, up, forward, backward)
    assert sorted(cost.client) == client
    assert sorted(cost.server_per_client) == SERVER_KEEPS_PER_CLIENT.get(method, [])
    assert sorted(cost.down_scalars) == SCALARS_DOWN.get(method, [])


@pytest.mark.parametrize(("method", "kept"), SERVER_KEEPS.items(), ids=SERVER_KEEPS)
def test_declared_server_state(method, kept):
    assert sorted(ff.as_method(method).cost.server) == kept


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [
        ("fedavg", 0, 0),
        ("fedgmt", 2 / 3, 0),  # the teacher's outputs once per round, in three epochs
        ("fedntd", 2 / 3, 0),
        ("fedgf(c=1)", 1, 1),  # the ascent at the client's own point
        ("fedgf(c=0.5)", 0, 0),
        ("fedsam", 0, 0),
    ],
)
def test_passes_that_are_spared_are_counted(method, forward, backward):
    run = train_small(method, SCHEDULE[:4], local=ff.LocalSGD(lr=0.1, epochs=3, batch_size=4))
    for row in run.history[1:]:
        assert row["spared_forward"] == pytest.approx(forward * row["steps"])
        assert row["spared_backward"] == backward * row["steps"]


@costs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counted_costs(method, down, up, forward, backward, client, dtype):
    """A run counts what is declared, from the second round on: in the first some state does not exist yet."""
    local = ff.LocalSGD(lr=0.1, epochs=1, batch_size=4)
    run = train_small(method, SCHEDULE[:4], local=local, dtype=dtype)
    vector = len(problem()[1]) * dtype.itemsize
    for row in run.history[1:]:
        clients, steps = len(row["clients"]), row["steps"]
        assert (row["vectors_down"], row["vectors_up"]) == (down * clients, up * clients)
        assert (row["forward"], row["backward"]) == (forward * steps, backward * steps)
        assert row["bytes_down"] == clients * (down * vector + 8 * len(SCALARS_DOWN.get(method, [])))
        assert row["bytes_up"] == clients * up * vector
    assert set(run.clients.get(1)) == set(client)
    assert set(run.server.per_client.get(1)) == {*SERVER_KEEPS_PER_CLIENT.get(method, [])}


def test_costs_add_up():
    cost = ff.as_method("fedgmt_v2 + local-ascent(rho=0.1) + not-true-distillation").cost
    assert (cost.down, cost.up, cost.forward, cost.backward) == (1, 1, 4, 2)
    run = train_small("fedgmt_v2 + local-ascent(rho=0.1) + not-true-distillation", SCHEDULE[:2])
    assert (run.total("forward"), run.total("backward")) == (4 * run.total("steps"), 2 * run.total("steps"))


# -- methods as text -----------------------------------------------------------------------------------

GAMMA = (ff.LocalAscent(0.05), ff.ControlVariates())


@pytest.mark.parametrize(
    "written",
    [
        "local-ascent(rho=0.05) + control-variates",
        "local_ascent(rho=0.05)+control_variates()",
        "Local-Ascent( rho = 5e-2 ) + CONTROL-VARIATES",
        "fedsam(rho=0.05) + control-variates",
        "fedsam + scaffold",
        "fedgamma(rho=0.05)",
        ["local-ascent(rho=0.05)", "control-variates"],
        ["local-ascent(rho=0.05) + control-variates"],
        [{"local-ascent": {"rho": 0.05}}, "control-variates"],
        [{"local_ascent": {"rho": 0.05}}, {"control_variates": None}],
        {"local-ascent": {"rho": 0.05}, "control-variates": {}},
        {"fedgamma": {"rho": 0.05}},
    ],
    ids=str,
)
def test_ways_to_write_a_method(written):
    assert ff.as_method(written).mechanisms == GAMMA


@pytest.mark.parametrize(
    "text",
    [
        "- local-ascent: {rho: 0.05}\n- control-variates",
        "local-ascent: {rho: 0.05}\ncontrol-variates:",
        "fedgamma: {rho: 0.05}",
        "fedgamma(rho=0.05)",
    ],
)
def test_methods_in_a_yaml_file(text):
    assert ff.as_method(yaml.safe_load(text)).mechanisms == GAMMA


def test_values_of_parameters():
    method = ff.as_method(
        "local-ascent(rho=1, normalize=False, mix=.5) + dynamic-regulariser(prox=norm, mean='active')"
    )
    assert method.mechanisms == (ff.LocalAscent(1, False, 0.5), ff.DynamicRegulariser(10, "active", "norm"))
    assert ff.as_method("fedsmoo(beta=None)").mechanisms == (ff.SharedPerturbation(),)
    assert ff.as_method('fedlesam(direction="server")') == ff.as_method("fedlesam(direction=server)")


@pytest.mark.parametrize("name", ff.METHODS)
def test_named_methods_are_found_with_hyphens_and_underscores(name):
    method = ff.METHODS[name]()
    assert ff.as_method(name) == ff.as_method(name.replace("_", "-")) == ff.as_method(name.upper()) == method


def test_what_is_a_method_already():
    method, mechanism = ff.fedsam(), ff.LocalAscent(0.3)
    assert ff.as_method(method) is method
    assert ff.as_method(mechanism).mechanisms == (mechanism,)


@pytest.mark.parametrize("variant", VARIANTS, ids=names_of)
def test_a_method_printed_and_read_again(variant):
    name, parameters = variant
    method = ff.METHODS[name](**parameters)
    assert ff.as_method(str(method)).mechanisms == method.mechanisms


@pytest.mark.parametrize(
    ("composed", "named"),
    [
        ("local-ascent(rho=0.01) + control-variates", ff.fedgamma()),
        ("trajectory-loss + dual-correction", ff.fedgmt()),
        ("nesterov-momentum + momentum-ascent", ff.fednsam()),
        ("adaptive-weight + personal-blend + target-ascent", ff.fedwmsam()),
        ("fedsam(rho=0.1) + feddyn", ff.fedspeed()),
    ],
)
def test_a_composed_method_trains_like_the_named_one(composed, named):
    local = ff.LocalSGD(lr=0.2, epochs=2, batch_size=6)
    assert torch.equal(trajectory(composed, local=local), trajectory(named, local=local))


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("fedsamm", "no method or mechanism 'fedsamm'. Did you mean 'fedsam'?"),
        ("local-ascend", "Did you mean 'local-ascent'?"),
        ("fedlesam_x", "Did you mean 'fedlesam-"),
        ("fedsam + control-variate", "Did you mean 'control-variates'?"),
        ("fedsam(rh=0.1)", "fedsam has no parameter 'rh'. Did you mean 'rho'?"),
        ("fedgmt(gama=0.1)", "Did you mean 'gamma'?"),
        ({"fedsam": {"rh": 0.1}}, "fedsam has no parameter 'rh'. Did you mean 'rho'?"),
        ("control-variates(rho=0.1)", "control-variates has no parameters"),
        ("fedsam(0.1)", "by name"),
        ("fedsam(0.1, rho=0.2)", "by name"),
        ("fedsam(rho=much)", "rho must be a number, not 'much'"),
        ("fedsam(rho='0.1')", "rho must be a number, not '0.1'"),
        ("feddyn(prox=cube)", "prox must be 'square' or 'norm', not 'cube'"),
        ("fedsam(rho=-1)", "rho must be at least 0, not -1"),
        ("fedsam + momentum-ascent", "reads 'momentum'"),
        ("fedcm + fedwmsam", "'gradient'"),
        ([], "empty"),
        ({}, "empty"),
        (None, "not None"),
        (3, "not 3"),
        (["fedsam", 3], "not 3"),
    ],
    ids=str,
)
def test_complaints_about_text(written, complaint):
    with pytest.raises(ff.FedflatError) as caught:
        ff.as_method(written)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "written",
    [
        "",
        " ",
        "+",
        "fedsam +",
        "fedsam rho",
        "fedsam fedavg",
        "fedsam(rho=)",
        "fedsam(rho=0.1",
        "fedsam(rho=0.1))",
        "fedsam(rho=0.1)(rho=0.2)",
        "fedsam(rho=0.1, rho=0.2)",
        "fedsam(rho=[)",
        "fedsam(rho=1/0)",
        "fedsam(**{})",
        "fedsam(rho=__import__('os'))",
        "1 + 2",
        "(fedsam)",
        {"fedsam": 0.1},
        {"fedsam": "rho"},
        {"name": "fedsam", "rho": 0.1},
    ],
    ids=str,
)
def test_nonsense_is_refused_in_a_sentence(written):
    with pytest.raises(ff.FedflatError, match=r"\w+ .*\.$"):
        ff.as_method(written)


def test_symbols_keep_their_case_in_docstrings():
    """`m` is the momentum and M the number of clients: no docstring begins with a symbol made a capital."""
    for mechanism in set(registry.values()):
        for hook, function in vars(mechanism).items():
            first = (getattr(function, "__doc__", None) or "").split(" ")[0].rstrip(".,;")
            assert not (len(first) == 1 and first.isupper() and first != "A"), (mechanism.name, hook)
