"""Writes the tables of scale.md: `python docs/make_scale.py`. Traffic and state come from the methods' contracts."""

from __future__ import annotations

from pathlib import Path

from fedflat.methods.named import METHODS

PAGE = Path(__file__).with_name("scale.md")
MODEL = 4 * 11_173_962
"""Bytes of a ResNet-18."""
FEDERATIONS = {10**4: 100, 10**6: 1_000, 10**8: 10_000}
"""Clients, and how many of them take part in a round."""


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def table() -> str:
    """Methods that move and keep the same are in one row."""
    alike: dict[tuple[int, int, int, int, int], list[str]] = {}
    for make in METHODS.values():
        method = make()
        cost = method.cost
        key = (
            cost.down,
            cost.up,
            len([name for name in cost.server if name != "diverged"]),
            len(cost.client),
            len(cost.server_per_client),
        )
        alike.setdefault(key, []).append(method.name)
    cohorts = [f"down, up with {n:,} a round" for n in FEDERATIONS.values()]
    kept = ["the server keeps beside w", "and of every client", "a client keeps"]
    lines = [
        "| " + " | ".join(["methods", *cohorts, *kept]) + " |",
        "| --- |" + " ---: |" * (len(kept) + len(cohorts)),
    ]
    for (down, up, server, client, each), names in sorted(alike.items()):
        cells = [", ".join(names)]
        cells += [f"{size(down * n * MODEL)}, {size(up * n * MODEL)}" for n in FEDERATIONS.values()]
        cells += [size(vectors * MODEL) if vectors else "–" for vectors in (server, each, client)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Put the table into the page, between its marks."""
    before, begin, rest = PAGE.read_text("utf-8").partition("<!-- methods -->\n")
    _, end, after = rest.partition("<!-- /methods -->")
    assert end, f"{PAGE} has no place for the table"
    PAGE.write_text(f"{before}{begin}\n{table()}\n\n{end}{after}", "utf-8")


if __name__ == "__main__":
    main()
