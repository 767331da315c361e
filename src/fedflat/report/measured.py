"""What was measured of a run's model after training: flatness as numbers and curves, and the loss around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..flatness.density import SpectralDensity
from .reading import RunFiles
from .series import rounded_all

GRID = 200
"""Points of a density."""


def measure_run(run: RunFiles) -> dict[str, Any]:
    """Numbers by name, and the curves that are drawn; empty where nothing was measured."""
    if not run.flatness:
        return {}
    numbers: dict[str, float | None] = {}
    curves: dict[str, dict[str, Any]] = {"radius": {}, "density": {}}
    for label, about in run.flatness["measures"].items():
        if not isinstance(about, dict):
            continue
        found = about.get("numbers")
        for name, value in (found if isinstance(found, dict) else {}).items():
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
                numbers[str(name)] = value
        kind = label.split(" ")[0]
        if kind in curves and isinstance(about.get("result"), dict):
            curve = _attempted(CURVES[kind], about["result"], label, run.notes)
            if curve is not None:
                curves[kind][label] = curve
    shown: dict[str, Any] = rounded_all({"round": run.flatness.get("round"), "numbers": numbers, **curves})
    return shown


def _attempted(
    make: Callable[[Mapping[str, Any]], dict[str, Any]],
    result: Mapping[str, Any],
    label: str,
    notes: list[str],
) -> dict[str, Any] | None:
    try:
        return make(result)
    except (KeyError, TypeError, ValueError, IndexError):
        notes.append(f"The {label} in flatness.json is not what fedflat writes and is not drawn.")
        return None


def _radius(result: Mapping[str, Any]) -> dict[str, Any]:
    """A `RadiusProfile` by columns."""
    return {
        "radii": list(result["radii"]),
        "random": [one["value"] for one in result["random"]],
        "low": [one["low"] for one in result["random"]],
        "high": [one["high"] for one in result["random"]],
        "gradient": list(result["gradient"]),
    }


def _density(result: Mapping[str, Any]) -> dict[str, Any]:
    """A `SpectralDensity` as a curve."""
    if "grid" in result:
        return {"grid": list(result["grid"]), "density": list(result["density"])}
    nodes, weights = (tuple(map(tuple, result[name])) for name in ("nodes", "weights"))
    grid, density = SpectralDensity(
        result["largest"], result["smallest"], nodes, weights, result["size"]
    ).curve(GRID)
    return {"grid": grid.tolist(), "density": density.tolist()}


CURVES = {"radius": _radius, "density": _density}


def landscape_of(run: RunFiles) -> dict[str, Any]:
    """A line or a surface of losses; empty where there is none."""
    if not run.landscape:
        return {}
    axes, losses = run.landscape.get("axes"), run.landscape["losses"]
    known = isinstance(axes, list) and len(axes) in (1, 2) and all(isinstance(axis, list) for axis in axes)
    shape = [len(axis) for axis in axes or []] if known else []
    if not shape or not all(_has_shape(grid, shape) for grid in losses.values()):
        run.notes.append("landscape.json has losses that do not fit its axes and is left out; was it edited?")
        return {}
    shown: dict[str, Any] = rounded_all(
        {key: run.landscape.get(key) for key in ("round", "seed", "axes", "losses")}
    )
    return shown


def _has_shape(grid: Any, shape: Sequence[int]) -> bool:
    if not shape:
        return grid is None or isinstance(grid, int | float)
    return isinstance(grid, list) and len(grid) == shape[0] and all(_has_shape(g, shape[1:]) for g in grid)
