"""Who has which classes: samples by client and class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ..data.federation import Federation
from ..data.split_picture import paint, picture_size
from ..errors import FedflatError
from .style import columns_wide, look

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def partitions(federations: Federation | Mapping[str, Federation], width: str = "two") -> Figure:
    """Dots whose area is the number of samples, a heat map where there are many; one below the other, one scale."""
    named = {"": federations} if isinstance(federations, Federation) else dict(federations)
    if not named:
        raise FedflatError("There is nothing to draw: give at least one federation.")
    counts = {name: class_counts(federation) for name, federation in named.items()}
    top = max(int(one.max()) for one in counts.values())
    sizes = [picture_size(*one.shape) for one in counts.values()]
    widest = max(inches for inches, _ in sizes)
    shrunk = min(1.0, columns_wide(width) / widest)
    heights = [shrunk * inches for _, inches in sizes]
    with look():
        from .shown import ShownFigure

        figure = ShownFigure(figsize=(shrunk * widest, sum(heights)), layout="constrained")
        places = figure.subfigures(len(counts), 1, squeeze=False, height_ratios=heights).flat
        for place, (name, one) in zip(places, counts.items(), strict=True):
            paint(place, one, name, top, shrunk, named[name].client_names)
    return figure


def class_counts(federation: Federation) -> np.ndarray:
    """Samples by client (rows) and class (columns)."""
    labels = federation.labels_by_client()
    if labels is None:
        raise FedflatError(
            f"The targets of '{federation.name}' are no classes, so there is no split to draw."
        )
    owners, classes = labels
    counts = np.zeros((len(federation), federation.classes), dtype=int)
    np.add.at(counts, (owners, classes), 1)
    return counts
