"""Blending every local gradient with the last round's global one: FedCM, and FedWMSAM's personal form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.flat import cosine, inverse_norm
from ...core.parameters import choice, number
from ..mechanism import Contract, Correction, Mechanism

if TYPE_CHECKING:
    from ...client.local import Local
    from ...client.step import Step
    from ...core.messages import Upload
    from ...server.server import Server


class MomentumBlend(Mechanism):
    """`d ← α d + (1−α) g`, and `g ← Ḡ` after the round: FedCM (Xu et al. 2021).

    `g` is the mean pseudo-gradient `Ḡ = Σ p_i G_i` of the round before, 0 in the first. α may be steered
    from round to round by an adaptive weight.
    """

    alpha: float = number(default=0.1, above=0, at_most=1)

    def contract(self) -> Contract:
        """`g` travels down."""
        return Contract(down=("gradient",), mean_gradient=True, stage={"direction": "blend"})

    def server_state(self, w: Tensor) -> Mapping[str, Tensor]:
        """`g = 0`, gradient-signed."""
        return {"gradient": torch.zeros_like(w)}

    def correction(self, local: Local) -> Correction:
        """Blend."""
        alpha = local.received.get("alpha", self.alpha)
        return Correction(scale=alpha, vectors=((local.received["gradient"], 1.0 - alpha),))

    def receive(self, server: Server, upload: Upload) -> None:
        """Sum the weighted pseudo-gradients."""
        scale = -1.0 / server.rate_sum(upload)
        server.add("gradient", upload.update, server.weight(upload) * scale)

    def finish(self, server: Server) -> None:
        """`g ← Ḡ`."""
        torch.div(server.total("gradient"), server.total_weight, out=server.vector("gradient"))


class PersonalBlend(MomentumBlend):
    """The blend with a momentum of the client's own, `g_k = g + α/(1−α) (c − c_k)`.

    FedWMSAM (NeurIPS 2025), Eqs. 1, 2 and 5: `c_k⁺ = c_k − c + G_k`, `c ← c + (1/M) Σ (c_k⁺ − c_k)`.
    The correctors c_k live at the server, so the client keeps nothing.
    """

    alpha: float = number(default=0.1, above=0, below=1)

    def contract(self) -> Contract:
        """`g_k` travels down."""
        return Contract(
            each=("gradient",),
            server_per_client=("corrector",),
            mean_gradient=True,
            stage={"direction": "blend"},
        )

    def server_state(self, w: Tensor) -> Mapping[str, Tensor]:
        """`g = 0`, `c = 0`."""
        return {**super().server_state(w), "corrector": torch.zeros_like(w)}

    def send(self, server: Server, client: int) -> Mapping[str, Tensor]:
        """Eq. 1."""
        alpha = server.scalar("alpha", self.alpha)
        corrector, own = server.vector("corrector"), server.of(client).get("corrector")
        lacking = corrector if own is None else corrector - own
        return {"gradient": torch.add(server.vector("gradient"), lacking, alpha=alpha / (1.0 - alpha))}

    def receive(self, server: Server, upload: Upload) -> None:
        """Eq. 5, with the c that was used this round."""
        super().receive(server, upload)
        # c − G_k, since the pseudo-gradient is the update turned round and divided
        excess = torch.add(server.vector("corrector"), upload.update, alpha=1.0 / server.rate_sum(upload))
        server.add("corrector", excess, -1.0)
        old = server.of(upload.client).get("corrector")
        new = excess.neg_() if old is None else torch.sub(old, excess, out=excess)
        server.keep(upload.client, "corrector", new)

    def finish(self, server: Server) -> None:
        """Clients that did not take part count with a change of zero."""
        super().finish(server)
        server.vector("corrector").add_(server.total("corrector"), alpha=1.0 / server.clients)


class TargetAscent(Mechanism):
    """`δ_b = ρ n(x_r + b g_k − x_b)`: towards where the momentum would have led uphill, no extra pass.

    FedWMSAM (NeurIPS 2025), Algorithm 1 lines 14 and 15; b counts local steps from 0.
    """

    rho: float = number(default=0.01, at_least=0)

    def contract(self) -> Contract:
        """Uses the momentum that the blend sends."""
        return Contract(reads=("gradient",))

    def shift(self, step: Step) -> None:
        """Move towards the target; at b = 0 there is no direction yet."""
        if step.index == 0:
            return
        local = step.local
        target = local.scratch("target")
        torch.add(local.start, local.received["gradient"], alpha=step.index, out=target).sub_(step.w)
        step.move(target, self.rho * inverse_norm(target))


class AdaptiveWeight(Mechanism):
    """`α ← (1−λ) α + λ clip(α̂, 0.1, 0.9)` after every round: FedWMSAM (NeurIPS 2025), Eqs. 3 and 4.

    `rule="code"`: α̂ is the mean of `1 − cos(G_k, g)`, so α grows where clients disagree with the momentum;
    `rule="paper"`: the mean of `cos(g, g_k)`; `rule="gradient"`: that of `cos(G_k, g)`. A term is 0 where a vector is
    zero, as in round 0.
    """

    alpha: float = number(default=0.1, above=0, below=1)
    decay: float = number(default=0.01, at_least=0, at_most=1)
    rule: str = choice("code", "paper", "gradient", default="code")

    def contract(self) -> Contract:
        """The scalar α travels down."""
        return Contract(down=("alpha",), reads=("gradient",))

    def server_state(self, w: Tensor) -> Mapping[str, float]:
        """`α_0`, and what α̂ comes from, there to be looked at: the mean cosine, and the mean of one minus it."""
        return {"alpha": self.alpha, "cosine": 0.0, "one-minus-cosine": 0.0}

    def receive(self, server: Server, upload: Upload) -> None:
        """One client's agreement with the momentum of this round."""
        momentum = server.vector("gradient")
        if self.rule == "paper":
            personal = server.download(upload.client).values["gradient"]
            assert isinstance(personal, Tensor)
            agreement = cosine(momentum, personal)
        else:
            against = cosine(upload.update, momentum)  # the pseudo-gradient is the update turned round
            agreement = None if against is None else -against
        term = agreement or 0.0
        if self.rule == "code" and agreement is not None:
            term = 1.0 - agreement
        server.count("alpha", term)
        server.count("cosine", agreement or 0.0)
        server.count("one-minus-cosine", 0.0 if agreement is None else 1.0 - agreement)

    def combine(self, server: Server, update: Tensor) -> Tensor:
        """Eq. 4."""
        estimate = min(max(server.counted("alpha") / server.accepted, 0.1), 0.9)
        alpha = server.scalar("alpha")
        server["alpha"] = (1.0 - self.decay) * alpha + self.decay * estimate
        for name in ("cosine", "one-minus-cosine"):
            server[name] = server.counted(name) / server.accepted
        return update
