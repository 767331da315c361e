"""The documentation as a site: it builds strictly, links lead somewhere, nothing is loaded from elsewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from test_tutorials import DOCS

import fedflat as ff

pytestmark = pytest.mark.slow

ROOT = DOCS.parent


class Page(HTMLParser):
    """Where a page links to, what it loads, and what can be linked to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe") and "src" in given:
            self.loads.append(given["src"])
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given.get("href", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built as `make docs` builds it."""
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr + built.stdout
    return place


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_link_leads_somewhere(site, pages):
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue
        for link in page.links:
            target = urlsplit(link)
            if target.scheme or target.netloc:
                continue
            goal = (path.parent / unquote(target.path)).resolve() if target.path else path
            goal = goal / "index.html" if goal.is_dir() else goal
            if not goal.exists() or (
                target.fragment
                and goal.suffix == ".html"
                and unquote(target.fragment) not in pages[goal].anchors | {"__toc", "__nav"}
            ):
                broken.append((path.relative_to(site).as_posix(), link))
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(site, pages):
    outside = [(path.name, load) for path, page in pages.items() for load in page.loads if "//" in load]
    assert outside == []
    styles = "".join(path.read_text("utf-8") for path in site.rglob("*.css"))
    assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", styles)


def test_the_site_has_all_pages(site):
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS)).with_suffix(".html").exists(), page
    for numbers in (ROOT / "results").glob("*.json"):
        page = numbers.with_suffix(".md")
        assert (site / "results" / f"{page.stem}.html").exists() == page.exists(), page
    assert (site / "benchmarks.html").exists()


def test_examples_are_pages_with_their_code_and_pictures(site, pages):
    for example in [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.ipynb")]:
        path = site / "examples" / f"{example.stem}.html"
        text = example.read_text("utf-8")
        assert "fedflat" in re.sub(r"<[^>]+>", "", path.read_text("utf-8"))
        drawn = [load for load in pages[path].loads if load.startswith(example.stem)]
        assert len(drawn) == text.count('"image/png"')
        assert all((path.parent / picture).read_bytes().startswith(b"\x89PNG") for picture in drawn)
    titles = re.findall(r"<h1[^>]*>(.*?)<", (site / "examples" / "same_bits.html").read_text("utf-8"))
    assert titles == ["Does it matter where clients run?"]


def test_the_reference_has_every_public_name(pages):
    reference = set().union(*(page.anchors for path, page in pages.items() if path.parent.name == "api"))
    named = {part for anchor in reference if anchor.startswith("fedflat.") for part in anchor.split(".")}
    assert set(ff.__all__) - named == set()
    assert "fedflat.figures.curves.learning_curves" in reference


def test_equations_are_drawn_and_none_is_left_as_text(site):
    for name in ff.METHODS:
        text = (site / "methods" / f"{name}.html").read_text("utf-8")
        assert text.count('<table class="equations"') == 1
        assert "<math" in text
        rows = (DOCS / "methods" / f"{name}.md").read_text("utf-8").count(r"\tag{")
        assert text.count("<tr><td><math") == rows
        body = re.sub(r"<(script|style|annotation)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert not re.search(r"\\(tag|frac|lVert|text|mathrm|overline|nabla)\b", body)


def test_the_list_of_files_is_whole(site):
    page = (site / "files.html").read_text("utf-8")
    files = {path.name for path in (ROOT / "src" / "fedflat").rglob("*.py")}
    assert [name for name in sorted(files) if f"<code>{name}</code>" not in page] == []
