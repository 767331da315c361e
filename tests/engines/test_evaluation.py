"""Every engine's test is a future of the same score, whatever is measured, and of the model as it was."""

import pytest
from tiny import score_twice

from fedflat.engines.base import make_engine


@pytest.mark.parametrize("name", ["inprocess", "workers:1", "workers:3"])
def test_the_same_score_on_every_engine(name: str):
    score_twice(make_engine(name))
