"""Writes the tables of privacy.md, `python docs/make_privacy.py`, from replies of small clients."""

from __future__ import annotations

from pathlib import Path

from fedflat.client.optimisers import LocalSGD
from fedflat.engines.flower.privacy import STEPS, hello, leaving
from fedflat.methods.named import METHODS
from fedflat.methods.text import as_method

PAGE = Path(__file__).with_name("privacy.md")


def table() -> str:
    """What leaves a client with every method by name, in Markdown."""
    lines = [
        "| method | a client uploads | stays on the client | the server keeps of every client |",
        "| --- | --- | --- | --- |",
    ]
    for make in METHODS.values():
        method = make()
        found = leaving(method)
        cells = [", ".join(names) or "–" for names in (found.vectors, found.kept, found.held)]
        lines.append(f"| {method.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fields_table() -> str:
    """What every other field of a reply tells of the samples, without and with noise, in Markdown."""
    local = LocalSGD(epochs=2)
    plain = leaving(as_method("fedgmt"), local, "average", True)
    quiet = as_method("fedgmt + private-uploads")
    noisy = leaving(quiet, STEPS, "server", True)
    kinds = {(field.part, field.name): field.kind for field in (*hello(quiet), *noisy.fields)}
    lines = [
        "| part | field | what it is | without noise, `epochs: 2` | with noise, `steps`, `buffers: server` |",
        "| --- | --- | --- | --- | --- |",
    ]
    for field in (*hello(as_method("fedgmt")), *plain.fields):
        there = kinds.get((field.part, field.name), "does not leave")
        lines.append(f"| {field.part} | `{field.name}` | {field.meaning} | {field.kind} | {there} |")
    return "\n".join(lines)


TABLES = {"leaving": table, "fields": fields_table}
"""By the marks that they stand between in a page."""


def write_tables() -> None:
    """Put the tables into the page, between their marks."""
    text = PAGE.read_text("utf-8")
    for mark, make in TABLES.items():
        before, begin, rest = text.partition(f"<!-- {mark} -->\n")
        _, end, after = rest.partition(f"<!-- /{mark} -->")
        if not begin or not end:
            raise SystemExit(
                f"{PAGE} has no place for the table: write <!-- {mark} --> and <!-- /{mark} -->."
            )
        text = f"{before}{begin}\n{make()}\n\n{end}{after}"
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    write_tables()
