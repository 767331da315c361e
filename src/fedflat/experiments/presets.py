"""The papers' experiments, with the numbers that were published.

A preset is a table of rows (methods) and columns (settings). A cell's experiment is the preset's, changed by its
column, then by its row, then by what the row says for that column. Cells that measure the same run in two ways, such
as an accuracy and the rounds to a target, share the run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import yaml

from ..errors import FedflatError, nearest
from .changes import changed
from .experiment import NATURAL, Experiment
from .reading import make_experiment

PAPERS = ("fedgmt", "fedwmsam", "fednsam", "fedgf")

STEP_SECONDS = {
    "mlp": 0.0012,
    "mlp-200-100": 0.0010,
    "fasttext": 0.004,
    "char-lstm": 0.15,
    "lenet": 0.06,
    "cnn": 0.08,
    "vit-small": 0.15,
    "resnet8": 0.25,
    "resnet18": 0.14,
    "resnet18-cifar": 1.2,
    "resnet18-cifar-nonorm": 1.1,
    "resnet34": 0.25,
    "resnet50": 2.0,
    "vgg11": 0.2,
    "vit-b16": 12.0,
    "swin-s": 8.0,
    "swin-b": 14.0,
}
"""One forward and backward pass over a batch of 50 on one core of a usual machine: for estimates of cost."""

SMALL_BUDGET = 90.0
"""Seconds of one core that all cells of a small reproduction may take together."""
SMALL_SUBSTITUTES = {"vit-b16": "resnet8", "swin-s": "resnet8", "swin-b": "resnet8", "resnet50": "resnet8"}
"""Models that are too large to try, and need weights from elsewhere."""


@dataclass(frozen=True)
class PaperCell:
    """A published number and the run that should give it."""

    row: str
    column: str
    content: Mapping[str, Any]
    """the experiment, as in a file"""
    statistic: Mapping[str, Any]
    unit: str
    target: float | None
    """for rounds to a target accuracy"""
    published: float | None
    deviation: float | None
    note: str
    """what is published where it is no number, such as >800"""
    misprint: str | None

    @property
    def run(self) -> str:
        """Cells with the same run have the same value."""
        return json.dumps(self.content, sort_keys=True)


@dataclass(frozen=True)
class Preset:
    """A table or a figure of a paper."""

    paper: str
    name: str
    content: Mapping[str, Any]

    @property
    def key(self) -> str:
        """As on the command line."""
        return f"{self.paper}/{self.name}"

    @property
    def title(self) -> str:
        """What it is about."""
        return str(self.content["title"])

    @property
    def where(self) -> str:
        """Its place in the paper."""
        return str(self.content["where"])

    @property
    def notes(self) -> list[str]:
        """What to know: where the released code deviates, what is unknown."""
        return list(self.content.get("notes", ()))

    def cells(self) -> list[PaperCell]:
        """All cells whose method fedflat has, in reading order."""
        found = []
        for row, about in self.content["rows"].items():
            for column, settings in self.content["columns"].items():
                special = about.get("columns", {}).get(column, {})
                method = special.get("method", about.get("method"))
                if method is not None:
                    found.append(self._cell(row, column, about, settings, special, method))
        return found

    def _cell(
        self,
        row: str,
        column: str,
        about: Mapping[str, Any],
        settings: Mapping[str, Any],
        special: Mapping[str, Any],
        method: Any,
    ) -> PaperCell:
        content = changed(self.content["experiment"], {"method": method})
        for changes in (settings.get("set", {}), about.get("set", {}), special.get("set", {})):
            content = changed(content, changes)
        value = (about.get("published") or {}).get(column)
        mean, deviation = value if isinstance(value, list) else (value, None)
        note = mean if isinstance(mean, str) else ""
        return PaperCell(
            row,
            column,
            content,
            settings.get("statistic", self.content["statistic"]),
            settings.get("unit", self.content["unit"]),
            settings.get("target"),
            None if note else mean,
            deviation,
            note,
            self.content.get("misprints", {}).get(f"{row}/{column}"),
        )

    def cost(self) -> tuple[int, float]:
        """How many runs it takes, and about how many hours of one core."""
        runs = {cell.run: cell for cell in self.cells()}
        return len(runs), sum(core_seconds(cell.content) for cell in runs.values()) / 3600


@cache
def load_paper(paper: str) -> Mapping[str, Any]:
    """A paper's file."""
    if paper not in PAPERS:
        raise FedflatError(f"There is no paper '{paper}'.{nearest(paper, PAPERS)}")
    text = (resources.files("fedflat.papers") / f"{paper}.yaml").read_text()
    content: Mapping[str, Any] = yaml.safe_load(text)
    return content


def presets(paper: str | None = None) -> list[Preset]:
    """All presets, or a paper's."""
    papers = PAPERS if paper is None else (paper,)
    return [Preset(p, name, content) for p in papers for name, content in load_paper(p)["presets"].items()]


def find_preset(key: str) -> Preset:
    """A preset by `paper/name`."""
    paper, slash, name = key.partition("/")
    content = load_paper(paper)["presets"]
    if not slash or name not in content:
        raise FedflatError(f"There is no preset '{key}'.{nearest(key, [f'{paper}/{n}' for n in content])}")
    return Preset(paper, name, content[name])


def choose(cells: Sequence[PaperCell], columns: Sequence[str], rows: Sequence[str]) -> list[PaperCell]:
    """The cells whose column begins with, or is, one of some texts, and whose row is one of some."""
    known_rows = list(dict.fromkeys(cell.row for cell in cells))
    known_columns = list(dict.fromkeys(cell.column for cell in cells))
    for column in columns:
        if not any(known == column or known.startswith(f"{column}/") for known in known_columns):
            raise FedflatError(f"There are no cells '{column}'.{nearest(column, known_columns)}")
    lowered = {row.lower(): row for row in known_rows}
    for row in rows:
        if row.lower() not in lowered:
            raise FedflatError(f"There is no row '{row}'.{nearest(row, known_rows)}")
    wanted = {row.lower() for row in rows}
    return [
        cell
        for cell in cells
        if (not columns or any(cell.column == c or cell.column.startswith(f"{c}/") for c in columns))
        and (not rows or cell.row.lower() in wanted)
    ]


# -- cost and scale --------------------------------------------------------------------------------

_TRAINING_SAMPLES = {"fashion-mnist": 60_000, "cinic10": 90_000, "tiny-imagenet": 100_000, "ag-news": 120_000}


def core_seconds(content: Mapping[str, Any], batch: int = 50) -> float:
    """About how long a run takes on one core, evaluation aside."""
    experiment = Experiment.model_validate(dict(content)).filled()
    per_round = _active(experiment)
    local = experiment.local
    size = local.batch_size if isinstance(local.batch_size, int) else 500
    samples = _TRAINING_SAMPLES.get(experiment.dataset, 50_000) / (experiment.clients or 100)
    steps = local.steps or (local.epochs or 1) * math.ceil(samples / size)
    model = (experiment.model or "mlp").partition(":")[0]
    step = STEP_SECONDS.get(model, 0.1) * size / batch
    return (experiment.rounds or 1) * per_round * steps * step * _passes(experiment.method)


def _active(experiment: Experiment) -> float:
    given, clients = experiment.participation, experiment.clients or 100
    if isinstance(given, int):
        return given
    if isinstance(given, str) and given.startswith("bernoulli:"):
        return float(given.partition(":")[2]) * clients
    return clients


def _passes(method: Any) -> float:
    """Relative to FedAvg, which makes one forward and one backward pass: a forward pass is a third."""
    from ..composition import as_method

    cost = as_method(method).cost
    return (cost.forward + 2 * cost.backward) / 3


def small(cells: Sequence[PaperCell]) -> list[dict[str, Any]]:
    """The cells' experiments, scaled down together so that all finish in minutes.

    20 clients, few of them a round, few steps on small batches, as many rounds as fit, few test samples. What it
    shows is then that everything runs, not the numbers.
    """
    for level in LEVELS:
        shrunk = {cell.run: _shrunk(cell.content, level) for cell in cells}
        one_round = sum(core_seconds({**content, "rounds": 1}) for content in shrunk.values())
        rounds = min(40, int(SMALL_BUDGET / max(one_round, 1e-9)))
        if rounds >= 3:
            break
    rounds = max(rounds, 2)
    for content in shrunk.values():
        content |= {"rounds": rounds, "eval_every": max(1, rounds // level.tests)}
    return [shrunk[cell.run] for cell in cells]


class _Level(NamedTuple):
    active: int
    steps: int
    batch: int
    test_samples: int
    tests: int


LEVELS = (_Level(4, 5, 20, 500, 10), _Level(2, 2, 10, 100, 2), _Level(2, 1, 10, 50, 1))
"""From what is wanted to what is bearable."""


def _shrunk(content: Mapping[str, Any], level: _Level) -> dict[str, Any]:
    result = dict(content)
    local = {key: value for key, value in result.get("local", {}).items() if key not in ("epochs", "steps")}
    size = local.get("batch_size", level.batch)
    local |= {
        "steps": level.steps,
        "batch_size": min(size, level.batch) if isinstance(size, int) else level.batch,
    }
    natural = str(result.get("partition", "")).split("/")[-1] in NATURAL
    model = str(result.get("model", "mlp")).partition(":")[0]
    result |= {
        "local": local,
        "clients": None if natural else 20,
        "participation": level.active,
        "model": SMALL_SUBSTITUTES.get(model, model),
        "test_samples": level.test_samples,
        "stand_in": True,
    }
    return {key: value for key, value in result.items() if value is not None}


# -- statistics ------------------------------------------------------------------------------------


def measured(cell: PaperCell, rows: Sequence[Mapping[str, Any]]) -> tuple[float | None, str]:
    """The cell's statistic of a run's rows in the cell's unit, and its name; None where the run has none of it."""
    accuracies = [(row["index"], row["accuracy"]) for row in rows if row.get("accuracy") is not None]
    kind, last = cell.statistic["kind"], cell.statistic.get("last")
    if kind == "other" or not accuracies:
        return None, str(cell.statistic.get("of", "accuracy"))
    scale = 100.0 if cell.unit == "percent" else 1.0
    if kind == "rounds-to":
        reached = [index for index, accuracy in accuracies if cell.target and accuracy >= cell.target]
        return (float(reached[0] + 1) if reached else None), f"rounds to {cell.target}"
    values = [accuracy for _, accuracy in accuracies]
    if last is not None:
        values = values[-last:]
    if (
        kind == "max" or kind == "accuracy"
    ):  # where a paper does not say what it reports, codes print the best
        return scale * max(values), "maximum" if last is None else f"maximum of the last {last}"
    if kind == "final":
        return scale * values[-1], "final"
    return scale * sum(values) / len(values), f"mean of the last {len(values)}"


def check_all() -> list[str]:
    """Every cell as an experiment; sentences about those that are none."""
    problems = []
    for preset in presets():
        for cell in preset.cells():
            try:
                make_experiment(cell.content, f"{preset.key}, {cell.row}, {cell.column}")
            except FedflatError as problem:
                problems.append(str(problem))
    return problems
