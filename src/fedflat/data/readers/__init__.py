"""Reading the forms in which datasets lie on people's disks. Each file reads one form.

A reader returns `Split`s: stored inputs, labels, and who or where each sample is from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Split:
    """Samples of one split, as they are stored."""

    inputs: np.ndarray | list[str]
    labels: np.ndarray
    groups: list[str] | None = None
    """the user or domain of every sample"""
    class_names: list[str] = field(default_factory=list)
    lossy: str = ""
    """the encoding to which images lost pixels, if they did"""
