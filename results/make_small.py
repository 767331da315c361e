"""Time every preset at small scale: `python results/make_small.py`; it takes long and goes on where it was stopped.

Writes small-scale.json after every preset, and small-scale.md from it; with `--page` only the latter.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedflat.experiments.presets import presets

HERE = Path(__file__).resolve().parent
MEASURED, PAGE = HERE / "small-scale.json", HERE / "small-scale.md"
HEAD = """# Every preset at small scale

`fedflat reproduce PRESET --scale small --jobs 2`, one after the other on a machine with two cores:
seconds from the command to the table, and how it ended, those with most runs first. It shows that everything runs,
not the papers' numbers.

| preset | runs | seconds | exit code |
| --- | ---: | ---: | ---: |
"""


def main() -> None:
    found = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    if "--page" in sys.argv:
        return write_page(found)
    for preset in sorted(presets(), key=lambda preset: -preset.cost()[0]):
        if preset.key not in found:
            found[preset.key] = measure(preset.key) | {"runs": preset.cost()[0]}
            MEASURED.write_text(json.dumps(found, indent=1) + "\n")
            print(preset.key, found[preset.key], flush=True)
    write_page(found)


def measure(key: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "fedflat", "reproduce", key, "--scale", "small", "--jobs", "2"]
        command += ["--out", place]
        began = time.perf_counter()
        ended = subprocess.run(command, stdout=subprocess.DEVNULL)
        return {"seconds": round(time.perf_counter() - began, 1), "code": ended.returncode}


def write_page(found: dict[str, dict[str, float]]) -> None:
    rows = [f"| {key} | {row['runs']} | {row['seconds']:.0f} | {row['code']} |" for key, row in found.items()]
    longest = max(found, key=lambda key: found[key]["seconds"])
    tail = f"\nThe longest is {longest} with {found[longest]['seconds']:.0f} seconds.\n"
    if missing := [preset.key for preset in presets() if preset.key not in found]:
        tail += f"\nNot measured: {', '.join(missing)}.\n"
    PAGE.write_text(HEAD + "\n".join(rows) + "\n" + tail)


if __name__ == "__main__":
    main()
