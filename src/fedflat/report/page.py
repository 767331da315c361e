"""The page as one file: markup, style, scripts, the plotting library and the data, and nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import FedflatError, MissingExtra, explained
from ..storage.files import replace_file
from .content import Content

SCRIPTS = (
    "words.js",
    "state.js",
    "build.js",
    "theme.js",
    "chart.js",
    "table.js",
    "legend.js",
    "curves.js",
    "flatness.js",
    "surfaces.js",
    "splits.js",
    "papers.js",
    "settings.js",
    "repeat.js",
    "notes.js",
    "live.js",
    "page.js",
)
"""Joined in this order."""


def write_report(
    places: Sequence[str | Path],
    out: str | Path,
    last: int = 10,
    target: float | None = None,
    splits: bool = True,
) -> dict[str, Any]:
    """Write the page about some runs, or all runs below some directories; what it shows."""
    library = plotly_script()
    content = Content(places, last, target, splits).page()
    refuse_nothing(content, places)
    path = Path(out)
    with explained(f"{path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, make_page(content, library).encode(), durable=False)
    return content


def refuse_nothing(content: Mapping[str, Any], places: Sequence[str | Path]) -> None:
    """An error where there is no run to show."""
    if content["runs"]:
        return
    reasons = [f" {one['why']}" for one in content["left"]]
    raise FedflatError(f"There is no run to show in {', '.join(map(str, places))}.{''.join(reasons)}")


@cache
def plotly_script() -> str:
    """The plotting library, as it comes with its Python package."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingExtra("plotly", "report", "A report") from None
    return str(get_plotlyjs())


def make_page(content: Mapping[str, Any], library: str, every: float | None = None) -> str:
    """The page; with `every`, it asks its server for news at that interval of seconds."""
    scripts = [library, "".join(_part(name) for name in SCRIPTS)]
    title = f"{len(content['runs'])} runs" if len(content["runs"]) != 1 else str(content["runs"][0]["name"])
    fields = {
        "TITLE": html.escape(title),
        "POLICY": html.escape(policy(scripts, live=every is not None), quote=True),
        "STYLE": _part("page.css"),
        "EVERY": "" if every is None else f"{every:g}",
        "DATA": embedded(content),
        "PLOTLY": scripts[0],
        "SCRIPT": scripts[1],
    }
    page = _part("page.html")
    for name, text in fields.items():
        before, after = page.split(f"<!--{name}-->")
        page = before + text + after
    return page


def policy(scripts: Sequence[str], live: bool) -> str:
    """What the page may do: run these very scripts and, while runs go on, ask its own server; no more."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {hashes}",
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
            "connect-src 'self'" if live else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def embedded(content: Mapping[str, Any]) -> str:
    """JSON that no text in it can end: a run may be called `</script>`."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _part(name: str) -> str:
    return (resources.files("fedflat.report") / "page" / name).read_text("utf-8")
