"""Metrics of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .metric import BatchOutputs, InOrder, Metric


class Errors(InOrder):
    """A metric of errors, `output − target`."""

    larger_is_better = False

    def keep(self, batch: BatchOutputs) -> tuple[float, int] | None:
        if batch.numbers is None:
            return None
        errors = np.subtract(*batch.numbers)
        return self.total(errors), errors.size

    def total(self, errors: np.ndarray) -> float:
        """How large errors are together."""
        raise NotImplementedError

    def combine(self, kept: Sequence[tuple[float, int]]) -> float:
        return sum(total for total, _ in kept) / sum(count for _, count in kept)


class MeanSquaredError(Errors):
    """The mean of the squared errors."""

    name = "mse"

    def total(self, errors: np.ndarray) -> float:
        return float(np.square(errors).sum())


class MeanAbsoluteError(Errors):
    """The mean of the absolute errors."""

    name = "mae"

    def total(self, errors: np.ndarray) -> float:
        return float(np.abs(errors).sum())


class R2(InOrder):
    """`1 − Σ(y − z)² / Σ(y − ȳ)²`, the mean over outputs; of constant targets 1 if all are met, else 0.

    None for a single sample.
    """

    name = "r2"

    def keep(self, batch: BatchOutputs) -> tuple[np.ndarray, np.ndarray] | None:
        return batch.numbers

    def combine(self, kept: Sequence[tuple[np.ndarray, np.ndarray]]) -> float | None:
        outputs, targets = (np.concatenate(parts) for parts in zip(*kept, strict=True))
        if len(targets) < 2:
            return None
        left = np.square(targets - outputs).sum(0)
        whole = np.square(targets - targets.mean(0)).sum(0)
        constant = np.where(left == 0, 1.0, 0.0)
        each = np.where(whole == 0, constant, 1 - left / np.where(whole == 0, 1, whole))
        return float(each.mean())


REGRESSION_METRICS: tuple[Metric, ...] = (MeanSquaredError(), MeanAbsoluteError(), R2())
