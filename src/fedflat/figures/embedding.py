"""How models tell classes apart, as clusters of points: FedWMSAM Figures 5, 12 and 13."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import FedflatError
from ..flatness.embedding import Embedding
from .style import CLASSES, MARKERS, columns_wide, legend_above, look, name_panels, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHAPES = (*MARKERS, "p", "h", "d")
NAMED = 30
"""Classes up to which each has a colour, a shape and a name; beyond, a scale of colours."""
ACROSS = 4


def embeddings(seen: Embedding, class_names: Sequence[str] = (), width: str = "two") -> Figure:
    """Every model's embedding in a panel, the classes in the same colours and shapes in all of them."""
    if not seen.points:
        raise FedflatError("There is nothing to draw: the embedding has no model in it.")
    classes = np.unique(seen.labels)
    if len(class_names) and len(class_names) <= classes.max():
        raise FedflatError(f"class_names has {len(class_names)} names; the labels go up to {classes.max()}.")
    with look():
        from matplotlib import colormaps

        across = min(2 if width == "one" else ACROSS, len(seen.points))
        side = columns_wide(width) / max(across, 2)
        figure, axes = panels(len(seen.points), width, side + 0.1, most=across)
        scale = colormaps["turbo"].resampled(len(classes))
        for one, points in zip(axes, seen.points.values(), strict=True):
            if len(classes) <= NAMED:
                _clusters(one, points, seen.labels, classes, class_names)
            else:
                places = np.searchsorted(classes, seen.labels)
                drawn = one.scatter(points[:, 0], points[:, 1], c=places, s=4, cmap=scale, linewidths=0)
            one.set(xticks=[], yticks=[])
            one.set_aspect("equal", adjustable="datalim")
            one.grid(False)
            one.spines[["top", "right"]].set_visible(True)
        name_panels(axes, list(seen.points), int(15 * side))
        if len(classes) <= NAMED:
            legend_above(figure, axes, markerscale=1.6, handletextpad=0.1)
        else:
            figure.colorbar(drawn, ax=axes, label="class", aspect=30, pad=0.02)
    return figure


def _clusters(
    axes: Axes, points: np.ndarray, labels: np.ndarray, classes: np.ndarray, names: Sequence[str]
) -> None:
    """A colour and a shape for each class."""
    for number, label in enumerate(classes):
        chosen = points[labels == label]
        axes.scatter(
            chosen[:, 0],
            chosen[:, 1],
            s=7,
            color=CLASSES[number % len(CLASSES)],
            marker=SHAPES[number % len(SHAPES)],
            linewidths=0.2,
            edgecolors="white",
            label=names[label] if len(names) else str(label),
        )
