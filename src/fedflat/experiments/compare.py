"""Runs side by side: the monitored metric over the last rounds and over seeds, and what a target costs."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.monitor import Monitor
from ..data.on_nodes import as_on_nodes, is_on_nodes
from ..errors import FedflatError, nearest
from ..storage.client_reports import are_reported, with_client_reports
from ..storage.metrics_file import Row, read_metrics
from ..storage.run_files import read_settings
from .parsing import read_mapping

Mean = tuple[float, float | None] | None
"""A mean and its deviation over seeds, if there are several; None where no run has a value."""

REPORTED = " reported by clients"
"""What is said of numbers that clients found, each on its own data."""
KNOWN = ("shape", "classes", "test_samples")
"""What run.json says of data on nodes, and of the server's own test set."""


@dataclass(frozen=True)
class Group:
    """The same experiment with different seeds."""

    name: str
    runs: list[Path]
    counted: list[Path]
    """those that the numbers are of: no copies, and no unfinished ones beside finished ones"""
    copies: int
    finished: int
    """how many are done"""
    rounds: int
    fewest: int
    """rounds of the run that is least far"""
    last: Mean
    """the monitored metric, the mean of the last rounds"""
    within: float | None
    """deviation of the metric within the last rounds, the mean over seeds"""
    best: Mean
    worst_decile: Mean
    """accuracy of the tenth of the clients that fare worst, at the end"""
    rounds_to: Mean
    seconds_to: Mean
    megabytes_to: Mean
    reached: int
    """runs that reached the target"""
    by_clients: bool = False
    """whether accuracy is what clients reported, where the server has no test set"""
    monitor: Monitor = field(default_factory=Monitor)
    """the metric that runs are compared by"""
    notes: tuple[str, ...] = ()
    """why some runs are not counted"""

    @property
    def seeds(self) -> str:
        """How many there are, and how many of them are done."""
        every = len(self.runs) - self.copies
        if self.finished in (0, every):
            return f"{every}" if self.finished else f"{every} unfinished"
        return f"{self.finished} of {every}"


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
    found = list(dict.fromkeys(found))
    problems = {run: problem for run in found if (problem := _problem_with(run)) is not None}
    if len(problems) == len(found):
        first, *others = problems.values()
        raise FedflatError(first + (f" {len(others)} more cannot be compared either." if others else ""))
    for problem in problems.values():
        leave_out(problem)
    return [run for run in found if run not in problems]


def leave_out(problem: object) -> None:
    """Say that a run is left out of what the others are in."""
    warnings.warn(f"Left out: {problem}", stacklevel=3)


def _problem_with(run: Path) -> str | None:
    """What makes a run impossible to compare with any other, found out by comparing it with none."""
    try:
        if (run / "run.json").exists():
            read_settings(run)  # refuses what is newer
        compare([run])
    except FedflatError as problem:
        return str(problem)
    except Exception as problem:  # whatever an edited file may say
        return f"{run} cannot be read ({type(problem).__name__}: {problem}); was it edited?"
    return None


PARTS = ("test", "validation")
"""Where the monitored metric is taken: on the test set, or on the samples that clients held out."""


def compare(
    runs: Sequence[Path], last: int = 10, target: float | None = None, on: str = "test"
) -> list[Group]:
    """One group for every experiment, in the order given; runs that differ in their seed alone are one group.

    The monitored metric is that on one of `PARTS`.
    """
    if on not in PARTS:
        raise FedflatError(f"Runs are not compared on '{on}'.{nearest(on, PARTS)}")
    groups: dict[str, list[Path]] = {}
    about = {run: describe(run) for run in runs}
    for run in runs:
        same = {key: value for key, value in about[run].items() if key != "seed"}
        groups.setdefault(json.dumps(same, sort_keys=True, default=str), []).append(run)
    names = _names([about[members[0]] for members in groups.values()])
    seeds = {run: about[run].get("seed") for run in runs}
    return [
        _group(name, members, seeds, last, target, on)
        for name, members in zip(names, groups.values(), strict=True)
    ]


def describe(run: Path) -> dict[str, Any]:
    """What a run is, with dotted keys: its experiment, or its settings where it was started in Python."""
    path = run / "experiment.yaml"
    content: Mapping[str, Any]
    if path.exists():
        content = read_mapping(path)
        with contextlib.suppress(FedflatError):  # without a sound run.json, the experiment is all there is
            content = _on_nodes(content, read_settings(run))
        ignored = {
            "on_divergence",
            "engine",
            "ray",
            "threads",
            "trackers",
            "measure",
            "metrics",
            "monitor",
            "clients_every",
            "checkpoint_every",
            "data",
            "download",
            "state_memory",
        }
    else:
        content = read_settings(run)
        ignored = {"environment", "started", "finished", "how", "format", "mechanisms", "notes"}
        ignored |= {"resumed", "diverged", "on_divergence", "module", "metrics", "monitor", "monitored"}
    digests = ("federation.fingerprint", "loss.code", "loss.layers")
    return {
        key: value
        for key, value in _flat(content).items()
        if key.split(".")[0] not in ignored and key not in digests
    }


def _on_nodes(content: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """An experiment; of a real federation, with what the server knows of its data and model."""
    if not is_on_nodes(settings):
        return dict(content)
    facts = settings.get("federation")
    known = {key: facts[key] for key in KNOWN if key in facts} if isinstance(facts, Mapping) else {}
    model = settings.get("model")
    return {**as_on_nodes(content, model), "model": model, "nodes": known}


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
        if key not in ("method", "seed", "baseline") and len({str(d.get(key)) for d in descriptions}) > 1
    ]
    names = []
    for description in descriptions:
        parts = [f"{key.split('.')[-1]}={description[key]}" for key in differing if key in description]
        names.append(
            " ".join([description.get("baseline") or _method_name(description.get("method")), *parts])
        )
    return names


def _method_name(method: Any) -> str:
    if isinstance(method, dict):
        return " + ".join(name + _arguments(given) for name, given in method.items())
    return " + ".join(map(_method_name, method)) if isinstance(method, list) else str(method)


def _arguments(given: Any) -> str:
    shown = ", ".join(f"{k}={v}" for k, v in given.items()) if isinstance(given, dict) else ""
    return f"({shown})" if shown else ""


def _group(
    name: str, runs: list[Path], seeds: Mapping[Path, Any], last: int, target: float | None, on: str
) -> Group:
    rows = {run: read_metrics(run) for run in runs}
    whole, notes = _without_copies(rows, seeds)
    done = [run for run in whole if is_finished(run, len(rows[run]))]
    counted = done or whole
    for run in whole:
        if run not in done:
            told = f"is not finished ({len(rows[run])} rounds)"
            notes.append(f"{run} {told}{' and left out of the means' if done else ''}.")
    histories: list[list[dict[str, Any]]]
    if on == "validation":
        histories = [[_on_validation(row) for row in rows[run]] for run in counted]
    else:
        histories = [with_client_reports(rows[run]) for run in counted]
    monitor = monitor_of(counted[0])
    monitor.check_target(target)
    scored = [[row for row in rows if monitor.of(row) is not None] for rows in histories]
    values = [[value for row in rows if (value := monitor.of(row)) is not None] for rows in scored]
    late = [those[-last:] for those in values]
    at = [first_reached(rows, target, monitor) for rows in scored]
    reached = [(rows[: index + 1]) for rows, index in zip(histories, at, strict=True) if index is not None]
    return Group(
        name,
        runs,
        counted,
        len(runs) - len(whole),
        len(done),
        max(len(rows) for rows in histories),
        min(len(rows) for rows in histories),
        _mean([statistics.fmean(values) for values in late if values]),
        _plain_mean([statistics.stdev(values) for values in late if len(values) > 1]),
        _mean([monitor.best(those) for those in values if those]),
        _mean(
            [
                rows[-1]["client_accuracy"]["worst_decile"]
                for rows in scored
                if rows and _has_clients(rows[-1])
            ]
        ),
        _mean([float(len(rows)) for rows in reached]),
        _mean([sum(row["seconds"] for row in rows) for rows in reached]),
        _mean([sum(row["bytes_down"] + row["bytes_up"] for row in rows) / 1e6 for rows in reached]),
        len(reached),
        any(map(are_reported, histories)),
        monitor,
        tuple(notes),
    )


def _on_validation(row: Row) -> dict[str, Any]:
    """A row with what the validation part says in the place of the test set."""
    changed = row.copy()
    changed.update(dict.fromkeys(("accuracy", "loss", "client_accuracy", "metrics")))
    changed.update(row.get("validation") or {})
    return changed


def _without_copies(
    rows: Mapping[Path, list[Row]], seeds: Mapping[Path, Any]
) -> tuple[list[Path], list[str]]:
    """Runs of which none is another one's copy, as far as it goes; and a sentence for each that is."""
    kept: list[Path] = []
    notes: list[str] = []
    for run in sorted(rows, key=lambda run: len(rows[run]), reverse=True):  # the furthest one is kept
        other = next((k for k in kept if seeds[k] == seeds[run] and _begins(rows[k], rows[run])), None)
        if other is None:
            kept.append(run)
        else:
            notes.append(f"{run} has the settings, the seed and the numbers of {other}: it is counted once.")
    return [run for run in rows if run in kept], notes


def _begins(rows: Sequence[Row], others: Sequence[Row]) -> bool:
    """Whether a run has the numbers of another one, apart from how long they took."""
    pairs = zip(rows, others, strict=False)
    return bool(others) and all(
        {**row, "seconds": 0, "measures": 0} == {**other, "seconds": 0, "measures": 0} for row, other in pairs
    )


def is_finished(run: Path, rows: int) -> bool:
    """Whether a run says that it is done; without a sound run.json, whether it has its experiment's rounds."""
    with contextlib.suppress(FedflatError):
        return "finished" in read_settings(run)
    path = run / "experiment.yaml"
    planned = read_mapping(path).get("rounds") if path.exists() else None
    return not isinstance(planned, int) or rows >= planned


def monitor_of(run: Path) -> Monitor:
    """The metric that a run is compared by; accuracy where no run.json says another."""
    with contextlib.suppress(FedflatError):  # without a sound run.json, the experiment is all there is
        return Monitor.of_run(read_settings(run))
    return Monitor()


def first_reached(tested: Sequence[Mapping[str, Any]], target: float | None, monitor: Monitor) -> int | None:
    """The index of the first round whose test reaches the target."""
    if target is None:
        return None
    found = ((row["index"], monitor.of(row)) for row in tested)
    return next((n for n, value in found if value is not None and monitor.reaches(value, target)), None)


def _has_clients(row: Mapping[str, Any]) -> bool:
    return row.get("client_accuracy") is not None


def _mean(values: Sequence[float]) -> Mean:
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def _plain_mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


# -- tables ----------------------------------------------------------------------------------------


def table(
    groups: Sequence[Group], last: int, target: float | None, on: str = "test"
) -> tuple[list[str], list[list[str]]]:
    """Column titles and rows of text."""
    reported = all(group.by_clients for group in groups)
    monitors = list(dict.fromkeys(group.monitor for group in groups))
    metric = monitors[0].title if len(monitors) == 1 else "monitored metric"
    part = "validation " if on == "validation" else ""
    monitored = f"{part}{metric}{REPORTED if reported else ''}, last {last}"
    head = ["experiment", "seeds", "rounds", monitored, "± within", "best", "worst decile"]
    if target is not None:
        goal = monitors[0].goal(target) if len(monitors) == 1 else f"{target:g}"
        head += [f"rounds to {goal}", "seconds", "MB", "reached"]
    rows = []
    for group in groups:
        write = group.monitor.number
        which = f", {group.monitor.title}" if len(monitors) > 1 else ""
        row = [
            group.name + (f",{REPORTED}" if group.by_clients and not reported else "") + which,
            group.seeds,
            str(group.rounds) if group.fewest == group.rounds else f"{group.fewest}–{group.rounds}",
            shown(group.last, write),
            "–" if group.within is None else write(group.within),
            shown(group.best, write),
            shown(group.worst_decile, percent),
        ]
        if target is not None:
            row += [
                shown(group.rounds_to, whole),
                shown(group.seconds_to, whole),
                shown(group.megabytes_to, whole),
                f"{group.reached}/{len(group.counted)}",
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
