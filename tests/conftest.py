"""Shared by all tests: one thread, so that results do not depend on the machine's load."""

from pathlib import PurePath
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """With `-n`, tests of Ray are run by one process, and those of Flower too: both start many processes, slowly."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = PurePath(nodeid.split("::")[0]).name
            alone = {"test_ray": "ray", "test_flower_deployment": "flower", "test_flower_setup": "flower"}
            return next((scope for start, scope in alone.items() if name.startswith(start)), nodeid)

    return Scheduling(config, log)
