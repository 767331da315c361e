"""The documentation says what the code does: pages are current, and have all their parts."""

import ast
import importlib.util
import inspect
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
from test_tutorials import DOCS, blocks

import fedflat as ff
from fedflat.cli import main

ROOT = DOCS.parent


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- methods ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def method_pages() -> dict[Path, str]:
    pages: dict[Path, str] = script("make_method_pages").pages()
    return pages


def test_the_pages_of_methods_are_what_the_code_says(method_pages):
    stale = [path.name for path, text in method_pages.items() if path.read_text("utf-8") != text]
    assert not stale, f"{stale} are not current: run python docs/make_method_pages.py"


def test_every_method_has_a_page_and_no_page_is_left_over(method_pages):
    assert {path.stem for path in (DOCS / "methods").glob("*.md")} == {*ff.METHODS, "index"}
    listed = re.findall(r"methods/(\w+)\.md", (ROOT / "mkdocs.yml").read_text())
    assert listed == ["index", *ff.METHODS]


@pytest.mark.parametrize("name", ff.METHODS)
def test_a_page_has_all_its_parts(name: str):
    text = (DOCS / "methods" / f"{name}.md").read_text("utf-8")
    title, *sections = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    assert title == ff.METHODS[name]().name
    assert sections == [
        "Equations",
        "Made of",
        "Cost",
        "Parameters",
        "The papers' values",
        "Measured here",
        "Where paper, released code and fedflat differ",
    ]


def test_costs_on_the_pages_are_the_methods(method_pages):
    """Read back from the pages, not from the script that wrote them."""
    table = (DOCS / "methods" / "index.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| \[[^\]]+\]\((\w+)\.md\) \| (.*) \|$", table, re.MULTILINE))
    assert list(rows) == list(ff.METHODS)
    for name, row in rows.items():
        _, down, up, passes, client, *_ = row.split(" | ")
        cost = ff.METHODS[name]().cost
        assert (int(down.split(" ")[0]), int(up), passes) == (
            cost.down,
            cost.up,
            f"{cost.forward}/{cost.backward}",
        )
        assert client == (", ".join(cost.client) or "–")


# -- pages --------------------------------------------------------------------------------------------


def test_python_blocks_are_only_where_they_are_run():
    """The tutorials' tests run every page that lies in docs itself."""
    others = [page for page in DOCS.rglob("*.md") if page.parent != DOCS]
    assert others
    assert [page.name for page in others if "```python" in page.read_text("utf-8")] == []


def test_the_hooks_are_all_described():
    """In the order in which the class has them, that of a round; the diagram has those of every round."""
    hooks = [name for name, hook in vars(ff.Mechanism).items() if inspect.isfunction(hook) and name[0] != "_"]
    hooks.remove("contract")
    text = (DOCS / "writing-a-mechanism.md").read_text("utf-8")
    assert re.findall(r"^\| `(\w+)\(", text, re.MULTILINE) == hooks
    drawn = " ".join(re.findall(r'hooked">([^<]*)<', (DOCS / "round.svg").read_text("utf-8")))
    assert set(hooks) - {"check_task", "server_state"} <= set(re.findall(r"\w+", drawn))


def test_what_hooks_are_given_has_a_public_name():
    hooks = [hook for name, hook in vars(ff.Mechanism).items() if inspect.isfunction(hook) and name[0] != "_"]
    written = " ".join(str(said) for hook in hooks for said in inspect.get_annotations(hook).values())
    given = set(re.findall(r"[A-Z]\w+", written)) - {"None", "Mapping", "Tensor", "Value", "Move"}
    assert {"Local", "Server", "Step", "Upload"} <= given <= set(ff.__all__)


def test_the_command_lines_of_the_quick_start_work(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (lines,) = blocks("quick-start.md", "sh")
    for line in lines.splitlines():
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as stop:
            main()
        told = capsys.readouterr()
        assert stop.value.code == 0, (line, told.err)
        assert told.out.strip()


def test_the_quick_start_shows_the_table_of_the_readme():
    text = (DOCS / "quick-start.md").read_text("utf-8")
    table = re.search(r"^  method   accuracy.*?(?=^```)", text, re.DOTALL | re.MULTILINE)
    assert table
    assert table[0] in (ROOT / "README.md").read_text("utf-8")


# -- files --------------------------------------------------------------------------------------------


def test_every_file_says_in_one_sentence_what_it_is_about():
    """And about one thing: before a colon, that sentence joins no two with "and" (names and opposites apart)."""
    pairs = ("CIFAR-10 and CIFAR-100", "Ascent between", "The data of a node")
    for path in sorted((ROOT / "src" / "fedflat").rglob("*.py")):
        first = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n\n")[0]
        assert first.endswith(".") and len(first) <= 118 and "\n" not in first, f"{path}: {first!r}"
        topic = re.split(r"[:;.](?:\s|$)", first)[0]
        assert " and " not in topic or topic.startswith(pairs), f"{path}: {topic}"
