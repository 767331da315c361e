"""The methods of the papers, each a short list of mechanisms; defaults are the papers' values.

Where a paper has a server learning rate `η_g` it is `server_lr`.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import FedflatError
from .mechanism import Mechanism
from .mechanisms import (
    AdaptiveAscent,
    AdaptiveWeight,
    ControlVariates,
    DualCorrection,
    DynamicRegulariser,
    HistoryAscent,
    InterpolatedAscent,
    LocalAscent,
    LookAheadMomentum,
    MomentumAscent,
    MomentumBlend,
    NesterovMomentum,
    NotTrueDistillation,
    OwnTrajectoryLoss,
    PersonalBlend,
    Proximal,
    ServerMomentum,
    ServerStep,
    SharedPerturbation,
    TargetAscent,
    TrajectoryLoss,
)
from .method import Method

METHODS: dict[str, Callable[..., Method]] = {}
"""Every named method, in the order of the papers' tables."""


def _named(function: Callable[..., Method]) -> Callable[..., Method]:
    METHODS[function.__name__] = function
    return function


def _server_step(server_lr: float) -> list[Mechanism]:
    return [] if server_lr == 1.0 else [ServerStep(server_lr)]


# -- heterogeneity ---------------------------------------------------------------------------------


@_named
def fedavg(server_lr: float = 1.0) -> Method:
    """`w ← w + η_g Δ̄`."""
    return Method("FedAvg", _server_step(server_lr), "McMahan et al., AISTATS 2017")


@_named
def fedavgm(momentum: float = 0.9, server_lr: float = 1.0) -> Method:
    """Heavy-ball momentum at the server."""
    return Method("FedAvgM", [ServerMomentum(momentum), *_server_step(server_lr)], "Hsu et al., 2019")


@_named
def fedprox(mu: float = 0.1) -> Method:
    """A proximal term `μ/2 ‖w − w^t‖²`."""
    return Method("FedProx", [Proximal(mu)], "Li et al., MLSys 2020")


@_named
def scaffold(server_lr: float = 1.0) -> Method:
    """Control variates, option II."""
    return Method("SCAFFOLD", [ControlVariates(), *_server_step(server_lr)], "Karimireddy et al., ICML 2020")


@_named
def feddyn(beta: float = 10.0, prox: str = "square") -> Method:
    """Dynamic regularisation; β is 1/α of the FedDyn paper."""
    return Method("FedDyn", [DynamicRegulariser(beta, prox=prox)], "Acar et al., ICLR 2021")


@_named
def fedcm(alpha: float = 0.1, server_lr: float = 1.0) -> Method:
    """Every gradient blended with the last round's."""
    return Method("FedCM", [MomentumBlend(alpha), *_server_step(server_lr)], "Xu et al., 2021")


@_named
def fedacg(momentum: float = 0.85, mu: float = 0.002) -> Method:
    """Clients start at the look-ahead and are pulled to it by `μ/2 ‖w − a‖²`."""
    return Method("FedACG", [LookAheadMomentum(momentum), Proximal(mu)], "Kim et al., CVPR 2024")


@_named
def fedntd(gamma: float = 1.0, tau: float = 1.0) -> Method:
    """Not-true distillation from the received model."""
    return Method("FedNTD", [NotTrueDistillation(gamma, tau)], "Lee et al., NeurIPS 2022")


# -- sharpness of the local loss -------------------------------------------------------------------


@_named
def fedsam(rho: float = 0.05) -> Method:
    """SAM at every client."""
    return Method("FedSAM", [LocalAscent(rho)], "Qu et al., ICML 2022")


@_named
def fedasam(rho: float = 0.7, eta: float = 0.2) -> Method:
    """Adaptive SAM at every client."""
    return Method("FedASAM", [AdaptiveAscent(rho, eta)], "Caldarola et al., ECCV 2022")


@_named
def mofedsam(rho: float = 0.1, alpha: float = 0.1, server_lr: float = 1.0) -> Method:
    """FedCM with the SAM gradient."""
    return Method(
        "MoFedSAM",
        [LocalAscent(rho), MomentumBlend(alpha), *_server_step(server_lr)],
        "Qu et al., ICML 2022",
    )


@_named
def fedgamma(rho: float = 0.01, server_lr: float = 1.0) -> Method:
    """SCAFFOLD with the SAM gradient."""
    return Method(
        "FedGAMMA",
        [LocalAscent(rho), ControlVariates(), *_server_step(server_lr)],
        "Dai et al., TNNLS 2023",
    )


@_named
def fedspeed(
    rho: float = 0.1,
    beta: float = 10.0,
    normalize: bool = True,
    mix: float = 1.0,
    dual_mean: str = "all",
    prox: str = "square",
) -> Method:
    """SAM with the dynamic regulariser; the paper's text has normalize=False, a mix and dual_mean="active"."""
    return Method(
        "FedSpeed",
        [LocalAscent(rho, normalize, mix), DynamicRegulariser(beta, dual_mean, prox)],
        "Sun et al., ICLR 2023",
    )


# -- sharpness of the global loss ------------------------------------------------------------------


@_named
def fedsmoo(rho: float = 0.1, beta: float | None = 10.0, prox: str = "square") -> Method:
    """A perturbation that all clients agree on; `beta=None` is without the dynamic regulariser."""
    regulariser = [] if beta is None else [DynamicRegulariser(beta, prox=prox)]
    return Method("FedSMOO", [SharedPerturbation(rho), *regulariser], "Sun et al., ICML 2023")


@_named
def fedlesam(rho: float = 0.05, direction: str = "history") -> Method:
    """Ascent towards the model received last time; direction="server" uses the server's last step."""
    return Method("FedLESAM", [HistoryAscent(rho, direction)], "Fan et al., ICML 2024")


@_named
def fedlesam_s(rho: float = 0.05, direction: str = "history", server_lr: float = 1.0) -> Method:
    """FedLESAM with SCAFFOLD's control variates."""
    return Method(
        "FedLESAM-S",
        [HistoryAscent(rho, direction), ControlVariates(), *_server_step(server_lr)],
        "Fan et al., ICML 2024",
    )


@_named
def fedlesam_d(
    rho: float = 0.05, beta: float = 10.0, direction: str = "history", prox: str = "square"
) -> Method:
    """FedLESAM with the dynamic regulariser."""
    return Method(
        "FedLESAM-D",
        [HistoryAscent(rho, direction), DynamicRegulariser(beta, prox=prox)],
        "Fan et al., ICML 2024",
    )


@_named
def fedgf(
    rho: float = 0.05,
    threshold: float = 0.2,
    window: int = 30,
    rho_global: float | None = None,
    c: float | None = None,
    server_lr: float = 1.0,
) -> Method:
    """Between the client's perturbed model and the global one; a given `c` is the static ablation."""
    return Method(
        "FedGF",
        [InterpolatedAscent(rho, threshold, window, rho_global, c), *_server_step(server_lr)],
        "Lee and Yoon, ICML 2024",
    )


@_named
def fedgmt(
    alpha: float = 0.95,
    beta: float | None = 10.0,
    gamma: float = 1.0,
    tau: float = 3.0,
    server_rule: str = "box",
) -> Method:
    """The global trajectory loss with duals; `beta=None` is without duals, `gamma=0` without the loss.

    `server_rule="active"` averages the duals of the active clients only (Eq. 13).
    """
    loss = [TrajectoryLoss(alpha, gamma, tau)] if gamma else []
    return Method("FedGMT", [*loss, *_duals(beta, server_rule)], "Li et al., ICML 2025")


@_named
def fedgmt_v2(
    alpha: float = 0.5,
    beta: float | None = 10.0,
    gamma: float = 1.0,
    tau: float = 3.0,
    first: str = "received",
    server_rule: str = "box",
) -> Method:
    """FedGMT whose clients keep the average model themselves, so that only the model travels."""
    loss = [OwnTrajectoryLoss(alpha, gamma, tau, first)] if gamma else []
    return Method("FedGMT-v2", [*loss, *_duals(beta, server_rule)], "Li et al., ICML 2025")


def _duals(beta: float | None, server_rule: str) -> list[Mechanism]:
    if beta is None:
        return []
    if server_rule not in ("box", "active"):
        raise FedflatError(f"fedgmt: server_rule must be 'box' or 'active', not {server_rule!r}.")
    return [DualCorrection(beta, "all" if server_rule == "box" else "active")]


@_named
def fedwmsam(
    rho: float = 0.01,
    alpha: float = 0.1,
    decay: float = 0.01,
    alpha_rule: str = "code",
    momentum: bool = True,
    sam: bool = True,
    weighted: bool = True,
    server_lr: float = 1.0,
) -> Method:
    """Personal momentum, momentum-guided SAM and an adaptive weight; the three switches are Table 5's.

    All three off is FedCM.
    """
    return Method(
        "FedWMSAM",
        [
            *([AdaptiveWeight(alpha, decay, alpha_rule)] if weighted else []),
            PersonalBlend(alpha) if momentum else MomentumBlend(alpha),
            *([TargetAscent(rho)] if sam else []),
            *_server_step(server_lr),
        ],
        "NeurIPS 2025",
    )


@_named
def fednsam(
    rho: float = 0.1, momentum: float = 0.85, nesterov: bool = True, heavy_ball: bool = True
) -> Method:
    """Nesterov's extrapolation and an ascent along the momentum, in one pass.

    `nesterov=False` is the ablation. With `heavy_ball=False` the momentum is only a direction and the server averages
    plainly.
    """
    server = NesterovMomentum(momentum, heavy_ball) if nesterov else ServerMomentum(momentum, heavy_ball)
    return Method("FedNSAM", [server, MomentumAscent(rho)], "Liu et al., MM 2025")


@_named
def fednsam_s(rho: float = 0.1, momentum: float = 0.85) -> Method:
    """FedNSAM with SCAFFOLD's control variates."""
    return Method(
        "FedNSAM-S",
        [ControlVariates(), NesterovMomentum(momentum), MomentumAscent(rho)],
        "Liu et al., MM 2025",
    )


@_named
def fednsam_d(rho: float = 0.1, momentum: float = 0.85, beta: float = 10.0) -> Method:
    """FedNSAM with the dynamic regulariser, which comes before the momentum."""
    return Method(
        "FedNSAM-D",
        [DynamicRegulariser(beta), NesterovMomentum(momentum), MomentumAscent(rho)],
        "Liu et al., MM 2025",
    )


@_named
def fedavg_nesterov(momentum: float = 0.85) -> Method:
    """FedAvg with Nesterov's extrapolation, an ablation of FedNSAM."""
    return Method("FedAvg+Nesterov", [NesterovMomentum(momentum)], "Liu et al., MM 2025")


@_named
def fedsam_nesterov(rho: float = 0.1, momentum: float = 0.85) -> Method:
    """FedSAM at the extrapolated point, an ablation of FedNSAM."""
    return Method("FedSAM+Nesterov", [NesterovMomentum(momentum), LocalAscent(rho)], "Liu et al., MM 2025")
