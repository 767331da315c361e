"""Final accuracy against a hyper-parameter: FedWMSAM Figure 6, FedGF Figures 1, 11 and 12."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.partitions.text import partition_parts
from ..errors import FedflatError, nearest
from ..experiments.compare import (
    REPORTED,
    Group,
    Mean,
    _mean,
    _names,
    compare,
    describe,
    find_runs,
    leave_out,
)
from ..methods.text import as_method, method_terms
from ..storage.metrics_file import read_metrics
from .footnote import noted
from .lines import Line, draw_lines
from .style import legend_above, look, panels
from .trials import written

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREEK = ("alpha", "beta", "gamma", "lambda", "mu", "rho", "sigma", "tau")
WIDE = 20
"""Ratio of the largest to the smallest value from which steps are multiples and the axis is logarithmic."""


@noted
def sensitivity(
    runs: str | Path | Sequence[str | Path],
    by: str,
    last: int = 10,
    measures: Sequence[str] = (),
    width: str = "one",
    along_with: Sequence[str] = (),
) -> Figure:
    """Accuracy over the last tests against a setting such as `method.rho`, `partition.alpha` or `local.epochs`.

    A line for everything else that differs, but for settings that change `along_with` it; bars are the deviation over
    seeds. With `measures` a panel for each, as last recorded.
    """
    groups = _tested_ones(compare(find_runs([runs] if isinstance(runs, str | Path) else runs), last))
    values, form = _as_numbers([setting(group.runs[0], by) for group in groups])
    lines: dict[str, list[int]] = {}
    rests = [_without(_described(group.runs[0]), [by, *along_with]) for group in groups]
    for number, rest in enumerate(rests):
        lines.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append(number)
    names = [written(name) for name in _names([rests[members[0]] for members in lines.values()])]
    monitor = groups[0].monitor
    unit = " (%)" if monitor.share else ""
    with look():
        figure, axes = panels(1 + len(measures), width, 2.2)
        for panel, measure in zip(axes, [None, *measures], strict=True):
            means = [_result(group, measure) for group in groups]
            scale = 100.0 if measure is None and monitor.share else 1.0
            _draw(panel, values, means, dict(zip(names, lines.values(), strict=True)), scale)
            panel.set(xlabel=_label(by) + form, ylabel=measure or f"{_tested(groups)}, last {last}{unit}")
        legend_above(figure, axes)
    return figure


def _tested_ones(groups: Sequence[Group]) -> list[Group]:
    """Those with an accuracy; the others are named, and alone they are a mistake."""
    tested = [group for group in groups if group.last is not None]
    untested = [
        f"{one.name} has no {one.monitor.title} yet: no round has been tested."
        for one in groups
        if one.last is None
    ]
    if not tested:
        raise FedflatError(untested[0])
    for sentence in untested:
        leave_out(sentence)
    return tested


def _tested(groups: Sequence[Group]) -> str:
    """Which metric it is, and whose."""
    title = groups[0].monitor.title
    if not any(group.by_clients for group in groups):
        return f"test {title}"
    return f"{title}{REPORTED}" if all(group.by_clients for group in groups) else title


def _as_numbers(values: list[Any]) -> tuple[list[Any], str]:
    """Texts that differ in a number, such as bernoulli:0.1, as these numbers; and what the texts have in common."""
    parted = [value.partition(":") if isinstance(value, str) else ("", "", "") for value in values]
    forms = {form for form, _, _ in parted}
    try:
        numbers = [float(number) for _, _, number in parted]
    except ValueError:
        return values, ""
    return (numbers, f" ({forms.pop()})") if len(forms) == 1 else (values, "")


def _label(key: str) -> str:
    """What the axis says."""
    section, _, name = key.rpartition(".")
    symbol = rf"$\{name}$" if name in GREEK else name.replace("_", " ")
    return symbol if section in ("", "method") else f"{symbol} ({section})"


def setting(run: Path, key: str) -> Any:
    """What a run has for a dotted key; of methods the defaults too."""
    about = _described(run)
    if key in about:
        return about[key]
    section, _, name = key.partition(".")
    if section == "method" and (run / "experiment.yaml").exists():
        for mechanism in as_method(about["method"]).mechanisms:
            if hasattr(mechanism, name):
                return getattr(mechanism, name)
    raise FedflatError(f"{run} has no setting '{key}'.{nearest(key, about)}")


def _described(run: Path) -> dict[str, Any]:
    """With the parts of the partition as keys of their own, be it written as text or as parts."""
    about = describe(run)
    text = about.pop("partition", None) or about.pop("partition.then", None)
    prefix = "partition" if "partition.name" not in about else "partition.then"
    while isinstance(text, str):
        parts = partition_parts(text)
        about[f"{prefix}.name"], text = parts.pop("name"), parts.pop("then", None)
        about |= {f"partition.{key}": value for key, value in parts.items()}
        prefix = "partition.then"
    return about


def _without(about: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """A description without its seed and some settings."""
    rest = {k: v for k, v in about.items() if k not in ("seed", *keys)}
    names = [
        name for section, _, name in (key.partition(".") for key in keys) if section == "method" and name
    ]
    if names:
        terms = method_terms(about["method"])
        rest["method"] = [{term: {k: v for k, v in given.items() if k not in names}} for term, given in terms]
    return rest


def _result(group: Group, measure: str | None) -> Mean:
    if measure is None:
        return group.last
    found = []
    for run in group.counted:
        numbers = [(row.get("measures") or {}).get(measure) for row in read_metrics(run)]
        taken = [number for number in numbers if number is not None]
        if not taken:
            raise FedflatError(
                f"{run} has not recorded '{measure}'. Record it while training: `fedflat run --measure {measure}`."
            )
        found.append(taken[-1])
    return _mean(found)


def _draw(
    axes: Axes, values: list[Any], means: list[Mean], lines: Mapping[str, list[int]], scale: float
) -> None:
    """The lines; values stand side by side if they are no numbers, or 0 and others of several magnitudes."""
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if numeric and 0 in values and _wide([value for value in values if value]):
        values, means, lines = _in_order(values, means, lines)
        numeric = False  # neither a linear nor a logarithmic axis has room for these
    places: list[Any] = sorted(set(values)) if numeric else list(dict.fromkeys(map(str, values)))
    drawn = []
    for name, members in lines.items():
        at = [values[n] if numeric else places.index(str(values[n])) for n in members]
        order = np.argsort(at, kind="stable")
        chosen = [means[members[n]] or (float("nan"), None) for n in order]
        mean = np.array([value for value, _ in chosen])
        spread = np.array([deviation or 0.0 for _, deviation in chosen])
        several = any(deviation is not None for _, deviation in chosen)
        low, high = (mean - spread, mean + spread) if several else (None, None)
        drawn.append(Line(name, np.array(at, dtype=float)[order], mean, low, high))
    draw_lines(axes, drawn, scale=scale)
    if not numeric:
        axes.set_xticks(range(len(places)), [str(place) for place in places])
    elif _wide(places):
        axes.set_xscale("log")
    if numeric and len(places) <= 10:
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.minorticks_off()


def _wide(values: Sequence[float]) -> bool:
    """Whether positive numbers are of several magnitudes."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= WIDE


def _in_order(
    values: list[Any], means: list[Mean], lines: Mapping[str, list[int]]
) -> tuple[list[str], list[Mean], dict[str, list[int]]]:
    """All of it in ascending order of the values, which become words."""
    order = sorted(range(len(values)), key=lambda number: values[number])
    moved = {name: [order.index(member) for member in members] for name, members in lines.items()}
    return [f"{values[n]:g}" for n in order], [means[n] for n in order], moved
