"""FedNSAM, its variants and its ablations (MM 2025): server momentum used inside the round."""

from __future__ import annotations

from .common import Run, n, result


def fednsam(
    run: Run, rho: float, momentum_server: float, nesterov: bool = True, heavy_ball: bool = True
) -> dict:
    """FedNSAM (Algorithm 1): ``d = grad(x + lambda m - rho n(m))``.

    Without ``nesterov`` ``d = grad(x - rho n(m))``. Server: ``m <- lambda m + Delta;  w <- w + m``;
    without ``heavy_ball`` ``w <- w + Delta`` and ``m`` is only a direction.
    """
    w, m, path = run.w0, run.zeros(), []
    for active, p, lr in run.rounds():
        delta = run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                point = x - rho * n(m)
                if nesterov:
                    point = point + momentum_server * m
                x = sgd(x, run.clipped(run.grad(i, point)))
            delta = delta + p[i] * (x - w)
        m = momentum_server * m + delta
        w = w + (m if heavy_ball else delta)
        path.append(w)
    return result(path, {"m": m})


def fednsam_s(run: Run, rho: float, momentum_server: float) -> dict:
    """FedNSAM-S: ``d = grad(x + lambda m - rho n(m)) - c_i + c``.

    ``c_i+ = c_i - c + G_i;  c <- c + (1/M) sum_{N_t} (c_i+ - c_i)``;
    ``m <- lambda m + Delta;  w <- w + m``.
    """
    w, m, path = run.w0, run.zeros(), []
    c, ci = run.zeros(), [run.zeros() for _ in run.clients]
    for active, p, lr in run.rounds():
        delta, change = run.zeros(), run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                point = x + momentum_server * m - rho * n(m)
                x = sgd(x, run.clipped(run.grad(i, point)) - ci[i] + c)
            delta = delta + p[i] * (x - w)
            new = ci[i] - c + (w - x) / (run.K * lr)
            change = change + (new - ci[i])
            ci[i] = new
        c = c + change / run.M
        m = momentum_server * m + delta
        w = w + m
        path.append(w)
    return result(path, {"m": m, "c": c}, c=ci)


def fednsam_d(run: Run, rho: float, momentum_server: float, beta: float) -> dict:
    """FedNSAM-D: ``d = grad(x + lambda m - rho n(m)) - u_i + (x - w) / beta``.

    ``u_i <- u_i - Delta_i / beta;  u <- u - (1 / (beta M)) sum_{N_t} Delta_i``;
    ``m <- lambda m + (Delta - beta u);  w <- w + m``.
    """
    w, m, path = run.w0, run.zeros(), []
    u, ui = run.zeros(), [run.zeros() for _ in run.clients]
    for active, p, lr in run.rounds():
        delta, total = run.zeros(), run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                point = x + momentum_server * m - rho * n(m)
                x = sgd(x, run.clipped(run.grad(i, point)) - ui[i] + (x - w) / beta)
            delta = delta + p[i] * (x - w)
            total = total + (x - w)
            ui[i] = ui[i] - (x - w) / beta
        u = u - total / (beta * run.M)
        m = momentum_server * m + (delta - beta * u)
        w = w + m
        path.append(w)
    return result(path, {"m": m, "u": u}, u=ui)


def fedavg_nesterov(run: Run, momentum_server: float) -> dict:
    """FedAvg with Nesterov: ``d = grad(x + lambda m);  m <- lambda m + Delta;  w <- w + m``."""
    w, m, path = run.w0, run.zeros(), []
    for active, p, lr in run.rounds():
        delta = run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                x = sgd(x, run.clipped(run.grad(i, x + momentum_server * m)))
            delta = delta + p[i] * (x - w)
        m = momentum_server * m + delta
        w = w + m
        path.append(w)
    return result(path, {"m": m})


def fedsam_nesterov(run: Run, rho: float, momentum_server: float) -> dict:
    """FedSAM with Nesterov: ``y = x + lambda m;  d = grad(y + rho n(grad(y)))``.

    Server: ``m <- lambda m + Delta;  w <- w + m``.
    """
    w, m, path = run.w0, run.zeros(), []
    for active, p, lr in run.rounds():
        delta = run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                y = x + momentum_server * m
                x = sgd(x, run.clipped(run.grad(i, y + rho * n(run.grad(i, y)))))
            delta = delta + p[i] * (x - w)
        m = momentum_server * m + delta
        w = w + m
        path.append(w)
    return result(path, {"m": m})
