"""What the site has beyond the pages in docs/: equations, inline pictures, examples, results, and the reference."""

from __future__ import annotations

import ast
import html
import re
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

from example_pages import example_files
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

from fedflat.training.settings import TrainingSettings

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

REFERENCE = {
    "training": (
        "Training",
        ("training", "client", "server.participation", "engines", "errors"),
    ),
    "data": ("Data", ("data",)),
    "methods": ("Methods", ("methods.method", "methods.named", "methods.text")),
    "mechanisms": ("Mechanisms", ("methods", "core.parameters", "core.messages", "server")),
    "flatness": ("Flatness", ("core.flat", "flatness")),
    "figures": ("Figures", ("figures",)),
    "other": ("Other names", ()),
}
"""Pages of the reference, and the modules whose public names are on each; the last takes the rest."""


# -- pages that lie elsewhere or are made ----------------------------------------------------------


def on_config(config: Any) -> Any:
    """Fill in and clean up the navigation."""
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | {"benchmarks.md", "files.md"}
    listed: set[str] = set()
    config.nav = _present(config.nav, there, listed)
    more = sorted(there - listed)
    if more:
        config.nav.append({"More": more})
    return config


def _present(nav: list[Any], there: set[str], listed: set[str]) -> list[Any]:
    """The navigation with folders written out, and without pages that do not exist."""
    kept: list[Any] = []
    for entry in nav:
        title, place = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(place, list):
            kept.append({title: _present(place, there, listed)})
        elif place == "examples/":
            kept += [page for page in example_files() if page.endswith(".md")]
        elif place == "results/":
            kept += [f"results/{page.name}" for page in _results()]
        elif place == "api/":
            kept += [f"api/{page}.md" for page in _reference()]
        elif place in there:
            listed.add(place)
            kept.append(entry)
    return kept


def on_files(files: Files, config: Any) -> Files:
    """Add examples, results, benchmarks, the reference, and a font for equations where a machine has none."""
    for place, content in example_files().items():
        files.append(File.generated(config, place, content=content))
    for result in _results():
        files.append(File.generated(config, f"results/{result.name}", abs_src_path=str(result)))
    readme = ROOT / "benchmarks" / "README.md"
    files.append(File.generated(config, "benchmarks.md", abs_src_path=str(readme)))
    font = resources.files("ziamath") / "fonts" / "STIXTwoMath-Regular.ttf"
    files.append(File.generated(config, "assets/math.ttf", abs_src_path=str(font)))
    files.append(File.generated(config, "files.md", content=_files_page()))
    for page, names in _reference().items():
        content = "\n".join([f"# {REFERENCE[page][0]}\n", *(f"::: {name}\n" for name in names)])
        if page == "training":
            content += _settings_table()
        files.append(File.generated(config, f"api/{page}.md", content=content))
    return files


def _settings_table() -> str:
    """Every setting of training: its default and what it means, from its field."""
    rows = ["\n## Settings of training\n", "| keyword | default | what it means |", "| --- | --- | --- |"]
    for field in fields(TrainingSettings):
        words = " | ".join(f"`{word!r}`" for word in field.metadata.get("words", ())).replace("|", "or")
        about = field.metadata["help"] + (f" ({words})" if words else "")
        rows.append(f"| `{field.name}` | `{field.default!r}` | {about} |")
    return "\n".join(rows) + "\n"


def _files_page() -> str:
    """Every file of the package with its length and what it says it is about."""
    package = ROOT / "src" / "fedflat"
    page = [
        "# Files\n",
        "What every file of the package is about, in its own words, and its number of lines.\n",
    ]
    folders = sorted({path.parent for path in package.rglob("*.py")})
    for folder in folders:
        name = folder.relative_to(package.parent).as_posix()
        page += [f"## `{name}/`\n", "| file | what it is about | lines |", "| --- | --- | ---: |"]
        for path in sorted(folder.glob("*.py")):
            source = path.read_text("utf-8")
            about = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].replace("\n", " ")
            page.append(f"| `{path.name}` | {about} | {len(source.splitlines())} |")
        page.append("")
    return "\n".join(page)


def _results() -> list[Path]:
    """A page that is made has its numbers beside it; the others are parts of such pages."""
    return [page for page in sorted((ROOT / "results").glob("*.md")) if page.with_suffix(".json").exists()]


def _reference() -> dict[str, list[str]]:
    """Every public name, as the package's stub lists them, by page."""
    pages: dict[str, list[str]] = {page: [] for page in REFERENCE}
    package = ROOT / "src" / "fedflat"
    stub = ast.parse((package / "__init__.pyi").read_text("utf-8"))
    for node in stub.body:
        if isinstance(node, ast.ImportFrom) and node.module is None:  # whole modules, such as figures
            for alias in node.names:
                members = [f"{alias.name}.{where}.{name}" for where, name in _passed_on(package / alias.name)]
                pages[_page_of(alias.name)].extend(f"fedflat.{member}" for member in members)
        elif isinstance(node, ast.ImportFrom):
            names = [_home(package, str(node.module), alias.name) for alias in node.names]
            pages[_page_of(str(node.module))].extend(f"fedflat.{name}" for name in names)
    return {page: names for page, names in pages.items() if names}


def _page_of(module: str) -> str:
    """The page that names the module itself, or else the nearest of the folders that it is in."""
    parts = module.split(".")
    places = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((page for at in places for page, (_, modules) in REFERENCE.items() if at in modules), "other")


def _passed_on(folder: Path) -> list[tuple[str, str]]:
    """The names that a package takes from its own modules, each with its module."""
    body = ast.parse((folder / "__init__.py").read_text("utf-8")).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom) and node.level == 1]
    return [(str(node.module), alias.name) for node in imports for alias in node.names]


def _home(package: Path, module: str, name: str) -> str:
    """Where a name is defined, if the module that the stub names only passes it on."""
    folder = package.joinpath(*module.split("."))
    homes = {n: where for where, n in _passed_on(folder)} if folder.is_dir() else {}
    return f"{module}.{homes[name]}.{name}" if name in homes else f"{module}.{name}"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links out of docs/, which are right where the file lies, lead to the pages made of those files.

    Equations are fenced in the files, as code hosts draw them; here they become blocks that the extension knows.
    """
    markdown = re.sub(r"^```math\n(.*?)^```$", r"$$\n\1$$", markdown, flags=re.DOTALL | re.MULTILINE)
    markdown = re.sub(r"\]\(\.\./((?:\.\./)?)benchmarks/README\.md", r"](\1benchmarks.md", markdown)
    markdown = re.sub(r"\]\(\.\./examples/README\.md", "](examples/index.md", markdown)
    markdown = re.sub(r"\]\(\.\./examples/(\w+)\.(?:py|ipynb)", r"](examples/\1.md", markdown)
    return re.sub(r"\]\(\.\./((?:\.\./)?)results/([\w-]+\.md)", r"](\1results/\2", markdown)


# -- equations and pictures ------------------------------------------------------------------------


def on_page_content(html_text: str, page: Any, **_: Any) -> str:
    """LaTeX becomes MathML, which browsers draw by themselves; drawings become part of the page."""
    text = re.sub(r'<span class="arithmatex">\\\((.*?)\\\)</span>', _inline, html_text, flags=re.DOTALL)
    text = re.sub(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', _display, text, flags=re.DOTALL)
    folder = (DOCS / page.file.src_uri).parent
    return re.sub(
        r'<img alt="([^"]*)" src="([\w./-]+\.svg)"\s*/?>', lambda found: _drawing(found, folder), text
    )


def _inline(found: re.Match[str]) -> str:
    return _mathml(html.unescape(found.group(1)))


def _display(found: re.Match[str]) -> str:
    """Equations under each other: left side, right side, and the number that it has in its paper."""
    source = re.sub(r"\\(begin|end)\{align\}", "", html.unescape(found.group(1)))
    rows = []
    for line in re.split(r"\\\\\s", source.strip() + "\n"):
        tag = re.search(r"\\tag\{([^}]*)\}", line)
        left, _, right = line.replace(tag.group(0) if tag else "", "").strip().partition("&")
        sides = [_mathml(side.strip(), "block") if side.strip() else "" for side in (left, right)]
        cells = [f"<td>{side}</td>" for side in sides] + [f"<td>{tag.group(1) if tag else ''}</td>"]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="equations"><table class="equations" role="presentation">{"".join(rows)}</table></div>'
    )


def _mathml(latex: str, display: str = "inline") -> str:
    """Bars of norms keep their size: beside a sum they would grow with it."""
    return str(convert(latex, display=display)).replace("<mo>&#x02016;", '<mo stretchy="false">&#x02016;')


def _drawing(found: re.Match[str], folder: Path) -> str:
    """A drawing of ours, in the colours of the page; what it needs to stand alone is left out."""
    source = (folder / found.group(2)).resolve().read_text("utf-8")
    bare = re.sub(r'<style id="alone">.*?</style>', "", source, flags=re.DOTALL)
    if bare == source:  # somebody else's
        return found.group(0)
    named = bare.replace("<svg ", f'<svg class="drawing" role="img" aria-label="{found.group(1)}" ', 1)
    return f'<div class="drawing">{named}</div>'
