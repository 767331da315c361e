"""A two-layer perceptron on one flat float64 vector, with hand-derived gradients.

    logits = W2 tanh(W1 x + b1) + b2

The vector is ``[W1 (h x d), b1 (h), W2 (C x h), b2 (C)]``, matrices row-major: the order in which
torch lists the parameters of ``Sequential(Linear(d, h), Tanh(), Linear(h, C))``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Array = np.ndarray


def log_softmax(z: Array) -> Array:
    """Row-wise ``z - log sum exp z``."""
    z = z - z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def softmax(z: Array) -> Array:
    """Row-wise softmax."""
    return np.exp(log_softmax(z))


def kl(z_teacher: Array, z: Array, tau: float) -> float:
    """Batch mean of ``KL(softmax(z_teacher / tau) || softmax(z / tau))``."""
    log_p, log_q = log_softmax(z_teacher / tau), log_softmax(z / tau)
    return float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean())


def kl_grad(z_teacher: Array, z: Array, tau: float) -> Array:
    """Derivative of :func:`kl` in ``z``: ``(q - p) / (tau N)``, p the teacher's softmax."""
    return (softmax(z / tau) - softmax(z_teacher / tau)) / (tau * len(z))


def not_true(z: Array, y: Array) -> Array:
    """The logits without those of the true classes: N x C becomes N x (C - 1)."""
    keep = np.arange(z.shape[1]) != y[:, None]
    return z[keep].reshape(len(z), -1)


class MLP(NamedTuple):
    """The perceptron ``d -> h -> C``; every method takes the flat parameter vector ``w``."""

    d: int
    h: int
    C: int

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.h * self.d + self.h + self.C * self.h + self.C

    def split(self, w: Array) -> tuple[Array, Array, Array, Array]:
        """``W1, b1, W2, b2`` as views of ``w``."""
        d, h, C = self
        W1, b1, W2, b2 = np.split(w, np.cumsum([h * d, h, C * h]))
        return W1.reshape(h, d), b1, W2.reshape(C, h), b2

    def weight_mask(self) -> Array:
        """True on the entries of the tensors named "weight" (W1, W2), False on the biases."""
        d, h, C = self
        return np.repeat([True, False, True, False], [h * d, h, C * h, C])

    def logits(self, w: Array, X: Array) -> Array:
        """N x C logits."""
        W1, b1, W2, b2 = self.split(w)
        return np.tanh(X @ W1.T + b1) @ W2.T + b2

    def backward(self, w: Array, X: Array, dz: Array) -> Array:
        """Chain rule from the derivative ``dz`` (N x C) in the logits to the flat gradient."""
        W1, b1, W2, _ = self.split(w)
        a = np.tanh(X @ W1.T + b1)
        da = (dz @ W2) * (1.0 - a**2)
        return np.concatenate([(da.T @ X).ravel(), da.sum(0), (dz.T @ a).ravel(), dz.sum(0)])

    # cross-entropy -------------------------------------------------------------------------------

    def ce(self, w: Array, X: Array, y: Array) -> float:
        """Mean cross-entropy."""
        return float(-log_softmax(self.logits(w, X))[np.arange(len(y)), y].mean())

    def ce_grad(self, w: Array, X: Array, y: Array) -> Array:
        """Gradient of :meth:`ce`; in the logits it is ``(softmax(z) - onehot(y)) / N``."""
        dz = (softmax(self.logits(w, X)) - np.eye(self.C)[y]) / len(y)
        return self.backward(w, X, dz)

    # cross-entropy + gamma tau^2 KL(teacher || model) --------------------------------------------

    def kd(self, w: Array, X: Array, y: Array, z_teacher: Array, gamma: float, tau: float) -> float:
        """Cross-entropy plus ``gamma tau^2 KL`` to the teacher's logits."""
        return self.ce(w, X, y) + gamma * tau**2 * kl(z_teacher, self.logits(w, X), tau)

    def kd_grad(self, w: Array, X: Array, y: Array, z_teacher: Array, gamma: float, tau: float) -> Array:
        """Gradient of :meth:`kd`, the teacher held constant."""
        dz = gamma * tau**2 * kl_grad(z_teacher, self.logits(w, X), tau)
        return self.ce_grad(w, X, y) + self.backward(w, X, dz)

    # cross-entropy + gamma tau^2 KL over the classes that are not the true one -------------------

    def ntd(self, w: Array, X: Array, y: Array, z_teacher: Array, gamma: float, tau: float) -> float:
        """Cross-entropy plus ``gamma tau^2 KL`` on the not-true logits."""
        z = not_true(self.logits(w, X), y)
        return self.ce(w, X, y) + gamma * tau**2 * kl(not_true(z_teacher, y), z, tau)

    def ntd_grad(self, w: Array, X: Array, y: Array, z_teacher: Array, gamma: float, tau: float) -> Array:
        """Gradient of :meth:`ntd`, the teacher constant; the true logits get no KL gradient."""
        z = self.logits(w, X)
        dz = np.zeros_like(z)
        dz[np.arange(self.C) != y[:, None]] = kl_grad(not_true(z_teacher, y), not_true(z, y), tau).ravel()
        return self.ce_grad(w, X, y) + self.backward(w, X, gamma * tau**2 * dz)
