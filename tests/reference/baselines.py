"""Methods against client drift, without sharpness: FedAvg to FedNTD."""

from __future__ import annotations

from .common import Run, pull, result


def fedavg(run: Run, server_lr: float = 1.0) -> dict:
    """FedAvg (McMahan et al., 2017): ``w <- w + eta_g Delta``."""
    w, path = run.w0, []
    for active, p, lr in run.rounds():
        delta = run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                x = sgd(x, run.clipped(run.grad(i, x)))
            delta = delta + p[i] * (x - w)
        w = w + server_lr * delta
        path.append(w)
    return result(path)


def fedavgm(run: Run, momentum_server: float, server_lr: float = 1.0) -> dict:
    """FedAvgM (Hsu et al., 2019): ``m <- beta m + Delta;  w <- w + eta_g m``."""
    w, m, path = run.w0, run.zeros(), []
    for active, p, lr in run.rounds():
        delta = run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                x = sgd(x, run.clipped(run.grad(i, x)))
            delta = delta + p[i] * (x - w)
        m = momentum_server * m + delta
        w = w + server_lr * m
        path.append(w)
    return result(path, {"m": m})


def fedprox(run: Run, mu: float) -> dict:
    """FedProx (Li et al., 2020): ``d = grad(x) + mu (x - w)``."""
    w, path = run.w0, []
    for active, p, lr in run.rounds():
        delta = run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                x = sgd(x, run.clipped(run.grad(i, x)) + mu * (x - w))
            delta = delta + p[i] * (x - w)
        w = w + delta
        path.append(w)
    return result(path)


def scaffold(run: Run, server_lr: float = 1.0) -> dict:
    """SCAFFOLD, option II (Karimireddy et al., 2020).

    ``d = grad(x) - c_i + c;  c_i+ = c_i - c + G_i;  c <- c + (1/M) sum_{N_t} (c_i+ - c_i)``.
    """
    w, path = run.w0, []
    c, ci = run.zeros(), [run.zeros() for _ in run.clients]
    for active, p, lr in run.rounds():
        delta, change = run.zeros(), run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                x = sgd(x, run.clipped(run.grad(i, x)) - ci[i] + c)
            delta = delta + p[i] * (x - w)
            new = ci[i] - c + (w - x) / (run.K * lr)
            change = change + (new - ci[i])
            ci[i] = new
        c = c + change / run.M
        w = w + server_lr * delta
        path.append(w)
    return result(path, {"c": c}, c=ci)


def feddyn(run: Run, beta: float, prox: str = "square") -> dict:
    """FedDyn (Acar et al., 2021), with alpha = 1 / beta.

    ``d = grad(x) - u_i + (x - w) / beta;  u_i <- u_i - Delta_i / beta``;
    ``u <- u - (1 / (beta M)) sum_{N_t} Delta_i;  w <- w + Delta - beta u``.
    """
    w, path = run.w0, []
    u, ui = run.zeros(), [run.zeros() for _ in run.clients]
    for active, p, lr in run.rounds():
        delta, total = run.zeros(), run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                x = sgd(x, run.clipped(run.grad(i, x)) - ui[i] + pull(x, w, beta, prox))
            delta = delta + p[i] * (x - w)
            total = total + (x - w)
            ui[i] = ui[i] - (x - w) / beta
        u = u - total / (beta * run.M)
        w = w + delta - beta * u
        path.append(w)
    return result(path, {"u": u}, u=ui)


def fedcm(run: Run, alpha: float, server_lr: float = 1.0) -> dict:
    """FedCM (Xu et al., 2021): ``d = alpha grad(x) + (1 - alpha) g;  g <- G``."""
    w, g, path = run.w0, run.zeros(), []
    for active, p, lr in run.rounds():
        delta = run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                x = sgd(x, alpha * run.clipped(run.grad(i, x)) + (1 - alpha) * g)
            delta = delta + p[i] * (x - w)
        g = -delta / (run.K * lr)
        w = w + server_lr * delta
        path.append(w)
    return result(path, {"g": g})


def fedacg(run: Run, momentum_server: float, mu: float) -> dict:
    """FedACG (Kim et al., 2024): clients start at, and are held near, the look-ahead ``a``.

    ``a = w + lambda m;  d = grad(x) + mu (x - a);  Delta_i = x_K - a``;
    ``m <- lambda m + Delta;  w <- w + m``.
    """
    w, m, path = run.w0, run.zeros(), []
    for active, p, lr in run.rounds():
        a = w + momentum_server * m
        delta = run.zeros()
        for i in active:
            x, sgd = a, run.sgd(lr)
            for _ in range(run.K):
                x = sgd(x, run.clipped(run.grad(i, x)) + mu * (x - a))
            delta = delta + p[i] * (x - a)
        m = momentum_server * m + delta
        w = w + m
        path.append(w)
    return result(path, {"m": m})


def fedntd(run: Run, gamma: float, tau: float) -> dict:
    """FedNTD (Lee et al., 2022): distil from ``w`` over the classes that are not the true one.

    Loss ``CE + gamma tau^2 KL(softmax(z'_w / tau) || softmax(z' / tau))``, ``z'`` without the
    true class.
    """
    w, path = run.w0, []
    for active, p, lr in run.rounds():
        delta = run.zeros()
        for i in active:
            X, y = run.clients[i]
            teacher = run.logits(i, w)
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                x = sgd(x, run.clipped(run.mlp.ntd_grad(x, X, y, teacher, gamma, tau)))
            delta = delta + p[i] * (x - w)
        w = w + delta
        path.append(w)
    return result(path)
