"""What people get wrong when they write their first mechanism: each slip is a sentence, and none stays silent."""

import dataclasses
import pickle
from typing import Any

import pytest
import torch

import fedflat as ff
from fedflat.methods.mechanism import Correction, registry

LOCAL = ff.LocalSGD(lr=0.1, epochs=2, batch_size=10)


@pytest.fixture(autouse=True)
def _forgotten():
    """What tests define is forgotten again: a name is known everywhere."""
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)


def federation() -> ff.Federation:
    random = torch.Generator().manual_seed(0)
    clients = [(torch.randn(20, 4, generator=random), torch.arange(20) % 3) for _ in range(3)]
    return ff.Federation(clients)


def mechanism(contract: Any = None, **hooks: Any) -> ff.Mechanism:
    """A mechanism with these hooks, whose `contract` returns that."""
    if contract is not None:
        hooks["contract"] = lambda self: contract
    kind = type("Mine", (ff.Mechanism,), hooks)
    made: ff.Mechanism = kind()
    return made


def train(*mechanisms: ff.Mechanism, engine: str = "inprocess", rounds: int = 2) -> ff.Run:
    return ff.train(federation(), "mlp", ff.Method("tried", mechanisms), LOCAL, rounds=rounds, engine=engine)


def keep_one(self, local):
    local.state["h"] = local.update.clone()
    return {}


# -- the class -------------------------------------------------------------------------------------

CLASSES: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt hook": (
        {"directon": lambda self, step, d: None},
        "no hook of this name. Did you mean 'direction'",
    ),
    "too few arguments": ({"direction": lambda self, d: None}, r"write direction\(self, step, d\)"),
    "too many arguments": ({"finish": lambda self, server, w: None}, r"write finish\(self, server\)"),
    "no self": ({"contract": lambda: ff.Contract()}, r"write contract\(self\)"),
    "a parameter without a type": ({"rho": 0.1}, "no type and would be no parameter; write rho: float = 0.1"),
    "an __init__": ({"__init__": lambda self, rho: None}, "has an __init__; write its parameters as fields"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_that_cannot_work_is_refused_where_it_is_written(name: str):
    content, says = CLASSES[name]
    with pytest.raises(ff.FedflatError, match=f"^Mine.*{says}"):
        type("Mine", (ff.Mechanism,), content)
    assert "mine" not in registry


def test_what_a_class_may_have_beside_hooks():
    class Fine(ff.Mechanism):
        """Constants, helpers, optional and collected arguments, a name of its own."""

        name = "fine"
        LIMIT = 3
        rho: float = ff.number(default=0.1)

        def _shift_by(self, step, far):
            return far

        def measured(self):
            return 1

        def direction(self, step, d, twice=False):
            d.mul_(1.0)

        def finish(self, *everything):
            pass

    assert train(Fine(rho=0.2)).history


def test_a_name_of_fedflat_is_not_taken_over_and_one_s_own_can_be_written_again():
    before = registry["local-ascent"]
    with pytest.raises(
        ff.FedflatError, match="has a mechanism local-ascent already; call LocalAscent something"
    ):
        type("LocalAscent", (ff.Mechanism,), {})
    assert registry["local-ascent"] is before
    first, second = (type("Notebook", (ff.Mechanism,), {}) for _ in range(2))
    assert first is not second and registry["notebook"] is second


def test_nothing_is_kept_in_a_mechanism():
    with pytest.raises(ff.FedflatError, match=r"mine: .*self\.h cannot be set.*local\.state"):
        train(mechanism(begin=lambda self, local: setattr(self, "h", local.w)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        ff.LocalAscent(rho=0.1).rho = 0.2
    ascent = ff.LocalAscent(rho=0.3)
    assert pickle.loads(pickle.dumps(ascent)) == ascent == dataclasses.replace(ascent)


# -- the method ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ff.Method([ff.ControlVariates()]), "the name comes first"),
        (lambda: ff.Method("mine", ff.ControlVariates()), r"give a list, \[ControlVariates\(\)\]"),
        (lambda: ff.Method("mine", [mechanism({})]), "contract returns {}"),
        (lambda: ff.Method("mine", [mechanism(server_state=lambda self, w: 0.0)]), "server_state returns 0.0"),
    ],
    ids=["no name", "no list", "no contract", "no mapping"],
)  # fmt: skip
def test_a_method_that_cannot_be_is_refused(make, says: str):
    with pytest.raises(ff.FedflatError, match=says):
        make()


def test_a_half_written_mechanism_does_not_spoil_advice():
    type("Broken", (ff.Mechanism,), {"server_state": lambda self, w: 1 / 0})
    with pytest.raises(ff.FedflatError, match=r"reads 'momentum'.*Add .*server-momentum"):
        ff.Method("wrong", [ff.MomentumAscent(rho=0.1)])


# -- what hooks return and name --------------------------------------------------------------------

M = ff.Contract(down=("m",))
SLIPS: dict[str, tuple[dict[str, Any], str]] = {
    "direction returns": ({"direction": lambda self, step, d: d * 0.5}, "direction returns is not used; change d"),
    "shift returns": ({"shift": lambda self, step: step.w + 1}, "what shift returns is not used; move the point"),
    "leave returns": ({"leave": lambda self, local, upload: upload}, "what leave returns is not used"),
    "combine returns nothing": ({"combine": lambda self, server, update: None}, "combine returns nothing.*vector"),
    "combine returns a number": ({"combine": lambda self, server, update: 0.5}, "combine returns 0.5"),
    "combine returns a part": ({"combine": lambda self, server, update: update[:3]}, r"a tensor of shape \(3,\)"),
    "start returns nothing": ({"start": lambda self, server, w: None}, "start returns nothing"),
    "loss returns nothing": ({"loss": lambda self, step, outputs: None}, "loss returns nothing; .* or a Pull"),
    "steady_shift returns a vector": (
        {"steady_shift": lambda self, local: local.start},
        r"steady_shift returns a tensor .* a vector and its scale",
    ),
    "steady_shift returns a part": (
        {"steady_shift": lambda self, local: (local.start[:3], 1.0)},
        "steady_shift returns .* a vector and its scale",
    ),
    "loss pulls at nothing": (
        {"loss": lambda self, step, outputs: ff.Pull(None)},
        r"loss returns a Pull with nothing; .* shape \(10, 3\)",
    ),
    "loss pulls at a part": (
        {"loss": lambda self, step, outputs: ff.Pull(outputs[0])},
        r"loss returns a Pull with a tensor of shape \(3,\); .* shape \(10, 3\)",
    ),
    "loss pulls by a word": (
        {"loss": lambda self, step, outputs: ff.Pull(outputs, "0.1")},
        "loss returns a Pull with .* its scale be a number",
    ),
    "loss pulls by a tensor": (
        {"loss": lambda self, step, outputs: ff.Pull(outputs, outputs.sum())},
        "loss returns a Pull with .* its scale be a number",
    ),
    "loss pulls the wrong way round": (
        {"loss": lambda self, step, outputs: ff.Pull(0.1, outputs)},
        r"loss returns a Pull with 0\.1; .* shape \(10, 3\)",
    ),
    "loss returns a plain pair": (
        {"loss": lambda self, step, outputs: (outputs, 0.1)},
        r"loss returns \(tensor.* a number, .* or a Pull",
    ),
    "loss returns many": ({"loss": lambda self, step, outputs: outputs}, r"returns a tensor of shape \(10, 3\)"),
    "end returns a vector": ({"end": lambda self, local: local.update}, "end returns a tensor .* a mapping"),
    "an upload too many": ({"end": lambda self, local: {"m": local.update}}, r"clients upload 'm'.*Contract\(up="),
    "an upload too few": ({"contract": ff.Contract(up=("m",))}, "names the upload 'm', but it is not among"),
    "a state too many": ({"end": keep_one}, r"clients keep 'h'.*Contract\(client=\('h',\)\)"),
    "a state that is not there yet": (
        {"contract": ff.Contract(client=("h",)), "begin": lambda self, local: local.state["h"].sum()},
        r"keeps no 'h' yet; local\.kept\('h'\)",
    ),
    "not received": ({"begin": lambda self, local: local.received["m"]}, "Nothing named 'm' was received.*contract"),
    "not kept by the server": ({"finish": lambda self, server: server.__setitem__("m", 1.0)}, "let server_state"),
    "not added": ({"finish": lambda self, server: server.total("m")}, "Nothing was added to 'm'.*server.add"),
    "not counted": ({"finish": lambda self, server: server.counted("m")}, "Nothing was counted as 'm'.*server.count"),
    # -- and what they must leave alone
    "the iterate in shift": ({"shift": lambda self, step: in_place(step.w)}, "shift changed the iterate itself"),
    "the point in shift": ({"shift": lambda self, step: in_place(step.point)}, "shift changed the iterate itself"),
    "the iterate in direction": ({"direction": lambda self, step, d: in_place(step.w)}, "direction changed"),
    "the new model": ({"finish": lambda self, server: in_place(server.w)}, "changed 'server.w' in place; `combine`"),
    "what is received": (
        {
            "contract": M,
            "server_state": lambda self, w: {"m": torch.zeros_like(w)},
            "begin": lambda self, local: in_place(local.received["m"]),
        },
        "changed 'm' in place; .* make a new vector",
    ),
    "what is kept": (
        {
            "contract": ff.Contract(client=("h",)),
            "begin": lambda self, local: in_place(local.kept("h")),
            "end": lambda self, local: local.state.update(h=local.kept("h")),
        },
        r"changed 'local\.state\['h'\]' in place",
    ),
}  # fmt: skip


def in_place(vector: torch.Tensor) -> None:
    vector.add_(1)


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_a_sentence(name: str):
    hooks, says = SLIPS[name]
    with pytest.raises(ff.FedflatError, match=says) as caught:
        train(mechanism(**hooks))
    assert "\n" not in str(caught.value)


def test_a_slip_in_a_worker_is_the_same_sentence():
    with pytest.raises(ff.FedflatError, match="mine: what direction returns is not used"):
        train(mechanism(**SLIPS["direction returns"][0]), engine="workers:2")


def test_end_may_return_nothing():
    kept = train(
        mechanism(ff.Contract(client=("h",)), end=lambda self, local: keep_one(self, local) and None)
    )
    assert all(set(kept.clients.get(client)) == {"h"} for client in range(3))


@pytest.mark.parametrize("name", ff.METHODS)
def test_no_method_of_fedflat_slips(name: str):
    assert train(*ff.METHODS[name]().mechanisms).history


# -- hooks that work together ----------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.7, 0.0, -0.5])
def test_a_correction_said_beforehand_is_one_made_step_by_step(scale):
    said = mechanism(correction=lambda self, local: Correction(scale, 0.5, ((local.start, 0.25),)))

    def direction(self, step, d):
        d.mul_(scale).add_(step.w, alpha=0.5).add_(step.local.start, alpha=0.25)

    torch.testing.assert_close(
        train(said).server.w, train(mechanism(direction=direction)).server.w, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("hook", ["direction", "loss"])
def test_the_point_is_moved_before_the_gradient_is_taken(hook):
    def move(self, step, vector):
        step.move(step.w)
        return 0.0 if hook == "loss" else None

    with pytest.raises(ff.FedflatError, match="moved in a mechanism's hook `shift`"):
        train(mechanism(**{hook: move}))


@pytest.mark.parametrize("aside", ["shift", "steady_shift"])
def test_the_iterate_is_where_the_client_is_in_begin_and_end(aside):
    seen = []

    def begin(self, local):
        seen.append(local.w.equal(local.start))

    def end(self, local):
        seen.append(torch.allclose(local.w, local.start + local.update, rtol=1e-4, atol=1e-5))

    moves = {
        "shift": lambda self, step: step.move(torch.ones_like(step.w), 0.5),
        "steady_shift": lambda self, local: (torch.ones_like(local.start), 0.5),
    }
    train(mechanism(begin=begin, end=end, **{aside: moves[aside]}))
    assert len(seen) == 12 and all(seen)


@pytest.mark.parametrize("engine", ["inprocess", "workers"])
def test_what_is_kept_may_change_its_name(engine):
    """On shared memory the old vector lies where the new one is written."""

    def end(self, local):
        local.state["older"], local.state["old"] = local.kept("old"), local.update.clone()

    run = train(mechanism(ff.Contract(client=("old", "older")), end=end), engine=engine)
    first = train(mechanism(ff.Contract(client=("old", "older")), end=end), engine="inprocess", rounds=1)
    for client in range(3):
        assert run.clients.get(client)["older"].equal(first.clients.get(client)["old"])
        assert not run.clients.get(client)["old"].equal(run.clients.get(client)["older"])
