"""Metrics of classes: from counts by class, from probabilities, and from the ranks of scores.

Where a class, or a whole test set, leaves a value undefined it is None, never NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from .metric import BatchOutputs, Counting, Counts, InOrder, Metric
from .tasks import MULTI_LABEL

BINS = 15
"""Of the expected calibration error."""


# -- from counts by class --------------------------------------------------------------------------


class ByCounts(Counting):
    """A metric of three counts by class: right predictions `t`, predictions `p`, and targets `a`."""

    def score(self, batch: BatchOutputs) -> Counts | None:
        return batch.counts

    def compute(self, score: Counts) -> Any:
        *columns, (several,) = score
        t, p, a = np.array(list(zip_longest(*columns, fillvalue=0)), dtype=np.float64).T
        return self.of(t, p, a, bool(several))

    def of(self, t: np.ndarray, p: np.ndarray, a: np.ndarray, several: bool) -> Any:
        """The value; `several` says that these are labels of which a sample may have any number."""
        raise NotImplementedError


class BaseRate(ByCounts):
    """The share of the most frequent class: the accuracy of a model that always says it."""

    name, share = "base-rate", True
    larger_is_better = None  # it says something about the data, not about the model

    def of(self, t: np.ndarray, p: np.ndarray, a: np.ndarray, several: bool) -> float | None:
        return None if several else float(a.max() / a.sum())


class ClassCounts(ByCounts):
    """How often every class is predicted, and how often it occurs."""

    name, larger_is_better = "class-counts", None

    def of(self, t: np.ndarray, p: np.ndarray, a: np.ndarray, several: bool) -> dict[str, list[int]] | None:
        return None if several else {"predicted": p.astype(int).tolist(), "actual": a.astype(int).tolist()}


class BalancedAccuracy(ByCounts):
    """The mean over the classes that occur of `t/a`, the fraction of a class predicted right."""

    name, share = "balanced-accuracy", True

    def of(self, t: np.ndarray, p: np.ndarray, a: np.ndarray, several: bool) -> float | None:
        return None if several else float((t[a > 0] / a[a > 0]).mean())


class Rates(ByCounts):
    """Precision `t/p`, recall `t/a` or F1 `2t/(p+a)`, 0 where nothing is divided by nothing.

    `average` is "" (of class 1 where there are two classes, else macro), macro (the mean over classes that occur or
    are predicted), micro (of the counts of all classes together) or by-class.
    """

    def __init__(self, rate: str, average: str = "") -> None:
        self.name = f"{rate}-{average}".strip("-")
        self._rate, self._average = rate, average
        self.larger_is_better = None if average == "by-class" else True

    def of(self, t: np.ndarray, p: np.ndarray, a: np.ndarray, several: bool) -> Any:
        if self._average == "micro":
            return float(self._divide(t.sum(), p.sum(), a.sum()))
        each = self._divide(t, p, a)
        occurring = (p + a > 0) | several
        if self._average == "by-class":
            return [float(one) if there else None for one, there in zip(each, occurring, strict=True)]
        if not self._average and len(each) == 2 and not several:
            return float(each[1])
        return float(each[occurring].mean())

    def _divide(self, t: Any, p: Any, a: Any) -> Any:
        upper, lower = {"precision": (t, p), "recall": (t, a), "f1": (2 * t, p + a)}[self._rate]
        return np.divide(upper, lower, out=np.zeros_like(np.asarray(lower)), where=np.asarray(lower) > 0)


class Confusion(Counting):
    """How often targets of a class, a row, were predicted as another, a column."""

    name, larger_is_better = "confusion", None

    def score(self, batch: BatchOutputs) -> Counts | None:
        if batch.predicted is None or batch.task == MULTI_LABEL:
            return None
        labels, predicted = batch.labels.flatten(), batch.predicted.flatten()
        classes = max(batch.classes, int(labels.max()) + 1)
        counts: Counts = (
            torch.bincount(labels * classes + predicted, minlength=classes**2).view(classes, -1).tolist()
        )
        return counts

    def compute(self, score: Counts) -> Counts:
        return [row + [0] * (len(score) - len(row)) for row in score]


class TopK(Counting):
    """The fraction of targets whose class is among the k largest outputs; of equal ones the later class counts."""

    share = True

    def __init__(self, k: int) -> None:
        self.name, self._k = f"top-{k}", k

    def score(self, batch: BatchOutputs) -> Counts | None:
        if batch.logits is None or batch.task == MULTI_LABEL:
            return None
        rows, labels = batch.logits
        largest = rows.argsort(dim=1, stable=True).flip(1)[:, : self._k]
        return [[int((largest == labels[:, None]).sum())], [len(labels)]]

    def compute(self, score: Counts) -> float:
        (hits,), (count,) = score
        return hits / count


# -- from probabilities ----------------------------------------------------------------------------


class Means(InOrder):
    """The mean of a number per target; of several labels, over all of them."""

    larger_is_better = False

    def keep(self, batch: BatchOutputs) -> tuple[float, int] | None:
        if batch.logits is None:
            return None
        return self.total(*batch.logits), len(batch.logits[1])

    def total(self, rows: torch.Tensor, labels: torch.Tensor) -> float:
        """The sum over a batch, from a row of logits and the class of every target."""
        raise NotImplementedError

    def combine(self, kept: Sequence[tuple[float, int]]) -> float:
        return sum(total for total, _ in kept) / sum(count for _, count in kept)


class LogLoss(Means):
    """`−log p` of the true class, the mean over targets."""

    name = "log-loss"

    def total(self, rows: torch.Tensor, labels: torch.Tensor) -> float:
        return -torch.log_softmax(rows, 1).gather(1, labels[:, None]).sum().item()


class Brier(Means):
    """`Σ_c (p_c − y_c)²`, the mean over targets; of two classes half of it, `(p − y)²`."""

    name = "brier"

    def total(self, rows: torch.Tensor, labels: torch.Tensor) -> float:
        truth = torch.nn.functional.one_hot(labels, rows.shape[1])
        whole = (torch.softmax(rows, 1) - truth).square().sum().item()
        return whole / 2 if rows.shape[1] == 2 else whole


class CalibrationError(InOrder):
    """The expected calibration error: `Σ_b |hits_b − Σ confidence_b| / n` over equal bins of the confidence."""

    name, larger_is_better = "calibration-error", False

    def keep(self, batch: BatchOutputs) -> np.ndarray | None:
        if batch.logits is None:
            return None
        rows, labels = batch.logits
        confidence, predicted = torch.softmax(rows, 1).max(dim=1)
        bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
        columns = (predicted == labels).double(), confidence, torch.ones_like(confidence)
        return np.array([torch.bincount(bins, column, BINS).tolist() for column in columns])

    def combine(self, kept: Sequence[np.ndarray]) -> float:
        hits, confidence, count = sum(kept[1:], start=kept[0])
        return float(np.abs(hits - confidence).sum() / count.sum())


# -- from ranks ------------------------------------------------------------------------------------


class Ranking(InOrder):
    """A metric of how scores rank the samples of a class before all others; keeps scores and labels.

    Two classes: of class 1. More classes: one against the rest, the mean over classes for which it is defined.
    Several labels: the mean over labels for which it is defined.
    """

    def keep(self, batch: BatchOutputs) -> tuple[np.ndarray, np.ndarray] | None:
        if batch.logits is None:
            return None
        if batch.task == MULTI_LABEL:
            scores, truth = batch.outputs.double().flatten(0, -2), batch.labels.flatten(0, -2)
        else:
            rows, labels = batch.logits
            if rows.shape[1] == 2:
                scores, truth = rows[:, 1:] - rows[:, :1], labels[:, None]
            else:
                scores, truth = torch.softmax(rows, 1), torch.nn.functional.one_hot(labels, rows.shape[1])
        return scores.cpu().numpy(), truth.bool().cpu().numpy()

    def combine(self, kept: Sequence[tuple[np.ndarray, np.ndarray]]) -> float | None:
        scores, truth = (np.concatenate(parts) for parts in zip(*kept, strict=True))
        if np.isnan(scores).any():
            return None
        found = [self.rank(*column) for column in zip(scores.T, truth.T, strict=True)]
        known = [value for value in found if value is not None]
        return float(np.mean(known)) if known else None

    def rank(self, scores: np.ndarray, truth: np.ndarray) -> float | None:
        """The value for one class; None where it is not defined."""
        raise NotImplementedError


def _by_threshold(scores: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many positives, and how many samples, score at least as much as every different score, from the top."""
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    return np.cumsum(truth[order])[ends], ends + 1


class Auroc(Ranking):
    """The area under the ROC curve: the chance that a positive scores above a negative, ties counted half."""

    name = "auroc"

    def rank(self, scores: np.ndarray, truth: np.ndarray) -> float | None:
        positives, samples = (np.append(0, column) for column in _by_threshold(scores, truth))
        negatives = samples - positives
        if not positives[-1] or not negatives[-1]:
            return None
        twice = int((np.diff(negatives) * (positives[1:] + positives[:-1])).sum())  # of whole numbers: exact
        return twice / (2 * int(positives[-1]) * int(negatives[-1]))


class AveragePrecision(Ranking):
    """`Σ_n (R_n − R_{n−1}) P_n` over thresholds, from recall R and precision P."""

    name = "average-precision"

    def rank(self, scores: np.ndarray, truth: np.ndarray) -> float | None:
        positives, samples = _by_threshold(scores, truth)
        if not positives[-1]:
            return None
        return float((np.diff(positives, prepend=0) * (positives / samples)).sum() / positives[-1])


RATES, AVERAGES = ("precision", "recall", "f1"), ("", "macro", "micro", "by-class")
CLASSIFICATION_METRICS: tuple[Metric, ...] = (
    BaseRate(),
    ClassCounts(),
    BalancedAccuracy(),
    *(
        Rates(rate, average)
        for rate in ("precision", "recall", "f1")
        for average in ("", "macro", "micro", "by-class")
    ),
    Confusion(),
    LogLoss(),
    Brier(),
    CalibrationError(),
    Auroc(),
    AveragePrecision(),
)
