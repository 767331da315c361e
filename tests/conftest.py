"""Shared by all tests: one thread, so that results do not depend on the machine's load."""

from pathlib import PurePath
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """With `-n`, tests of the engine ray are run by one process: Ray takes seconds to start, and many processes."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if PurePath(nodeid.split("::")[0]).name.startswith("test_ray") else nodeid

    return Scheduling(config, log)
