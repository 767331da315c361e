"""Shared by all tests: one thread, so that results do not depend on the machine's load."""

from pathlib import PurePath
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


TOGETHER = {
    **{"test_ray": "ray", "test_flower_deployment": "flower", "test_flower_setup": "flower"},
    **{
        name: name
        for name in ("test_datasets", "test_docs", "test_extras", "test_report_browser", "test_tutorials")
    },
}
"""By how files' names begin: what starts many processes, slowly, or prepares long for many tests."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """With `-n`, tests that belong together are run by one process, the others by any."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = PurePath(nodeid.split("::")[0]).name
            return next((scope for start, scope in TOGETHER.items() if name.startswith(start)), nodeid)

    return Scheduling(config, log)
