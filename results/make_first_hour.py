"""What a new user's first steps take: `python results/make_first_hour.py --run` goes them in a fresh clone.

Every command is one that README.md or a page it links to prints, or the same on other data. Seconds go into
`first-hour.json`, and from there into the table of `docs/first-hour.md`; without `--run` only the table is written.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
STORE = HERE / "first-hour.json"
PAGE = ROOT / "docs" / "first-hour.md"
LIMITS = {"first result": 120, "first run on own data": 600, "first own method": 600}
"""Seconds that each may take, reading and typing included."""

TABLE_RUN = """
import fedflat as ff

patients = ff.read_table("patients.csv", target="readmitted", client="hospital")
print(patients.note)
federation = ff.federate(patients, ff.ByUser())
run = ff.train(federation, "mlp", "fedsam", ff.LocalSGD(lr=0.05, epochs=2, batch_size=20), rounds=20)
print(f"accuracy {run.accuracy:.3f}")
"""
ARRAYS_RUN = """
import numpy as np
import fedflat as ff

rng = np.random.default_rng(0)
def measured(count, bias):
    x = rng.normal(size=(count, 6)) + bias
    return x, (x[:, 0] + x[:, 1] > bias).astype(int)
federation = ff.Federation(clients=[measured(80, b) for b in (-0.5, 0, 0.5)], test=measured(400, 0))
run = ff.train(federation, "mlp", "fedgmt", rounds=20)
print(f"accuracy {run.accuracy:.3f}")
"""
PICTURES = """
import random
from pathlib import Path
from PIL import Image, ImageDraw

rng = random.Random(0)
for name, colour in (("cat", (200, 120, 40)), ("dog", (90, 90, 160)), ("fox", (220, 80, 20))):
    Path("pets", name).mkdir(parents=True)
    for number in range(40):
        shade = tuple(max(0, min(255, value + rng.randint(-30, 30))) for value in colour)
        image = Image.new("RGB", (rng.choice([40, 48, 64]), 48), shade)
        ImageDraw.Draw(image).ellipse((5, 5, 20 + rng.randint(0, 9), 25), fill=(0, 0, 0))
        image.save(Path("pets", name, f"{number}.jpg"))
"""


def patients(place: Path) -> None:
    """Five hospitals of unequal size and age; whether a patient came back depends on age, pressure and smoking."""
    draw = random.Random(1)
    with (place / "patients.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["patient", "hospital", "age", "sex", "pressure", "smoker", "readmitted"])
        hospitals = [
            ("North", 420, 71),
            ("Harbour", 260, 58),
            ("St. Anna", 150, 44),
            ("Uni", 600, 52),
            ("Lake", 35, 66),
        ]
        for hospital, count, mean in hospitals:
            for number in range(count):
                age, pressure, smoker = draw.gauss(mean, 12), draw.gauss(135, 18), draw.choice(["yes", "no"])
                risk = (age - 60) / 12 + (pressure - 135) / 18 + 0.5 * (smoker == "yes") + draw.gauss(0, 0.5)
                row = [
                    f"{hospital[0]}{number:04}",
                    hospital,
                    round(age),
                    draw.choice("MF"),
                    round(pressure),
                    smoker,
                ]
                table.writerow([*row, "yes" if risk > 0.5 else "no"])


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


class Clock:
    """Runs steps in a place and notes how long each takes."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.steps: list[dict[str, Any]] = []
        self.path = f"{place / 'fedflat' / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def step(self, goal: str, what: str, *command: str | Path, within: str = ".") -> None:
        """One command; `goal` is what it belongs to."""
        variables = {"PATH": self.path, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        began = time.perf_counter()
        done = subprocess.run(
            list(map(str, command)),
            cwd=self.place / within,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
        seconds = time.perf_counter() - began
        assert done.returncode == 0, f"{what}: {done.stdout}{done.stderr}"
        accuracy = re.findall(r"accuracy (\d\.\d+)$|^ +\w+ +([\d.]+)% ", done.stdout, re.MULTILINE)
        found = max((float(a) if a else float(b) / 100 for a, b in accuracy), default=None)
        self.steps.append({"goal": goal, "what": what, "seconds": round(seconds, 1), "accuracy": found})
        print(f"{seconds:7.1f} s  {what}", flush=True)


def take_steps() -> dict[str, Any]:
    """Everything, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        clock = Clock(place)
        first, own, method = LIMITS
        clock.step(first, "`git clone`", "git", "clone", "--quiet", ROOT, "fedflat")
        clock.step(first, "`make demo`", "make", "demo", within="fedflat")
        patients(place)
        table = (
            "fedflat",
            "run",
            "--dataset",
            "patients.csv",
            "--target",
            "readmitted",
            "--client-column",
            "hospital",
        )
        clock.step(
            own, "a table, on the command line", *table, "-m", "fedavg", "-m", "fedsam", "--rounds", "20"
        )
        clock.step(own, "the same table, in Python", "python", "-c", TABLE_RUN)
        clock.step(own, "numpy arrays", "python", "-c", ARRAYS_RUN)
        clock.step(
            own, '`pip install "fedflat[data]"`, for images', "pip", "install", "--quiet", "fedflat[data]"
        )
        clock.step(own, "(painting a folder of photographs)", "python", "-c", PICTURES)
        images = (
            "--dataset",
            "pets",
            "--image-size",
            "32",
            "--model",
            "cnn",
            "--lr",
            "0.01",
            "--clients",
            "6",
        )
        clock.step(own, "a folder of images", "fedflat", "run", *images, "-m", "fedgmt", "--rounds", "6")
        readme = blocks(ROOT / "README.md")
        caution = next(block for block in readme if "class Caution" in block)
        trained = readme[0] + caution + (
            'mine = ff.Method("mine", [Caution(mu=1.0), ff.ControlVariates()])\n'
            "run = ff.train(federation, method=mine, rounds=20)\n"
            'print(f"accuracy {run.accuracy:.3f}")\n'
        )  # fmt: skip
        clock.step(method, "the README's mechanism, as printed", "python", "-c", trained)
        tutorial = blocks(ROOT / "docs" / "writing-a-mechanism.md")
        clock.step(method, "the tutorial's, with its proofs", "python", "-c", "\n".join(tutorial))
        code = "import json; from fedflat.environment import environment; print(json.dumps(environment()))"
        told = subprocess.run(
            [place / "fedflat" / ".venv" / "bin" / "python", "-c", code],
            cwd=place / "fedflat",
            capture_output=True,
            text=True,
            check=True,
        )
        return {
            "date": time.strftime("%Y-%m-%d"),
            "environment": json.loads(told.stdout),
            "steps": clock.steps,
        }


def table(stored: dict[str, Any]) -> str:
    """The page's table, with a line of sums."""
    about = stored["environment"]
    lines = [
        f"Measured on {stored['date']} with {about['cores']} cores, Python {about['python']}, torch "
        f"{about['torch']}, packages at hand and not downloaded. Seconds that commands take, without reading "
        "and typing.",
        "",
        "| to | step | seconds | accuracy |",
        "| --- | --- | ---: | ---: |",
    ]
    for one in stored["steps"]:
        accuracy = "" if one["accuracy"] is None else f"{one['accuracy']:.1%}"
        lines.append(f"| {one['goal']} | {one['what']} | {one['seconds']:.1f} | {accuracy} |")
    for goal, limit in LIMITS.items():
        total = sum(one["seconds"] for one in stored["steps"] if one["goal"] == goal)
        lines.append(f"| **{goal}** | all of it; {limit // 60} minutes were allowed | **{total:.0f}** | |")
    return "\n".join(lines)


def main() -> None:
    """Go the steps if asked to, and write the table."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--run", action="store_true", help="go the steps: about four minutes")
    if arguments.parse_args().run:
        STORE.write_text(json.dumps(take_steps(), indent=2, ensure_ascii=False) + "\n", "utf-8")
    before, begin, rest = PAGE.read_text("utf-8").partition("<!-- clock -->\n")
    _, end, after = rest.partition("<!-- /clock -->")
    assert end, f"{PAGE} has no place for the table"
    PAGE.write_text(
        f"{before}{begin}\n{table(json.loads(STORE.read_text('utf-8')))}\n\n{end}{after}", "utf-8"
    )


if __name__ == "__main__":
    main()
