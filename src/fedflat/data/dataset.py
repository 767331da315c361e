"""A dataset: what all clients together have, and a test set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from .augmentation import Pipeline, Plain


@dataclass(frozen=True)
class Dataset:
    """Stored samples with labels, and how to prepare them for a model."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int
    pipeline: Pipeline = field(default_factory=Plain)
    augmentation: str = "none"
    """what is usual for training on it"""
    class_names: tuple[str, ...] = ()
    groups: np.ndarray | None = None
    """the number of the user or domain of every training sample"""
    group_names: tuple[str, ...] = ()
    test_groups: np.ndarray | None = None
    """the same of every test sample"""
    rows: np.ndarray | None = None
    """the training rows that are samples, where not all are (windows that reach from one text into the next)"""
    vocabulary: int | None = None
    """different tokens, for text"""
    task: str = "classification"
    """or `"regression"`: every target is one number, not a class"""
    note: str = ""
    """what became of a person's own data"""
    caveats: tuple[str, ...] = ()
    """what makes this copy another dataset than the published one, a sentence each"""
    preparation: Mapping[str, Any] = field(default_factory=dict)
    """how raw samples became these, where the pipeline does not say it; see `preprocessing`"""

    @property
    def labels(self) -> np.ndarray:
        """The labels of all training samples."""
        labels: np.ndarray = self.train[1].numpy()
        labels = labels[:, 0] if self.task == "regression" else labels
        return labels if self.rows is None else labels[self.rows]
