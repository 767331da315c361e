"""The papers' experiments, with the numbers that were published.

A preset is a table of rows (methods) and columns (settings). A cell's experiment is the preset's, changed by its
column, then by its row, then by what the row says for that column. Cells that measure the same run in two ways, such
as an accuracy and the rounds to a target, share the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from ..errors import FedflatError, nearest
from .changes import changed
from .files import make_experiment

PAPERS = ("fedgmt", "fedwmsam", "fednsam", "fedgf")


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
    code_deviates: bool = False
    """whether the paper's released code does something else here than the text says"""
    weights: str | None = None
    """which weights the model should start from, and how they are given"""

    def missing_weights(self, model: str | None) -> str | None:
        """A sentence where a model should start from given weights, `model:FILE`, and does not."""
        if self.weights is None or ":" in (model or ""):
            return None
        return (
            f"{model} does not start from given weights, so that this is not the paper's protocol. It should start "
            f"from weights {self.weights}."
        )

    def protocol(self, model: str | None) -> Mapping[str, Any]:
        """The paper's experiment; where it starts from given weights, with the file that `model:FILE` names."""
        given = self.weights is not None and (model or "").startswith(f"{self.content.get('model')}:")
        return {**self.content, "model": model} if given else self.content

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

    @property
    def weights(self) -> str | None:
        """Which weights the models should start from, and how they are given; None where they are drawn."""
        return self.content.get("weights")

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
            str(method).partition("(")[0] in load_paper(self.paper)["code_deviates"],
            self.weights,
        )

    def best_rows(self) -> dict[str, tuple[str, ...]]:
        """Rows that have the best of some others in every column, where the paper prints no more than that."""
        rows = self.content["rows"].items()
        return {row: tuple(about["best_of"]) for row, about in rows if "best_of" in about}

    def cost(self) -> tuple[int, float]:
        """How many runs it takes, and about how many hours of one core."""
        from .cost import core_seconds

        runs = {cell.run: cell for cell in self.cells()}
        return len(runs), sum(core_seconds(cell.content) for cell in runs.values()) / 3600


@cache
def load_paper(paper: str) -> Mapping[str, Any]:
    """A paper's file."""
    if paper not in PAPERS:
        raise FedflatError(f"There is no paper '{paper}'.{nearest(paper, PAPERS)}")
    text = (resources.files("fedflat.experiments.papers") / f"{paper}.yaml").read_text()
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


# -- checking --------------------------------------------------------------------------------------


def check_all() -> list[str]:
    """Every cell as an experiment with a statistic; sentences about those that are none."""
    problems = []
    for preset in presets():
        columns = set(preset.content["columns"])
        for row, about in preset.content["rows"].items():
            known = {*about.get("published", {}), *about.get("columns", {})}
            problems += [f"{preset.key}, {row}: there is no column '{c}'." for c in sorted(known - columns)]
        for cell in preset.cells():
            place = f"{preset.key}, {cell.row}, {cell.column}"
            try:
                make_experiment(cell.content, place)
            except FedflatError as problem:
                problems.append(str(problem))
            problems += [f"{place}: {wrong}" for wrong in _wrong_statistic(preset, cell)]
    return problems


def _wrong_statistic(preset: Preset, cell: PaperCell) -> Iterator[str]:
    from .statistics import KINDS

    kind = cell.statistic["kind"]
    if kind not in KINDS:
        yield f"there is no statistic '{kind}'."
    if kind.endswith("-to") and "target_of" not in cell.statistic and not 0 < (cell.target or 0) < 1:
        yield f"{kind} needs a target between 0 and 1."
    if kind == "recorded":
        from ..flatness.recording import wanted

        if cell.statistic["of"] not in [one.label for one in wanted(cell.content.get("measure", ()))]:
            yield f"{cell.statistic['of']} is not among what the experiment measures."
    for other in (cell.statistic.get(key) for key in ("relative_to", "gain_over", "target_of")):
        if other is not None and other not in preset.content["rows"]:
            yield f"there is no row '{other}'."
