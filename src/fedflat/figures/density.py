"""The density of the Hessian's eigenvalues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import FedflatError
from ..flatness.density import SpectralDensity
from .footnote import noted
from .stored import results
from .style import legend_above, look, panels, pen, sparse
from .trials import Place

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FLOOR = 1e-6
"""Of the highest density: what is below is not drawn."""


@noted
def spectral_densities(
    densities: Mapping[str, SpectralDensity] | Place | Sequence[Place],
    part: str = "train",
    blur: float = 0.01,
    width: str = "one",
) -> Figure:
    """`φ(λ)` of models by name, or as `fedflat flatness --density` keeps it; a tick marks the largest eigenvalue.

    Every node of the quadrature is a Gaussian, as wide as `blur` times the range of eigenvalues.
    """
    if not blur > 0:
        raise FedflatError(f"blur={blur}: give a width above 0, as a part of the range.")
    if isinstance(densities, Mapping):
        named = dict(densities)
    else:
        found = results(densities, "density", part, "--density", _density)
        named = {
            f"{name}, seed {number}" if len(every) > 1 else name: density
            for name, every in found.items()
            for number, density in enumerate(every)
        }
    with look():
        figure, (axes,) = panels(1, width, 2.2)
        most = 0.0
        for number, (name, density) in enumerate(named.items()):
            x, y = density.curve(width=blur)
            most = max(most, float(y.max()))
            axes.plot(x, y, label=name, markevery=sparse(len(x), number), **pen(number))
            axes.axvline(density.largest, 0, 0.06, color=pen(number)["color"], linewidth=1.5)
        axes.set_yscale("log")
        axes.set_ylim(FLOOR * most, 3 * most)
        axes.set(xlabel=r"eigenvalue $\lambda$ of the Hessian", ylabel=r"density $\varphi(\lambda)$")
        axes.margins(x=0.02)
        legend_above(figure, [axes])
    return figure


def _density(result: Mapping[str, Any]) -> SpectralDensity:
    """From the plain values in a file."""
    nodes, weights = (tuple(map(tuple, result[key])) for key in ("nodes", "weights"))
    if any(node is None for row in nodes for node in row):
        raise FedflatError("A Hessian holds NaN or infinite values: has the training diverged?")
    return SpectralDensity(result["largest"], result["smallest"], nodes, weights, result["size"])
