"""Shared by all tests: one thread, so that results do not depend on the machine's load."""

import sys
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


TOGETHER = (
    *("test_ray", "test_flower"),
    *("test_caveats", "test_datasets", "test_experiments", "test_extras", "test_recording"),
    *("test_report_browser", "test_site", "test_tutorials"),
)
"""How names of files begin whose tests start many processes, slowly, or are prepared for at length, all at once."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """With `-n`, tests that belong together are run by one process, the others by any."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = PurePath(nodeid.split("::")[0]).name
            return next((start for start in TOGETHER if name.startswith(start)), nodeid)

    return Scheduling(config, log)


@pytest.fixture
def fedflat(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: exit code, output, errors."""
    from fedflat.cli import main

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedflat", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call
