"""Every reader of files accepts a damaged file or refuses it in a sentence: the cases that `tools/fuzz` found once,
and a few new ones."""

import random
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

_PATH = Path(__file__).parents[2] / "tools" / "fuzz"
_SPEC = spec_from_loader("fuzz_runner", SourceFileLoader("fuzz_runner", str(_PATH)))
assert _SPEC is not None and _SPEC.loader is not None
runner = module_from_spec(_SPEC)
_SPEC.loader.exec_module(runner)

FOUND = [(reader, path) for reader in runner.readers() for path in runner.corpus(reader)]
FEW = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize(("reader", "path"), FOUND, ids=lambda value: getattr(value, "name", value))
def test_a_found_case_is_accepted_or_refused_in_a_sentence(reader, path):
    runner.attempt(runner.load(reader), path.read_bytes())


@pytest.mark.parametrize("reader", runner.readers())
def test_sound_files_are_accepted(reader):
    target = runner.load(reader)
    for data in target.seeds() if hasattr(target, "seeds") else ():
        assert runner.attempt(target, data)


@pytest.mark.parametrize("reader", runner.readers())
@FEW
@given(data=st.binary(max_size=300))
def test_any_bytes_are_accepted_or_refused_in_a_sentence(reader, data):
    runner.attempt(runner.load(reader), data)


@pytest.mark.parametrize("reader", runner.readers())
@FEW
@given(seed=st.integers(0, 2**32 - 1))
def test_a_damaged_file_is_accepted_or_refused_in_a_sentence(reader, seed):
    target, dice = runner.load(reader), random.Random(seed)
    pool = runner.starting_points(reader, target)
    data = dice.choice(pool)
    for _ in range(dice.choice((1, 2, 4))):
        data = runner.mutated(data, pool, dice, getattr(target, "mutate", None))
    runner.attempt(target, data)


def test_the_runner_stops_at_a_defect_and_keeps_the_case(tmp_path, monkeypatch):
    target = tmp_path / "bad.py"
    target.write_text("def seeds():\n    yield b'12'\n\ndef check(data):\n    int(data or b'0')\n")
    monkeypatch.setattr(runner, "TARGETS", tmp_path)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["fuzz", "bad", "--minutes", "1", "--seed", "3"])
    assert runner.readers() == ["bad"]
    assert runner.main() == 1
    [case] = runner.corpus("bad")
    with pytest.raises(ValueError, match="invalid literal"):
        runner.attempt(runner.load("bad"), case.read_bytes())
