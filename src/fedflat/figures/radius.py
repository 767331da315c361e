"""The loss at growing distance from a model: FedGF Figures 5, 9 and 14."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FedflatError, nearest
from ..flatness.estimate import Estimate
from ..flatness.radius import RadiusProfile
from .footnote import noted
from .lines import Line, draw_lines
from .stored import results
from .style import legend_above, look, panels
from .trials import Place

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALONG = {"random": "in random directions", "gradient": "uphill"}


@noted
def loss_by_radius(
    profiles: Mapping[str, RadiusProfile] | Place | Sequence[Place],
    along: str | Sequence[str] = "random",
    part: str = "train",
    log: bool = False,
    width: str = "one",
) -> Figure:
    """`L(w + r u)` against r, of profiles by name or as `fedflat flatness --radius` keeps them.

    The band is the confidence interval of the mean over random directions; of several seeds, their deviation.
    """
    ways = [along] if isinstance(along, str) else list(along)
    for way in ways:
        if way not in ALONG:
            raise FedflatError(f"There is no profile '{way}'.{nearest(way, ALONG)}")
    if isinstance(profiles, Mapping):
        named = {name: [profile] for name, profile in profiles.items()}
    else:
        named = results(profiles, "radius", part, "--radius", _profile)
    with look():
        figure, axes = panels(len(ways), width, 2.3)
        for one, way in zip(axes, ways, strict=True):
            draw_lines(one, [_line(name, every, way) for name, every in named.items()])
            ylabel = f"{part} loss" + (f" {ALONG[way]}" if len(ways) > 1 or way != "random" else "")
            one.set(xlabel="radius of the perturbation", ylabel=ylabel)
            if log:
                one.set_yscale("log")
        legend_above(figure, axes)
    return figure


def _profile(result: Mapping[str, Any]) -> RadiusProfile:
    """From the plain values in a file."""
    lost = float("nan")  # which JSON does not know
    estimates = []
    for one in result["random"]:
        value, low, high = (lost if one[key] is None else one[key] for key in ("value", "low", "high"))
        estimates.append(Estimate(value, low, high, one["draws"], one["confidence"]))
    gradient = [lost if value is None else value for value in result["gradient"]]
    return RadiusProfile(tuple(result["radii"]), tuple(estimates), tuple(gradient))


def _line(name: str, profiles: Sequence[RadiusProfile], way: str) -> Line:
    radii = np.array(profiles[0].radii)
    if any(profile.radii != profiles[0].radii for profile in profiles):
        raise FedflatError(f"The seeds of {name} were measured at different radii; measure them in one way.")
    if way == "gradient":
        values = np.array([profile.gradient for profile in profiles])
    else:
        values = np.array([[one.value for one in profile.random] for profile in profiles])
    mean = values.mean(axis=0)
    if len(profiles) > 1:
        deviation = values.std(axis=0, ddof=1)
        return Line(name, radii, mean, mean - deviation, mean + deviation)
    if way == "gradient":
        return Line(name, radii, mean)
    ends = ([getattr(one, end) for one in profiles[0].random] for end in ("low", "high"))
    low, high = (np.array(end) for end in ends)
    return Line(name, radii, mean, low, high)
