"""The examples as pages of the site: scripts with their code, notebooks with what they printed and drew."""

from __future__ import annotations

import ast
import base64
import json
import re
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def example_files() -> dict[str, str | bytes]:
    """Every page and picture by its place in the site, in the order in which the overview lists the examples."""
    overview = (EXAMPLES / "README.md").read_text("utf-8")
    files: dict[str, str | bytes] = {"examples/index.md": linked(overview)}
    for name in re.findall(r"\]\((\w+\.(?:py|ipynb))\)", overview):
        files |= _script(EXAMPLES / name) if name.endswith(".py") else _notebook(EXAMPLES / name)
    return files


def linked(markdown: str) -> str:
    """Links between examples, and from there to the documentation, as they are in the site."""
    markdown = re.sub(r"\]\((\w+)\.(py|ipynb)\)", r"](\1.md)", markdown)
    return markdown.replace("](../docs/", "](../")


def _script(path: Path) -> dict[str, str | bytes]:
    """Its docstring as text, the first question or sentence as the title; then the code."""
    source = path.read_text("utf-8")
    module = ast.parse(source)
    text = ast.get_docstring(module) or path.stem
    title = re.split(r"(?<=\?) |[.:](?:\s|$)", text, maxsplit=1)[0]
    code = "\n".join(source.split("\n")[module.body[0].end_lineno or 0 :]).strip("\n")
    return {f"examples/{path.stem}.md": f"# {title}\n\n{text}\n\n```python\n{code}\n```\n"}


def _notebook(path: Path) -> dict[str, str | bytes]:
    """Text, code and results, one after the other; pictures are files beside the page."""
    parts: list[str] = []
    pictures: dict[str, str | bytes] = {}
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(linked(source))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text'])}```")
            elif "image/png" in output.get("data", {}):
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[f"examples/{name}"] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![what the code above draws]({name})")
    return {f"examples/{path.stem}.md": "\n\n".join(parts) + "\n", **pictures}
