"""A figure that a notebook shows by itself."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

from .style import look

SHARP = 144
"""Dots per inch on a screen: the small letters of a paper stay legible."""


class ShownFigure(Figure):
    """As any figure of matplotlib; notebooks show it without `%matplotlib inline`."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        with look():
            self.savefig(file, format="png", dpi=SHARP)
        return file.getvalue()
