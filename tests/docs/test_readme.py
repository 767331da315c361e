"""The README's code runs as printed, and does what the text says."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import fedflat as ff

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def printed() -> dict:
    """Run all Python blocks in one namespace, as a reader would."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 3
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    return names


def test_the_ten_lines_train(printed):
    accuracy = [row["accuracy"] for row in printed["run"].history]
    assert len(accuracy) == 20
    assert accuracy[-1] > 0.9


def test_the_compositions_are_the_named_methods(printed):
    assert printed["fedgamma"].mechanisms == ff.fedgamma().mechanisms
    assert printed["fednsam_d"].mechanisms == ff.fednsam_d().mechanisms


def test_the_mechanism_is_short_and_works(printed):
    block = next(b for b in README.read_text("utf-8").split("```") if "class Caution" in b)
    assert len([line for line in block.splitlines()[1:] if line.strip()]) <= 20
    caution, federation = printed["Caution"], printed["federation"]
    settings = {"local": ff.LocalSGD(lr=0.05, epochs=2, batch_size=20), "participation": 5, "rounds": 3}
    plain = ff.train(federation, method="scaffold", **settings)
    off = ff.train(federation, method="caution(mu=0) + control-variates", **settings)
    on = ff.train(federation, method=ff.Method("mine", [caution(mu=1.0), ff.ControlVariates()]), **settings)
    # to rounding: SCAFFOLD alone is folded into one sweep, beside a `direction` it is added step by step
    torch.testing.assert_close(off.server.w, plain.server.w, rtol=1e-5, atol=1e-6)
    lengths = [row["scalars"]["distance"] for row in on.history]
    assert all(length > 0 for length in lengths)
    # round 0 has no distance yet and equals SCAFFOLD's; from then on the clients go less far
    assert lengths[0] == off.history[0]["scalars"]["distance"]
    assert lengths[1] < off.history[1]["scalars"]["distance"]


def test_the_first_hour_is_what_was_measured():
    """The page's table comes from the file, and commands stay within the minutes that are allowed."""
    sys.path.insert(0, str(README.parent / "results"))
    try:
        import make_first_hour
    finally:
        sys.path.pop(0)
    stored = json.loads(make_first_hour.STORE.read_text("utf-8"))
    page = make_first_hour.PAGE.read_text("utf-8")
    assert make_first_hour.table(stored) in page, "run: python results/make_first_hour.py"
    for goal, limit in make_first_hour.LIMITS.items():
        steps = [step for step in stored["steps"] if step["goal"] == goal]
        assert steps and sum(step["seconds"] for step in steps) < limit
        assert any(step["accuracy"] is not None for step in steps)
