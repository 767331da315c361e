"""Losses that keep a client close to what a frozen teacher predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.parameters import choice, number
from ...core.pull import Pull
from ...core.tasks import MULTI_LABEL, REGRESSION, is_single
from ...errors import FedflatError
from ..mechanism import Contract, Mechanism

if TYPE_CHECKING:
    from ...client.local import Local
    from ...client.step import Step
    from ...server.server import Server


class Distilling:
    """A loss term that keeps a client close to a teacher: `γ τ² KL( softmax(z_teacher/τ) ‖ softmax(z/τ) )`.

    A single output is the logit of class 1, and its softmax that of the pair (0, z): the divergence of two Bernoulli
    distributions with the probabilities `sigmoid(z/τ)`. No paper says what follows; it is ours. Of several labels
    each is a single logit, and the term the mean over them. Of numbers the term is `γ (z − z_teacher)²`, the mean
    over outputs, without a temperature.
    """

    gamma: float
    tau: float

    def towards(self, teacher: Tensor, step: Step, outputs: Tensor) -> Pull:
        """Pull towards what the model with the teacher's weights predicts on the step's batch."""
        task, outputs = step.task(outputs), outputs.detach()
        if task == REGRESSION:
            away = outputs - step.teacher(teacher)
            return Pull(away, 2 * self.gamma / away.numel())
        if task == MULTI_LABEL:
            return self.pull_each(step.teacher(teacher, self.soften_each), outputs)
        return self.pull(step.teacher(teacher, self.soften), outputs)

    def soften(self, logits: Tensor) -> Tensor:
        """`softmax(z/τ)`; of a single logit the probability of class 1."""
        if is_single(logits):
            return self.soften_each(logits)
        return F.softmax(logits / self.tau, dim=-1)

    def soften_each(self, logits: Tensor) -> Tensor:
        """`sigmoid(z/τ)`."""
        return torch.sigmoid(logits / self.tau)

    def distil(self, taught: Tensor, logits: Tensor) -> Tensor:
        """`γ τ² KL( taught ‖ softmax(z/τ) )`, the mean over the batch, up to the entropy of what is taught.

        The entropy is a constant, whose gradient is 0: what is left is a cross-entropy, and as a product of two
        vectors it takes the fewest operations.
        """
        if is_single(logits):
            cross_entropy = F.binary_cross_entropy_with_logits(logits * (1.0 / self.tau), taught)
            return cross_entropy * (self.gamma * self.tau**2)
        log_probabilities = F.log_softmax(logits * (1.0 / self.tau), dim=-1)
        rows = logits.numel() // logits.shape[-1]
        weighed = taught * (-self.gamma * self.tau**2 / rows)
        return torch.dot(weighed.reshape(-1), log_probabilities.reshape(-1))

    def pull(self, taught: Tensor, logits: Tensor) -> Pull:
        """`γ τ ( softmax(z/τ) − taught )`, a mean over the batch: the gradient of `distil` for the logits."""
        if is_single(logits):
            return self.pull_each(taught, logits)
        rows = logits.numel() // logits.shape[-1]
        return Pull(torch.softmax(logits * (1.0 / self.tau), -1).sub_(taught), self.gamma * self.tau / rows)

    def pull_each(self, taught: Tensor, logits: Tensor) -> Pull:
        """`γ τ ( sigmoid(z/τ) − taught )`, a mean over all logits."""
        away = torch.sigmoid(logits * (1.0 / self.tau)).sub_(taught)
        return Pull(away, self.gamma * self.tau / logits.numel())


class TrajectoryLoss(Distilling, Mechanism):
    """`ℓ ← ℓ + γ τ² KL( f(e) ‖ f(w) )` with the average of past global models, `e ← αe + (1−α)w^{t+1}`.

    FedGMT (Li et al. 2025), Eq. 9 and Algorithm 1 line 18; the factor τ² is the released code's.
    """

    alpha: float = number(default=0.95, at_least=0, at_most=1)
    gamma: float = number(default=1.0, at_least=0)
    tau: float = number(default=3.0, above=0)

    def contract(self) -> Contract:
        """`e` travels down; one more forward pass."""
        return Contract(down=("ema",), forward=1)

    def server_state(self, w: Tensor) -> Mapping[str, Tensor]:
        """`e = w⁰`."""
        return {"ema": w.clone()}

    def loss(self, step: Step, outputs: Tensor) -> Pull:
        """Pull towards the average model's predictions on the step's batch."""
        return self.towards(step.local.received["ema"], step, outputs)

    def finish(self, server: Server) -> None:
        """The moving average takes in the new model."""
        server.vector("ema").lerp_(server.w, 1.0 - self.alpha)


class OwnTrajectoryLoss(Distilling, Mechanism):
    """The trajectory loss with an average that the client keeps itself, `e_i ← αe_i + (1−α)w^t` on receipt.

    FedGMT-v2 (Li et al. 2025), Algorithm 1 line 7. The first time `e_i = w^t`, or, with `first="initial"`, e_i
    starts as w⁰, which the server then has to send.
    """

    alpha: float = number(default=0.5, at_least=0, at_most=1)
    gamma: float = number(default=1.0, at_least=0)
    tau: float = number(default=3.0, above=0)
    first: str = choice("received", "initial", default="received")

    def contract(self) -> Contract:
        """e_i kept by the client; one more forward pass."""
        down = ("initial",) if self.first == "initial" else ()
        return Contract(client=("ema",), down=down, forward=1)

    def server_state(self, w: Tensor) -> Mapping[str, Tensor]:
        """w⁰, if clients need it."""
        return {"initial": w.clone()} if self.first == "initial" else {}

    def begin(self, local: Local) -> None:
        """The moving average takes in the model just received."""
        old = local.state.get("ema")
        if old is None:
            old = local.received["initial"] if self.first == "initial" else local.start
        local.state["ema"] = torch.lerp(old, local.start, 1.0 - self.alpha)

    def loss(self, step: Step, outputs: Tensor) -> Pull:
        """Pull towards the predictions of the client's average model on the step's batch."""
        return self.towards(step.local.state["ema"], step, outputs)


class NotTrueDistillation(Distilling, Mechanism):
    """`ℓ ← ℓ + γ τ² KL( f̃(w^t) ‖ f̃(w) )` on the logits without the true class: FedNTD (Lee et al. 2022).

    The teacher is the model the client received.
    """

    gamma: float = number(default=1.0, at_least=0)
    tau: float = number(default=1.0, above=0)

    def contract(self) -> Contract:
        """One more forward pass."""
        return Contract(forward=1)

    def check_task(self, task: str, outputs: Tensor) -> None:
        """There must be one true class, and at least two others."""
        if task in (MULTI_LABEL, REGRESSION):
            raise FedflatError(
                f"{self.name} compares predictions of the classes that are not the true one, and {task} has no true "
                "class: use fedgmt, which distils all outputs."
            )
        if is_single(outputs) or outputs.shape[-1] == 2:
            raise FedflatError(
                f"{self.name} compares predictions of the classes that are not the true one. With two classes there "
                "is one of those, whose probability is always 1, and nothing to compare: use fedavg, which is what "
                "is left, or fedgmt, which distils both classes."
            )

    def loss(self, step: Step, outputs: Tensor) -> Tensor:
        """Preserve the global view of the other classes."""
        if step.index == 0:
            self.check_task(step.task(outputs), outputs)
        teacher = step.teacher(step.local.start)
        others = without_true_class(outputs, step.targets)
        return self.distil(self.soften(without_true_class(teacher, step.targets)), others)


def without_true_class(logits: Tensor, targets: Tensor) -> Tensor:
    """The C−1 logits of the other classes."""
    classes = torch.arange(logits.shape[-1], device=logits.device)
    others = classes != targets.unsqueeze(-1)
    return logits[others].view(*targets.shape, -1)
