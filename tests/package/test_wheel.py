"""What `python -m build` makes: it has all it needs and nothing else, and works without the repository."""

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from test_extras import BARE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fedflat"

DATA = {
    "fedflat/py.typed",
    "fedflat/__init__.pyi",
    "fedflat/data/digits.npz",
    *(f"fedflat/experiments/papers/{paper}.yaml" for paper in ("fedgf", "fedgmt", "fednsam", "fedwmsam")),
    *(f"fedflat/engines/flower/template/{name}" for name in ("README.md", "pyproject.toml")),
    *(f"fedflat/engines/flower/template/federated/{name}" for name in ("data.py", "experiment.yaml")),
    *(f"fedflat/report/page/{name}" for name in ("page.html", "page.css", "page.js")),
}
"""Files without which something does not work, and that are easily left out."""

KINDS = {".py", ".pyi", ".typed", ".npz", ".yaml", ".md", ".toml", ".html", ".css", ".js"}
"""Endings of what belongs into a package."""


def call(*command: object, place: Path, **variables: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **variables}
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        cwd=place,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """The sdist, the wheel that is made of it, and the wheel that is made of the working tree."""
    place = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--no-isolation")  # isolation would need a network
    call(*build, "--outdir", place / "from-sdist", ROOT, place=place)
    call(*build, "--wheel", "--outdir", place / "from-tree", ROOT, place=place)
    (sdist,), (one,), (other,) = (
        tuple((place / folder).glob(kind))
        for folder, kind in (("from-sdist", "*.tar.gz"), ("from-sdist", "*.whl"), ("from-tree", "*.whl"))
    )
    return {"sdist": sdist, "wheel": one, "wheel of the tree": other}


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_is_the_package_and_nothing_else(built):
    found = content(built["wheel"])
    packed = {name for name in found if name.startswith("fedflat/")}
    there = {
        f"fedflat/{path.relative_to(PACKAGE).as_posix()}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == there
    assert packed >= DATA
    assert {Path(name).suffix for name in packed} <= KINDS
    assert all(found[name] == (PACKAGE.parent / name).read_bytes() for name in packed)
    others = {re.sub(r"^fedflat-[\d.]+\.dist-info/", "", name) for name in set(found) - packed}
    assert others == {
        "METADATA",
        "WHEEL",
        "RECORD",
        "entry_points.txt",
        "licenses/LICENSE",
        "licenses/NOTICE",
    }
    assert built["wheel"].stat().st_size < 1_000_000


def test_both_wheels_are_the_same(built):
    assert content(built["wheel"]) == content(built["wheel of the tree"])


def test_the_metadata_is_right(built):
    found = content(built["wheel"])
    (raw,) = (text for name, text in found.items() if name.endswith("METADATA"))
    about = email.message_from_bytes(raw)
    version = re.search(r'__version__ = "(.*)"', (PACKAGE / "__init__.py").read_text("utf-8"))
    assert version and about["Version"] == version[1]
    assert about["Name"] == "fedflat"
    assert about["License-Expression"] == "Apache-2.0"
    assert about.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert about["Description-Content-Type"] == "text/markdown"
    body = raw.decode().partition("\n\n")[2]
    assert body.strip() == (ROOT / "README.md").read_text("utf-8").strip()
    needed = [one for one in about.get_all("Requires-Dist") if "extra ==" not in one]
    names = {re.split(r"[<>=]", one)[0] for one in needed}
    assert names == {"torch", "numpy", "safetensors", "pydantic", "typer", "rich", "pyyaml"}


def test_the_sdist_can_be_tested_and_is_small(built):
    with tarfile.open(built["sdist"]) as archive:
        sizes = {member.name.partition("/")[2]: member.size for member in archive if member.isfile()}
    tops = {name.partition("/")[0] for name in sizes}
    assert {
        "src",
        "tests",
        "docs",
        "examples",
        "results",
        "benchmarks",
        "Makefile",
        "constraints.txt",
    } <= tops
    assert {"LICENSE", "NOTICE", "README.md", "pyproject.toml", "PKG-INFO"} <= tops
    assert not [name for name in sizes if "__pycache__" in name or name.endswith(".pyc")]
    assert not {".ci", ".venv", "runs", "site", "dist", ".git"} & tops
    assert max(sizes.values()) < 500_000, max(sizes, key=lambda name: sizes[name])
    assert built["sdist"].stat().st_size < 2_000_000


def test_it_works_without_the_repository_and_without_extras(built, tmp_path: Path):
    """Installed alone, beside the dependencies that are there; none of the extras can be imported."""
    here = tmp_path / "installed"
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-compile")
    call(sys.executable, "-m", "pip", "install", *quiet, "--target", here, built["wheel"], place=tmp_path)

    def fedflat(*arguments: str) -> str:
        code = f"{BARE}import fedflat; print(fedflat.__file__); from fedflat.cli import main; main()"
        told = call(
            sys.executable, "-P", "-c", code, *arguments, place=tmp_path, PYTHONPATH=str(here), COLUMNS="150"
        )
        where, _, rest = told.partition("\n")
        assert Path(where).is_relative_to(here)
        return rest

    assert "fednsam-d" in fedflat("methods")
    told = fedflat("run", "--rounds", "2", "--epochs", "1", "--out", "runs/demo")
    for name in ("FedGMT", "FedAvg", "FedSAM"):
        assert re.search(rf"^ +{name} +\d", told, re.MULTILINE)
    assert len(list((tmp_path / "runs" / "demo").rglob("model.safetensors"))) == 3
    script = (here / "bin" / "fedflat").read_text()
    assert "from fedflat.__main__ import main" in script
