"""Runs side by side: accuracy over the last rounds and over seeds, and what a target accuracy costs."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import FedflatError, nearest
from ..rundirectory import read_metrics, read_settings

Mean = tuple[float, float | None] | None
"""A mean and its deviation over seeds, if there are several; None where no run has a value."""


@dataclass(frozen=True)
class Group:
    """The same experiment with different seeds."""

    name: str
    runs: list[Path]
    rounds: int
    fewest: int
    """rounds of the run that is least far"""
    last: Mean
    """accuracy, the mean of the last rounds"""
    within: float | None
    """deviation of the accuracy within the last rounds, the mean over seeds"""
    best: Mean
    worst_decile: Mean
    """accuracy of the tenth of the clients that fare worst, at the end"""
    rounds_to: Mean
    seconds_to: Mean
    megabytes_to: Mean
    reached: int
    """runs that reached the target"""


def find_runs(places: Sequence[str | Path]) -> list[Path]:
    """The run directories among some places and everything below them."""
    found: list[Path] = []
    for place in map(Path, places):
        if not place.exists():
            raise FedflatError(f"There is no directory {place}.")
        if (place / "metrics.jsonl").exists():
            found.append(place)
        else:
            found += sorted(path.parent for path in place.rglob("metrics.jsonl"))
    if not found:
        raise FedflatError(f"There is no run in {', '.join(map(str, places))}.")
    for run in found:
        if (run / "run.json").exists():
            read_settings(run)  # refuses what is newer
    return list(dict.fromkeys(found))


def compare(runs: Sequence[Path], last: int = 10, target: float | None = None) -> list[Group]:
    """One group for every experiment, in the order given; runs that differ in their seed alone are one group."""
    groups: dict[str, list[Path]] = {}
    about = {run: describe(run) for run in runs}
    for run in runs:
        same = {key: value for key, value in about[run].items() if key != "seed"}
        groups.setdefault(json.dumps(same, sort_keys=True, default=str), []).append(run)
    names = _names([about[members[0]] for members in groups.values()])
    return [_group(name, members, last, target) for name, members in zip(names, groups.values(), strict=True)]


def describe(run: Path) -> dict[str, Any]:
    """What a run is, with dotted keys: its experiment, or its settings where it was started in Python."""
    path = run / "experiment.yaml"
    content: Mapping[str, Any]
    if path.exists():
        content = yaml.safe_load(path.read_text())
        ignored = {
            "engine",
            "ray",
            "threads",
            "trackers",
            "measure",
            "checkpoint_every",
            "data",
            "download",
            "state_memory",
        }
    else:
        content = read_settings(run)
        ignored = {"environment", "started", "finished", "how", "format", "mechanisms"}
    return {key: value for key, value in _flat(content).items() if key.split(".")[0] not in ignored}


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and not (prefix == "" and key == "method"):
            result |= _flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def _names(descriptions: list[dict[str, Any]]) -> list[str]:
    """The method, and whatever else differs between the groups."""
    keys = dict.fromkeys(key for description in descriptions for key in description)
    differing = [
        key
        for key in keys
        if key not in ("method", "seed") and len({str(d.get(key)) for d in descriptions}) > 1
    ]
    names = []
    for description in descriptions:
        parts = [f"{key.split('.')[-1]}={description[key]}" for key in differing if key in description]
        names.append(" ".join([_method_name(description.get("method")), *parts]))
    return names


def _method_name(method: Any) -> str:
    if isinstance(method, dict):
        terms = [
            name + (f"({', '.join(f'{k}={v}' for k, v in given.items())})" if given else "")
            for name, given in method.items()
        ]
        return " + ".join(terms)
    return " + ".join(map(_method_name, method)) if isinstance(method, list) else str(method)


def _group(name: str, runs: list[Path], last: int, target: float | None) -> Group:
    histories = [read_metrics(run) for run in runs]
    tested = [[row for row in rows if row.get("accuracy") is not None] for rows in histories]
    late = [[row["accuracy"] for row in rows[-last:]] for rows in tested]
    at = [_first(rows, target) for rows in tested]
    reached = [(rows[: index + 1]) for rows, index in zip(histories, at, strict=True) if index is not None]
    return Group(
        name,
        runs,
        max(len(rows) for rows in histories),
        min(len(rows) for rows in histories),
        _mean([statistics.fmean(values) for values in late if values]),
        _plain_mean([statistics.stdev(values) for values in late if len(values) > 1]),
        _mean([max(row["accuracy"] for row in rows) for rows in tested if rows]),
        _mean(
            [
                rows[-1]["client_accuracy"]["worst_decile"]
                for rows in tested
                if rows and _has_clients(rows[-1])
            ]
        ),
        _mean([float(len(rows)) for rows in reached]),
        _mean([sum(row["seconds"] for row in rows) for rows in reached]),
        _mean([sum(row["bytes_down"] + row["bytes_up"] for row in rows) / 1e6 for rows in reached]),
        len(reached),
    )


def _first(tested: list[dict[str, Any]], target: float | None) -> int | None:
    """The index of the first round whose test reaches the target."""
    if target is None:
        return None
    return next((row["index"] for row in tested if row["accuracy"] >= target), None)


def _has_clients(row: Mapping[str, Any]) -> bool:
    return row.get("client_accuracy") is not None


def _mean(values: Sequence[float]) -> Mean:
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def _plain_mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


# -- tables ----------------------------------------------------------------------------------------


def table(groups: Sequence[Group], last: int, target: float | None) -> tuple[list[str], list[list[str]]]:
    """Column titles and rows of text."""
    head = ["experiment", "seeds", "rounds", f"accuracy, last {last}", "± within", "best", "worst decile"]
    if target is not None:
        head += [f"rounds to {target:.0%}", "seconds", "MB", "reached"]
    rows = []
    for group in groups:
        row = [
            group.name,
            str(len(group.runs)),
            str(group.rounds) if group.fewest == group.rounds else f"{group.fewest}–{group.rounds}",
            shown(group.last, percent),
            "–" if group.within is None else percent(group.within),
            shown(group.best, percent),
            shown(group.worst_decile, percent),
        ]
        if target is not None:
            row += [
                shown(group.rounds_to, whole),
                shown(group.seconds_to, whole),
                shown(group.megabytes_to, whole),
                f"{group.reached}/{len(group.runs)}",
            ]
        rows.append(row)
    return head, rows


def percent(value: float) -> str:
    """Of a fraction, two decimals."""
    return f"{100 * value:.2f}"


def whole(value: float) -> str:
    """Rounded."""
    return f"{value:,.0f}" if math.isfinite(value) else "–"


def shown(value: Mean, write: Callable[[float], str]) -> str:
    """A mean with its deviation."""
    if value is None:
        return "–"
    mean, deviation = value
    return write(mean) if deviation is None else f"{write(mean)} ± {write(deviation)}"


def as_csv(head: list[str], rows: list[list[str]]) -> str:
    """For a spreadsheet."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()


def as_markdown(head: list[str], rows: list[list[str]]) -> str:
    """For a page."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def as_latex(head: list[str], rows: list[list[str]]) -> str:
    """For a paper (booktabs)."""
    body = [" & ".join(map(_tex, row)) + r" \\" for row in rows]
    lines = [
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\toprule",
        " & ".join(map(_tex, head)) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _tex(text: str) -> str:
    for character in "&%$#_{}":
        text = text.replace(character, "\\" + character)
    return text.replace("±", r"$\pm$").replace("–", "--").replace("~", r"\textasciitilde{}")


WRITERS = {".csv": as_csv, ".md": as_markdown, ".tex": as_latex}


def write_table(path: Path, head: list[str], rows: list[list[str]]) -> None:
    """Write a table in the form that the file's ending asks for."""
    if path.suffix not in WRITERS:
        raise FedflatError(f"{path}: a table is written to .csv, .md or .tex.{nearest(path.suffix, WRITERS)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(WRITERS[path.suffix](head, rows))
    except OSError as problem:
        raise FedflatError(f"{path} cannot be written: {problem.strerror}.") from None
