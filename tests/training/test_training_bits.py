"""What every method trains is what it trained when the numbers were stored."""

import json

import pytest
from training_bits import STORE, machine, networks, numbers

STORED = json.loads(STORE.read_text())


@pytest.mark.parametrize("key", STORED["runs"])
def test_training_is_what_it_was(key):
    method, model = key.split()
    found, stored = numbers(method, model), STORED["runs"][key]
    assert found["projections"] == pytest.approx(stored["projections"], rel=1e-9, abs=1e-9)
    if machine() == STORED["machine"]:
        assert found["sha256"] == stored["sha256"]


def test_all_methods_are_stored():
    from fedflat.methods.named import METHODS

    assert {key.split()[0] for key in STORED["runs"]} == set(METHODS) and len(STORED["runs"]) == 2 * len(
        METHODS
    )
    assert set(networks()) == {key.split()[1] for key in STORED["runs"]}
