"""Sharpness-aware baselines: FedSAM to FedLESAM and its variants."""

from __future__ import annotations

import numpy as np

from .common import Run, n, pull, result
from .mlp import Array


def fedsam(run: Run, rho: float) -> dict:
    """FedSAM (Qu et al., 2022; Caldarola et al., 2022): ``d = grad(x + rho n(grad(x)))``."""
    w, path = run.w0, []
    for active, p, lr in run.rounds():
        delta = run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                x = sgd(x, run.clipped(run.grad(i, x + rho * n(run.grad(i, x)))))
            delta = delta + p[i] * (x - w)
        w = w + delta
        path.append(w)
    return result(path)


def fedasam(run: Run, rho: float, eta: float) -> dict:
    """FedASAM (Caldarola et al., 2022): ``d = grad(x + rho T^2 g / |T g|)``, ``g = grad(x)``.

    ``T = |x| + eta`` on weights and 1 on biases.
    """
    w, path = run.w0, []
    is_weight = run.mlp.weight_mask()
    for active, p, lr in run.rounds():
        delta = run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                T = np.where(is_weight, np.abs(x) + eta, 1.0)
                x = sgd(x, run.clipped(run.grad(i, x + rho * T * n(T * run.grad(i, x)))))
            delta = delta + p[i] * (x - w)
        w = w + delta
        path.append(w)
    return result(path)


def mofedsam(run: Run, rho: float, alpha: float, server_lr: float = 1.0) -> dict:
    """MoFedSAM (Qu et al., 2022).

    ``d = alpha grad(x + rho n(grad(x))) + (1 - alpha) g;  g <- G``.
    """
    w, g, path = run.w0, run.zeros(), []
    for active, p, lr in run.rounds():
        delta = run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                sam = run.clipped(run.grad(i, x + rho * n(run.grad(i, x))))
                x = sgd(x, alpha * sam + (1 - alpha) * g)
            delta = delta + p[i] * (x - w)
        g = -delta / (run.K * lr)
        w = w + server_lr * delta
        path.append(w)
    return result(path, {"g": g})


def fedgamma(run: Run, rho: float, server_lr: float = 1.0) -> dict:
    """FedGAMMA (Dai et al., 2023): ``d = grad(x + rho n(grad(x))) - c_i + c``.

    Control variates: ``c_i+ = c_i - c + G_i;  c <- c + (1/M) sum_{N_t} (c_i+ - c_i)``.
    """
    w, path = run.w0, []
    c, ci = run.zeros(), [run.zeros() for _ in run.clients]
    for active, p, lr in run.rounds():
        delta, change = run.zeros(), run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                sam = run.clipped(run.grad(i, x + rho * n(run.grad(i, x))))
                x = sgd(x, sam - ci[i] + c)
            delta = delta + p[i] * (x - w)
            new = ci[i] - c + (w - x) / (run.K * lr)
            change = change + (new - ci[i])
            ci[i] = new
        c = c + change / run.M
        w = w + server_lr * delta
        path.append(w)
    return result(path, {"c": c}, c=ci)


def fedspeed(
    run: Run,
    rho: float,
    beta: float,
    normalize: bool = True,
    mix: float = 1.0,
    dual_mean: str = "all",
    prox: str = "square",
) -> dict:
    """FedSpeed (Sun et al., 2023).

    ``g1 = grad(x);  g2 = grad(x + rho n(g1))``, or ``grad(x + rho g1)`` without ``normalize``;
    ``d = (1 - mix) g1 + mix g2 - u_i + (x - w) / beta;  u_i+ = u_i - Delta_i / beta``.

    Server, "all": ``u <- u - (1 / (beta M)) sum Delta_i;  w <- w + Delta - beta u``;
    "active": ``w <- w + sum_i p_i (Delta_i - beta u_i+)``, and there is no ``u``.
    """
    if dual_mean not in ("all", "active"):
        raise ValueError(f"unknown dual_mean {dual_mean!r}")
    w, path = run.w0, []
    u, ui = run.zeros(), [run.zeros() for _ in run.clients]
    for active, p, lr in run.rounds():
        delta, corrected, total = run.zeros(), run.zeros(), run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                g1 = run.grad(i, x)
                g2 = run.clipped(run.grad(i, x + rho * (n(g1) if normalize else g1)))
                x = sgd(x, (1 - mix) * g1 + mix * g2 - ui[i] + pull(x, w, beta, prox))
            ui[i] = ui[i] - (x - w) / beta
            delta = delta + p[i] * (x - w)
            corrected = corrected + p[i] * (x - w - beta * ui[i])
            total = total + (x - w)
        if dual_mean == "all":
            u = u - total / (beta * run.M)
            w = w + delta - beta * u
        else:
            w = w + corrected
        path.append(w)
    return result(path, {"u": u} if dual_mean == "all" else {}, u=ui)


def fedsmoo(run: Run, rho: float, beta: float | None, prox: str = "square") -> dict:
    """FedSMOO (Sun et al., 2023); ``beta=None`` drops the dynamic regulariser.

    Step: ``g = grad(x);  s_hat = rho n(g - mu_i - s);  mu_i <- mu_i + s_hat - s``;
    ``d = grad(x + s_hat) - u_i + (x - w) / beta``.

    End: ``s_i = mu_i - s_hat`` of the last step, ``u_i <- u_i - Delta_i / beta``. Server:
    ``s <- rho n(mean_{N_t} s_i);  u <- u - (1 / (beta M)) sum Delta_i;  w <- w + Delta - beta u``.
    """
    w, path = run.w0, []
    s, mu = run.zeros(), [run.zeros() for _ in run.clients]
    u, ui = run.zeros(), [run.zeros() for _ in run.clients]
    for active, p, lr in run.rounds():
        delta, total, s_sum = run.zeros(), run.zeros(), run.zeros()
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                s_hat = rho * n(run.grad(i, x) - mu[i] - s)
                mu[i] = mu[i] + s_hat - s
                d = run.clipped(run.grad(i, x + s_hat))
                if beta is not None:
                    d = d - ui[i] + pull(x, w, beta, prox)
                x = sgd(x, d)
            s_sum = s_sum + (mu[i] - s_hat)
            delta = delta + p[i] * (x - w)
            total = total + (x - w)
            if beta is not None:
                ui[i] = ui[i] - (x - w) / beta
        s = rho * n(s_sum / len(active))
        w = w + delta
        if beta is not None:
            u = u - total / (beta * run.M)
            w = w - beta * u
        path.append(w)
    if beta is None:
        return result(path, {"s": s}, mu=mu)
    return result(path, {"s": s, "u": u}, mu=mu, u=ui)


def fedlesam(run: Run, rho: float, direction: str = "history") -> dict:
    """FedLESAM (Fan et al., 2024): ``d = grad(x + delta)``, ``delta`` constant over the round.

    "history": ``delta = rho n(w_i_old - w)``, ``w_i_old`` the model received at the client's
    previous participation (``delta = 0`` at the first); "server": ``delta = rho n(w^{t-1} - w^t)``
    (0 in round 0).
    """
    if direction not in ("history", "server"):
        raise ValueError(f"unknown direction {direction!r}")
    w, path = run.w0, []
    old: list[Array | None] = [None] * run.M
    previous = run.w0
    for active, p, lr in run.rounds():
        delta = run.zeros()
        for i in active:
            if direction == "server":
                shift = rho * n(previous - w)
            else:
                shift = rho * n(old[i] - w) if old[i] is not None else run.zeros()
                old[i] = w
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                x = sgd(x, run.clipped(run.grad(i, x + shift)))
            delta = delta + p[i] * (x - w)
        previous = w
        w = w + delta
        path.append(w)
    if direction == "server":
        return result(path, {"w_previous": previous})
    return result(path, {}, w_old=old)


def fedlesam_s(run: Run, rho: float) -> dict:
    """FedLESAM-S (Fan et al., 2024): ``d = grad(x + rho n(w_i_old - w)) - c_i + c``.

    Control variates: ``c_i+ = c_i - c + G_i;  c <- c + (1/M) sum_{N_t} (c_i+ - c_i)``.
    """
    w, path = run.w0, []
    old: list[Array | None] = [None] * run.M
    c, ci = run.zeros(), [run.zeros() for _ in run.clients]
    for active, p, lr in run.rounds():
        delta, change = run.zeros(), run.zeros()
        for i in active:
            shift = rho * n(old[i] - w) if old[i] is not None else run.zeros()
            old[i] = w
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                x = sgd(x, run.clipped(run.grad(i, x + shift)) - ci[i] + c)
            delta = delta + p[i] * (x - w)
            new = ci[i] - c + (w - x) / (run.K * lr)
            change = change + (new - ci[i])
            ci[i] = new
        c = c + change / run.M
        w = w + delta
        path.append(w)
    return result(path, {"c": c}, w_old=old, c=ci)


def fedlesam_d(run: Run, rho: float, beta: float, prox: str = "square") -> dict:
    """FedLESAM-D (Fan et al., 2024): ``d = grad(x + rho n(w_i_old - w)) - u_i + (x - w) / beta``.

    Duals: ``u_i <- u_i - Delta_i / beta;  u <- u - (1 / (beta M)) sum_{N_t} Delta_i``;
    ``w <- w + Delta - beta u``.
    """
    w, path = run.w0, []
    old: list[Array | None] = [None] * run.M
    u, ui = run.zeros(), [run.zeros() for _ in run.clients]
    for active, p, lr in run.rounds():
        delta, total = run.zeros(), run.zeros()
        for i in active:
            shift = rho * n(old[i] - w) if old[i] is not None else run.zeros()
            old[i] = w
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                x = sgd(x, run.clipped(run.grad(i, x + shift)) - ui[i] + pull(x, w, beta, prox))
            delta = delta + p[i] * (x - w)
            total = total + (x - w)
            ui[i] = ui[i] - (x - w) / beta
        u = u - total / (beta * run.M)
        w = w + delta - beta * u
        path.append(w)
    return result(path, {"u": u}, w_old=old, u=ui)
