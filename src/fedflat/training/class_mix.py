"""What a test says about every client: its accuracy in its own mix of classes."""

from __future__ import annotations

import math

import numpy as np

from ..data.federation import Federation


class ClassMix:
    """How clients' samples spread over the classes: what a test says about each of them, at no further pass.

    A client's accuracy is taken on the test set in its own mix of classes, `Σ_c p_i(c) accuracy(c)`: what it would
    see on unseen data like its own, if clients differ in their labels. Other differences it does not show.
    """

    LARGEST = 20_000_000
    """Clients times classes up to which it is worth the memory."""

    def __init__(self, shares: np.ndarray) -> None:
        self.shares = shares
        """`p_i(c)`, a client a row"""

    @classmethod
    def of(cls, federation: Federation) -> ClassMix | None:
        """Of a federation; None where targets are no classes, or clients too many."""
        federation = federation.origin or federation
        size = len(federation) * federation.classes
        if federation.test is None or size > cls.LARGEST:
            return None
        labels = federation.labels_by_client()
        if labels is None:
            return None
        owners, targets = labels
        counts = np.bincount(owners * federation.classes + targets, minlength=size)
        shares = counts.reshape(len(federation), -1).astype(np.float32)
        return cls(shares / shares.sum(axis=1, keepdims=True))

    def spread(self, by_class: list[float] | list[list[float]]) -> dict[str, float] | None:
        """Mean, deviation, and the mean of the tenth of clients that fare worst; None if a class was not tested.

        From the accuracies by class of one model, or of one for every client.
        """
        accuracy = np.asarray(by_class)[..., : self.shares.shape[1]]
        missing = np.isnan(accuracy)
        if accuracy.shape[-1] < self.shares.shape[1] or (missing & (self.shares > 0)).any():
            return None
        known = np.where(missing, 0.0, accuracy)
        each = np.sort(self.shares @ known if known.ndim == 1 else (self.shares * known).sum(1))
        worst = each[: math.ceil(len(each) / 10)]
        return {"mean": float(each.mean()), "std": float(each.std()), "worst_decile": float(worst.mean())}
