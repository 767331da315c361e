"""Final accuracy against a hyper-parameter: FedWMSAM Figure 6, FedGF Figures 1, 11 and 12."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..composition import as_method, method_terms
from ..data.partitions.text import partition_parts
from ..errors import FedflatError, nearest
from ..experiments.compare import Group, Mean, _mean, _names, compare, describe, find_runs
from ..rundirectory import read_metrics
from .lines import Line, draw_lines
from .style import legend_above, look, panels
from .trials import written

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREEK = ("alpha", "beta", "gamma", "lambda", "mu", "rho", "sigma", "tau")
WIDE = 20
"""From such a ratio of the largest to the smallest value on, steps are multiples and the axis is logarithmic."""


def sensitivity(
    runs: str | Path | Sequence[str | Path],
    by: str,
    last: int = 10,
    measures: Sequence[str] = (),
    width: str = "one",
) -> Figure:
    """Accuracy over the last tests against a setting such as `method.rho`, `partition.alpha` or `local.epochs`.

    A line for everything else that differs, bars are the deviation over seeds. With `measures` a panel for each,
    as last recorded.
    """
    groups = compare(find_runs([runs] if isinstance(runs, str | Path) else runs), last)
    values = [setting(group.runs[0], by) for group in groups]
    lines: dict[str, list[int]] = {}
    rests = [_without(_described(group.runs[0]), by) for group in groups]
    for number, rest in enumerate(rests):
        lines.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append(number)
    names = [written(name) for name in _names([rests[members[0]] for members in lines.values()])]
    with look():
        figure, axes = panels(1 + len(measures), width, 2.2)
        for panel, measure in zip(axes, [None, *measures], strict=True):
            means = [_result(group, measure) for group in groups]
            scale = 100.0 if measure is None else 1.0
            _draw(panel, values, means, dict(zip(names, lines.values(), strict=True)), scale)
            panel.set(xlabel=_label(by), ylabel=measure or f"test accuracy, last {last} (%)")
        legend_above(figure, axes)
    return figure


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


def _without(about: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A description without its seed and one setting."""
    section, _, name = key.partition(".")
    rest = {k: v for k, v in about.items() if k not in ("seed", key)}
    if section == "method" and name:
        terms = method_terms(about["method"])
        rest["method"] = [{term: {k: v for k, v in given.items() if k != name}} for term, given in terms]
    return rest


def _result(group: Group, measure: str | None) -> Mean:
    if measure is None:
        if group.last is None:
            raise FedflatError(f"{group.name} has no accuracy yet: no round has been tested.")
        return group.last
    found = []
    for run in group.runs:
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
    """The lines; values that are no numbers stand side by side."""
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
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
    elif places[0] > 0 and places[-1] / places[0] >= WIDE:
        axes.set_xscale("log")
    if numeric and len(places) <= 10:
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.minorticks_off()
