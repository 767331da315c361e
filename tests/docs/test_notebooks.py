"""Notebooks run, and are stored with results that their text agrees with."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from test_examples import NOTEBOOKS

pytestmark = pytest.mark.slow

LARGEST = 400_000
"""Bytes of a notebook: it is read in a browser, and kept with every change."""


def read(path: Path) -> Any:
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch):
    """In a fresh kernel of this environment, whatever else the person has set up for notebooks."""
    from nbclient import NotebookClient

    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("FEDFLAT_EXAMPLE_ROUNDS", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # after three rounds a model may predict one class only
    notebook = read(path)
    stored = [kinds(cell) for cell in notebook.cells]
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", coalesce_streams=True)
    client.execute(cwd=str(tmp_path))  # raises where a cell fails
    assert [kinds(cell) for cell in notebook.cells] == stored


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_its_results(path: Path):
    assert path.stat().st_size < LARGEST
    notebook = read(path)
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in codes] == list(range(1, len(codes) + 1))
    assert sum("picture" in kinds(cell) for cell in codes) >= 3
    assert sum("text" in kinds(cell) for cell in codes) >= 4
    assert set(notebook.metadata) == {"kernelspec", "language_info"}  # nothing of the machine that ran it
    assert os.sep + "site-packages" not in path.read_text("utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_numbers_in_a_notebook_s_text_are_those_it_printed(path: Path):
    cells = read(path).cells
    results = " ".join(
        output.text for cell in cells for output in cell.get("outputs", []) if "text" in output
    )
    text = next(cell.source for cell in cells if "## What we saw" in cell.source)
    claimed = re.findall(r"[+-]?\d+\.\d+", text.partition("## What we saw")[2])
    assert len(claimed) > 8
    assert [
        number for number in claimed if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", results)
    ] == []


def kinds(cell: Any) -> list[str]:
    """What a cell leaves: pictures or text."""
    outputs = cell.get("outputs", [])
    return ["picture" if "image/png" in output.get("data", {}) else "text" for output in outputs]
