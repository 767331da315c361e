"""Methods that look for global flatness: FedGF, FedGMT, FedWMSAM."""

from __future__ import annotations

import numpy as np

from .common import Run, n, result
from .mlp import Array


def cosine(a: Array, b: Array) -> float | None:
    """Cosine of the angle between ``a`` and ``b``; None when either is (nearly) zero."""
    norm_a, norm_b = np.linalg.norm(a), np.linalg.norm(b)
    return float(a @ b / (norm_a * norm_b)) if min(norm_a, norm_b) > 1e-12 else None


def fedgf(
    run: Run,
    rho: float,
    threshold: float,
    window: int,
    rho_global: float | None = None,
    c: float | None = None,
    server_lr: float = 1.0,
) -> dict:
    """FedGF (Lee and Yoon, 2024): interpolate the local and the global perturbed model.

    Step: ``d = grad(c w~ + (1 - c) (x + rho n(grad(x))))``; while there is no ``w~`` (round 0)
    ``d = grad(x + rho n(grad(x)))``.

    Server after round r: ``D = mean_{N_r} |Delta_i|``; ``c`` = mean of the last W indicators
    ``1[D > T_D]`` unless given; ``w^{r+1} = w^r + eta_g Delta``;
    ``w~ = w^{r+1} + rho_g n(w^r - w^{r+1})``.
    """
    rho_global = rho if rho_global is None else rho_global
    w, path = run.w0, []
    w_tilde: Array | None = None
    indicators: list[float] = []
    coefficient = 0.0 if c is None else c
    for active, p, lr in run.rounds():
        delta, norms = run.zeros(), []
        for i in active:
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                point = x + rho * n(run.grad(i, x))
                if w_tilde is not None:
                    point = coefficient * w_tilde + (1 - coefficient) * point
                x = sgd(x, run.clipped(run.grad(i, point)))
            delta = delta + p[i] * (x - w)
            norms.append(np.linalg.norm(x - w))
        indicators = [*indicators, float(np.mean(norms) > threshold)][-window:]
        if c is None:
            coefficient = float(np.mean(indicators))
        before, w = w, w + server_lr * delta
        w_tilde = w + rho_global * n(before - w)
        path.append(w)
    return result(path, {"w_tilde": w_tilde, "c": coefficient, "window": indicators})


def fedgmt(
    run: Run,
    alpha: float,
    beta: float | None,
    gamma: float,
    tau: float,
    server_rule: str = "box",
) -> dict:
    """FedGMT (ICML 2025): distil from the average ``e`` of the global trajectory.

    Step: ``d = grad[CE + gamma tau^2 KL(softmax(f(e)/tau) || softmax(f(x)/tau))] - u_i``.
    End: ``u_i+ = u_i - Delta_i / beta``.

    Server, "box" (the algorithm's box): ``u <- u - (1 / (beta M)) sum Delta_i;
    w <- w + Delta - beta u``; "active" (Eq. 13): ``w <- w + sum_i p_i (Delta_i - beta u_i+)``;
    with ``beta=None`` no duals: ``w <- w + Delta``. Then ``e <- alpha e + (1 - alpha) w``.
    """
    if server_rule not in ("box", "active"):
        raise ValueError(f"unknown server_rule {server_rule!r}")
    w, e, path = run.w0, run.w0, []
    u, ui = run.zeros(), [run.zeros() for _ in run.clients]
    for active, p, lr in run.rounds():
        delta, corrected, total = run.zeros(), run.zeros(), run.zeros()
        for i in active:
            X, y = run.clients[i]
            teacher = run.logits(i, e)
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                x = sgd(x, run.clipped(run.mlp.kd_grad(x, X, y, teacher, gamma, tau)) - ui[i])
            delta = delta + p[i] * (x - w)
            total = total + (x - w)
            if beta is not None:
                ui[i] = ui[i] - (x - w) / beta
                corrected = corrected + p[i] * (x - w - beta * ui[i])
        if beta is None:
            w = w + delta
        elif server_rule == "box":
            u = u - total / (beta * run.M)
            w = w + delta - beta * u
        else:
            w = w + corrected
        e = alpha * e + (1 - alpha) * w
        path.append(w)
    if beta is None:
        return result(path, {"e": e})
    return result(path, {"e": e, "u": u} if server_rule == "box" else {"e": e}, u=ui)


def fedgmt_v2(
    run: Run, alpha: float, beta: float | None, gamma: float, tau: float, first: str = "received"
) -> dict:
    """FedGMT-v2 (ICML 2025): FedGMT with the averages ``e_i`` kept by the clients.

    On receipt of ``w``: ``e_i <- alpha e_i + (1 - alpha) w``, where at the first participation
    "received" sets ``e_i = w`` instead and "initial" averages with ``e_i = w^0``.
    Step, duals and server (box form, no ``e``) as FedGMT.
    """
    if first not in ("received", "initial"):
        raise ValueError(f"unknown first {first!r}")
    w, path = run.w0, []
    e = [None if first == "received" else run.w0] * run.M
    u, ui = run.zeros(), [run.zeros() for _ in run.clients]
    for active, p, lr in run.rounds():
        delta, total = run.zeros(), run.zeros()
        for i in active:
            X, y = run.clients[i]
            old = e[i]
            new = w if old is None else alpha * old + (1 - alpha) * w
            e[i], teacher = new, run.logits(i, new)
            x, sgd = w, run.sgd(lr)
            for _ in range(run.K):
                x = sgd(x, run.clipped(run.mlp.kd_grad(x, X, y, teacher, gamma, tau)) - ui[i])
            delta = delta + p[i] * (x - w)
            total = total + (x - w)
            if beta is not None:
                ui[i] = ui[i] - (x - w) / beta
        w = w + delta
        if beta is not None:
            u = u - total / (beta * run.M)
            w = w - beta * u
        path.append(w)
    if beta is None:
        return result(path, {}, e=e)
    return result(path, {"u": u}, u=ui, e=e)


def fedwmsam(
    run: Run,
    rho: float,
    alpha: float,
    decay: float,
    alpha_rule: str = "code",
    momentum_correctors: bool = True,
    sam: bool = True,
    weighted: bool = True,
    server_lr: float = 1.0,
) -> dict:
    """FedWMSAM (NeurIPS 2025, Algorithm 1); ``alpha`` is the first round's.

    Personal momentum (Eq. 1): ``g_k = g + (alpha / (1 - alpha)) (c - c_k)``. Step b = 0, 1, ...:
    ``q = grad(x + rho n(w + b g_k - x))``, ``d = alpha q + (1 - alpha) g_k`` (Eq. 2).

    Server: ``c_k+ = c_k - c + G_k``, ``c <- c + (1/M) sum_{N_t} (c_k+ - c_k)`` (Eq. 5), ``g <- G``,
    ``w <- w + eta_g Delta``, ``alpha <- (1 - decay) alpha + decay clip(alpha_hat, 0.1, 0.9)``
    (Eq. 4). ``alpha_hat`` (Eq. 3), with ``g`` the momentum broadcast this round: "code"
    ``mean_{N_t} (1 + cos(Delta_k, g))``, "paper" ``mean_{N_t} cos(g, g_k)``,
    "gradient" ``mean_{N_t} cos(G_k, g)``; terms with a zero vector count 0.
    """
    if alpha_rule not in ("code", "paper", "gradient"):
        raise ValueError(f"unknown alpha_rule {alpha_rule!r}")
    w, g, path = run.w0, run.zeros(), []
    c, ck = run.zeros(), [run.zeros() for _ in run.clients]
    for active, p, lr in run.rounds():
        delta, change, terms = run.zeros(), run.zeros(), []
        for k in active:
            gk = g + alpha / (1 - alpha) * (c - ck[k]) if momentum_correctors else g
            x, sgd = w, run.sgd(lr)
            for b in range(run.K):
                ahead = (w + b * gk) - x
                q = run.clipped(run.grad(k, x + rho * n(ahead) if sam else x))
                x = sgd(x, alpha * q + (1 - alpha) * gk)
            delta = delta + p[k] * (x - w)
            if alpha_rule == "code":
                cos = cosine(x - w, g)
                terms.append(0.0 if cos is None else 1.0 + cos)
            elif alpha_rule == "gradient":
                cos = cosine(w - x, g)
                terms.append(0.0 if cos is None else cos)
            else:
                cos = cosine(g, gk)
                terms.append(0.0 if cos is None else cos)
            if momentum_correctors:
                new = ck[k] - c + (w - x) / (run.K * lr)
                change = change + (new - ck[k])
                ck[k] = new
        c = c + change / run.M
        g = -delta / (run.K * lr)
        w = w + server_lr * delta
        if weighted:
            alpha = (1 - decay) * alpha + decay * float(np.clip(np.mean(terms), 0.1, 0.9))
        path.append(w)
    server = {"g": g, "alpha": alpha}
    if not momentum_correctors:
        return result(path, server)
    return result(path, {**server, "c": c}, c=ck)
