"""The results as JSON, part by part, and README.md made from them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
LATEST, QUICK = HERE / "results" / "latest.json", HERE / "results" / "quick.json"
README = HERE / "README.md"

PARTS = {
    "limit": "Against a bare PyTorch loop",
    "breakdown": "Where the time goes",
    "peers": "Against other libraries",
    "methods": "Methods beside bare loops of their own",
    "memory": "Memory",
    "overhead": "Overhead of the engines",
    "engines": "A large model on every engine",
    "wire": "A large model over Flower",
    "checkpoints": "Overhead of a run directory",
    "recording": "Overhead of recording flatness",
    "testing": "Testing while the next round trains",
    "stacking": "Several small clients at once",
    "convolutions": "Ways to convolve, layer by layer",
}

QUICK_PARTS = ("limit", "breakdown", "peers", "methods", "memory", "overhead")
"""what `--quick` measures when nothing is named: the others compare nothing that short runs could tell"""

ABOUT = """# Benchmarks

Written by `python -m benchmarks`; do not edit.

| | |
| --- | --- |
| `make bench` | everything, about an hour; makes an environment for every peer in `benchmarks/.venvs` |
| `make bench-quick` | {quick} with less of everything, under 3 minutes; skips peers that are not installed |
| `python -m benchmarks limit methods` | some parts: {parts} |

Everything that is compared takes turns in one run, since seconds depend on what else a machine does. A ratio is the
median, in brackets the quartiles, of single rounds, each over the other contender's beside it (where numbers of
rounds differ: over the other's median). Seconds are medians. Data is random: arithmetic does not care what the pixels
show. All single measurements are in `results/latest.json`.
"""

BY_TESTS = """Not measured here but tested, in `tests/`: that all engines give equal bits, also when a worker is
killed, and that clients' states survive a crash.

A method is compared with its own arithmetic, never with another method: a bare loop in plain PyTorch that takes the
passes and the vector operations of that method and nothing else. A speed of 1 is a library that costs nothing. It can
be exceeded where fedflat computes less than autograd does: fully connected networks are differentiated by hand
(`gradients/dense.py`). Convolutions with fewer multiplications (`models/conv/`) are in the module, so that the bare
loop has them too. Libraries are compared as their users run them, each with its own module, and there they count.

Most of a step is matrix products and convolutions, which every library pays alike; *Where the time goes* has the
shares. Where rounds are long and few, as on W2 and W3, a ratio may be off by a tenth on a busy machine."""


def module(part: str) -> ModuleType:
    return importlib.import_module(f".{part}", __package__)


def load(quick: bool) -> dict[str, Any]:
    """What has been measured so far, by part."""
    path = QUICK if quick else LATEST
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def save(part: str, entry: dict[str, Any], quick: bool) -> None:
    """Put a part's results beside those of the others; README.md shows full runs only."""
    path = QUICK if quick else LATEST
    entries = load(quick) | {part: entry}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({name: entries[name] for name in PARTS if name in entries}, indent=1) + "\n")
    if not quick:
        README.write_text(readme(entries))


def readme(entries: dict[str, Any]) -> str:
    named = {
        name: ", ".join(f"`{p}`" for p in parts) for name, parts in (("parts", PARTS), ("quick", QUICK_PARTS))
    }
    lines = [ABOUT.format(**named), "## Targets\n", _targets(entries)]
    for part, title in PARTS.items():
        lines += [f"\n## {title}\n", (module(part).__doc__ or "").strip(), ""]
        if part not in entries:
            lines.append(f"Not measured yet: `python -m benchmarks {part}`.")
            continue
        entry = entries[part]
        lines += [module(part).table(entry["result"]), "", _conditions(part, entry)]
    return "\n".join(lines) + "\n"


def _targets(entries: dict[str, Any]) -> str:
    rows = [
        [part, target.wanted, target.measured, "yes" if target.met else "**no**"]
        for part, entry in entries.items()
        for target in module(part).targets(entry["result"])
    ]
    lines = [["part", "target", "measured", "met"], ["---"] * 4, *rows]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", BY_TESTS])


def _conditions(part: str, entry: dict[str, Any]) -> str:
    about = [*entry["machine"].items(), *entry["versions"].items()]
    facts = ", ".join(f"{name} {value}" for name, value in about)
    run = f"{entry['date']}, {entry['minutes']:.0f} minutes, load {entry['load']:.1f} at the start"
    return f"`{part}`, {run}; {facts}."
