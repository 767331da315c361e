"""A client's round: begin, local steps, end.

x = start
for every batch:
    the point is x plus every mechanism's shift      (or x is where the point is, if that is alike in every step)
    d is the gradient of (loss + every mechanism's term) at the point
    every mechanism corrects d
    x takes an SGD step along d       (clipping, then weight decay at x, then momentum)
upload x - start
"""

from __future__ import annotations

from functools import reduce
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.buffers import Unsent
from ..core.evaluation import LossFunction
from ..core.flat import FlatModel, Gradients, Pieces, all_dense
from ..core.messages import Download, Upload
from ..core.randomness import torch_seeded
from ..data.federation import Shard
from ..errors import FedflatError
from ..gradients.cross_entropy import CLASSES, CrossEntropy
from ..gradients.dense import Chain, altered, differentiate_loss
from ..methods.checks import Kept, Received, Untouched, in_place, named, one_move, one_number, one_per_output
from ..methods.mechanism import Correction, Mechanism, Move, knows_loss_gradient, overrides
from ..methods.method import Method
from .batches import batches
from .drift import Drift
from .optimisers import LocalSGD, clip_, drifting_sgd_, sgd_
from .step import Local, Step
from .teachers import FrozenModels, Passes

Loss = Tensor | tuple[CrossEntropy, Tensor]
"""Of a batch: a number, or what a cross-entropy can make it of."""


class ClientRound:
    """Runs clients' rounds one after the other on one model, whose buffers are reused."""

    def __init__(
        self,
        model: FlatModel,
        method: Method,
        sgd: LocalSGD,
        loss: LossFunction,
        seed: int,
        buffers: str = "average",
        measured: bool = False,
    ) -> None:
        self.model, self.method, self.sgd, self.loss, self.seed = model, method, sgd, loss, seed
        self.buffers = buffers
        self.measured = measured
        """whether uploads have the update as it was trained beside one that `end` changed"""
        self.kept = {name for contract in method.contracts for name in contract.client}
        """what contracts say that clients keep"""
        self.initial_buffers = model.read_buffers()
        self.unsent = Unsent(model.module)
        hooks = {
            hook: [m for m in method.mechanisms if overrides(m, hook)]
            for hook in ("begin", "shift", "steady_shift", "loss", "end", "leave")
        }
        self.begins, self.losses = hooks["begin"], hooks["loss"]
        self.shifts = [m for m in method.mechanisms if m in hooks["shift"] or m in hooks["steady_shift"]]
        self.ends, self.leaves = hooks["end"], hooks["leave"]
        self.pulls = [m for m in method.mechanisms if knows_loss_gradient(m)]
        self.losses = [m for m in self.losses if not knows_loss_gradient(m)]
        self.correctors = [
            m for m in method.mechanisms if overrides(m, "direction") or overrides(m, "correction")
        ]
        self.moves: list[tuple[Mechanism, Move | None]] = []
        """how the point is moved in every step of this round; None is by the hook `shift`"""
        self.carried: list[Move] = []
        """moves that the iterate itself has made, for the whole round"""
        self.corrections: list[tuple[Mechanism, Correction | None]] = []
        self.folded: Correction | None = None
        """all corrections of this round in one, where they are alike in every step"""
        self.drift = Drift(model)
        """its vectors, divided by its scale"""
        self._rooms: dict[str, tuple[Tensor, list[Tensor]]] = {}
        self._sized: object = None
        # Without shifts the iterate is the model's own vector; with them it is kept beside, and that vector is only
        # where points away from the iterate are: nothing is ever restored.
        self.away = model.vector
        self.w = torch.empty_like(self.away) if self.shifts else self.away
        self.direction, self.first = torch.empty_like(self.w), torch.empty_like(self.w)
        self.direction_views = model.split(self.direction)
        self.first_views = model.split(self.first)
        self.w_views = model.split(self.w)
        self.away_views = model.split(self.away)
        self.momentum = torch.empty_like(self.w) if sgd.momentum else None
        self.momentum_views = None if self.momentum is None else model.split(self.momentum)
        # a mechanism's loss might depend on weights otherwise than through the model's outputs
        self.possible_chain = None if self.losses else Chain.of(model)
        self.chain = self.possible_chain
        """what differentiates by hand in this round, if the model is such"""
        self.entropy: CrossEntropy | None = None
        if (
            self.possible_chain is not None
            and loss is F.cross_entropy
            and self.possible_chain.classes <= CLASSES
        ):
            self.entropy = CrossEntropy(self.possible_chain.classes, self.w)
        self.local = Local(model, self.w)
        self.local.seed = seed
        self.step = Step(self.local, self)
        self.passes = Passes()
        self.frozen = FrozenModels(model, self.passes, self._teacher, None)
        self._teaching: FlatModel | None = None
        self._loss_sum = torch.zeros((), dtype=model.vector.dtype, device=model.vector.device)

    def run(self, client: int, shard: Shard, download: Download, state: dict[str, Tensor]) -> Upload:
        """The whole round of one client."""
        try:
            return self._run(client, shard, download, state)
        except FedflatError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, ArithmeticError) as problem:
            reason = str(problem).strip().split("\n")[0]
            raise FedflatError(
                f"client {client}, round {download.round}: training failed in step {self.step.index} on inputs "
                f"of shape {tuple(self.step.inputs.shape)}: {reason}{_remedy(reason, self.step.inputs)}"
            ) from problem
        finally:
            self.step.let_go()
            self.model.stand_on(self.away, self.away_views)

    def _run(self, client: int, shard: Shard, download: Download, state: dict[str, Tensor]) -> Upload:
        local = self.local
        local.round, local.client, local.lr = download.round, client, download.lr
        local.samples, local.steps = len(shard), self.sgd.steps_for(len(shard))
        local.start, local.received, local.state = download.start, Received(download.values), Kept(state)
        local.memo.clear()
        kept_buffers = local.state.pop("buffers", None)
        read = Untouched(
            **download.values, **{f"local.state['{name}']": v for name, v in local.state.items()}
        )
        buffers = self._begin_buffers(download.buffers, kept_buffers)
        self.w.copy_(download.start)
        self.model.stand_on(self.w, self.w_views)
        self.passes = Passes()
        self.frozen = FrozenModels(self.model, self.passes, self._teacher, buffers)
        self._loss_sum.zero_()
        if self.entropy is not None:
            self.entropy.take_sum()  # of a round that failed

        self.model.module.train()
        with torch_seeded(self.seed, "model", download.round, client):
            for mechanism in self.begins:
                mechanism.begin(local)
            possible = self.possible_chain is not None and not altered(self.model)
            self.chain = self.frozen.chain = self.possible_chain if possible else None
            self._fold_corrections()
            self._find_moves()
            place, size = (local.round, client), self.sgd.batch_size
            entropy = self.entropy if self.chain is not None else None
            for index, (inputs, targets) in enumerate(
                batches(shard, size, local.steps, self.seed, place, self.frozen, entropy)
            ):
                self.step.next_batch(index, inputs, targets)
                self._take_step(first=index == 0)

        self.model.stand_on(self.w, self.w_views)
        local.update = self.w - (self.away if self.carried else download.start)
        if self.carried:
            torch.add(download.start, local.update, out=self.w)
        vectors: dict[str, Tensor] = {}
        # where a mechanism hides what leaves the client, nobody sees more than that
        trained = local.update.clone() if self.measured and self.ends and not self.leaves else None
        for mechanism in self.ends:
            vectors.update(named(mechanism, "end", mechanism.end(local)))
        if trained is not None and torch.equal(trained, local.update):
            trained = None
        read.check("what is received or kept is read by others too: make a new vector of it")
        self.unsent.check()
        buffers = self.model.read_buffers()
        if self.buffers == "local" and buffers is not None:
            local.state["buffers"] = buffers
        upload = Upload(
            client=client,
            round=download.round,
            samples=len(shard),
            steps=local.steps,
            update=local.update,
            vectors=vectors,
            buffers=buffers if self.buffers in ("average", "reset") else None,
            loss=self._take_losses() / local.steps,
            forward=self.passes.forward,
            backward=self.passes.backward,
            spared_forward=self.passes.spared_forward,
            spared_backward=self.passes.spared_backward,
            state=local.state,
            trained=trained,
        )
        for mechanism in self.leaves:
            in_place(mechanism, "leave", "change the upload in place", local, upload)
        self._hold_to_contracts(upload)
        return upload

    def _hold_to_contracts(self, upload: Upload) -> None:
        """What is kept and uploaded must be what contracts name, or it would be lost elsewhere without a word."""
        name = self.method.name
        for kept in set(upload.state) - self.kept - {"buffers"}:
            raise FedflatError(
                f"{name}: clients keep '{kept}', which no contract names. Write Contract(client=('{kept}',))."
            )
        for sent in set(upload.vectors) - set(self.method.up):
            raise FedflatError(
                f"{name}: clients upload '{sent}', which no contract names. Write Contract(up=('{sent}',))."
            )
        for promised in set(self.method.up) - set(upload.vectors):
            raise FedflatError(
                f"{name}: a contract names the upload '{promised}', but it is not among what `end` returns."
            )

    def room(self) -> tuple[Tensor, list[Tensor]]:
        """A vector to compute a move in, and its views; its content is undefined."""
        return self._new("room")

    def sizes(self, eta: float, stretched: tuple[bool, ...]) -> tuple[Tensor, list[Tensor]]:
        """A vector for |w| where parameters are stretched, and its views; it is 1 − η where they are not."""
        vector, views = self._new("sizes")
        if self._sized != (eta, stretched):  # what stays as it is is written once
            vector.fill_(1.0 - eta)
            self._sized = (eta, stretched)
        return vector, views

    def _new(self, name: str) -> tuple[Tensor, list[Tensor]]:
        """A vector under that name, the same one every time, and its views."""
        if name not in self._rooms:
            vector = torch.empty_like(self.w)
            self._rooms[name] = vector, self.model.split(vector)
        return self._rooms[name]

    def _take_losses(self) -> float:
        """The sum of the steps' losses."""
        total = self._loss_sum.item()
        return total if self.entropy is None else total + self.entropy.take_sum()

    def differentiate(self, step: Step) -> tuple[Gradients, Loss]:
        """The gradient of the loss and every mechanism's term, where the model stands, and the plain loss."""
        chain = self.chain_for(step)
        if chain is not None:
            loss = self.go_back(chain, step)
            return chain.gradients(), loss
        outputs = step.outputs()
        plain = total = self.loss(outputs, step.targets)
        for mechanism in self.losses:
            total = total + one_number(mechanism, mechanism.loss(step, outputs))
        pulls = [pull * scale for pull, scale in self._pulls(step, outputs.detach())] if self.pulls else []
        self.passes.make(1, 1)
        return self.model.gradients(
            total, outputs, sum(pulls[1:], pulls[0]) if pulls else None
        ), plain.detach()

    def differentiate_into(self, views: list[Tensor], step: Step) -> Loss:
        """The same gradient in views of a flat vector; the plain loss."""
        chain = self.chain_for(step)
        if chain is not None:
            loss = self.go_back(chain, step)
            chain.write(views)
            return loss
        gradients, loss = self.differentiate(step)
        self.model.write(gradients, views)
        return loss

    def chain_for(self, step: Step) -> Chain | None:
        """The same, if the batch is such too."""
        return self.chain if self.chain is not None and self.chain.takes(step.inputs) else None

    def go_back(self, chain: Chain, step: Step) -> Loss:
        """Forward and back through a chain, which then knows the gradient; the plain loss."""
        if self.pulls or self.folded is None:  # hooks that may look at the model come next
            step.stand()
        outputs = step.outputs_of(chain)
        loss: Loss
        if self.entropy is not None and step.has_own_targets and self.entropy.takes(outputs):
            logs, delta = self.entropy.differentiate(outputs)
            loss = (self.entropy, logs)
        else:
            loss, delta = differentiate_loss(self.loss, outputs, step.targets)
        for pull, scale in self._pulls(step, outputs):
            delta = torch.add(delta, pull.detach(), alpha=scale)
        chain.backward(delta)
        self.passes.make(1, 1)
        return loss

    def _count(self, loss: Loss) -> None:
        """Let a step's loss be part of what the client reports."""
        if isinstance(loss, Tensor):
            self._loss_sum += loss
        else:
            entropy, logs = loss
            entropy.count(logs)

    def _pulls(self, step: Step, outputs: Tensor) -> list[Move]:
        """The gradients for the outputs, of which autograd knows nothing, of terms that know them themselves."""
        return [one_per_output(m, m.loss_gradient(step, outputs), outputs) for m in self.pulls]

    def _take_step(self, first: bool) -> None:
        step, d, sgd = self.step, self.direction, self.sgd
        iterate = self.w._version
        for mechanism, move in self.moves:
            if move is not None:
                step.move(*move)
                continue
            in_place(mechanism, "shift", "move the point with step.move or step.climb", step)
            self._check_iterate(mechanism, "shift", iterate, "move the point with step.move or step.climb")
        if self.folded is not None:
            self._count(self._descend(step, self.folded))
            return
        if not self.corrections and sgd.clip_norm is None:
            self._count(self._descend_with_memory(step, first))
            return
        self._count(self.differentiate_into(self.direction_views, step))
        if sgd.clip_norm is not None and sgd.clip_stage == "gradient":
            clip_(d, sgd.clip_norm)
        for mechanism, correction in self.corrections:
            if correction is None:
                step.settle()  # somebody may look at the model itself
                in_place(mechanism, "direction", "change d in place, as d.mul_(0.5) does", step, d)
                self._check_iterate(
                    mechanism, "direction", iterate, "change d, which the iterate then follows"
                )
            else:
                correction.apply(d, self.w)
        if sgd.clip_norm is not None and sgd.clip_stage == "direction":
            clip_(d, sgd.clip_norm)
        momentum = None if self.momentum is None else [self.momentum]
        sgd_([self.w], [d], momentum, sgd.momentum, sgd.weight_decay, self.local.lr, first)

    def _check_iterate(self, mechanism: Mechanism, hook: str, before: int, remedy: str) -> None:
        if self.w._version != before:
            raise FedflatError(f"{mechanism.name}: {hook} changed the iterate itself in place; {remedy}.")

    def _fold_corrections(self) -> None:
        """Find out how directions are corrected in this round."""
        sgd, local = self.sgd, self.local
        self.corrections = [(m, m.correction(local)) for m in self.correctors]
        known = [correction for _, correction in self.corrections if correction is not None]
        self.folded = None
        self.drift.clear()
        if len(known) < len(self.corrections) or sgd.momentum or sgd.clip_norm is not None:
            return
        folded = reduce(Correction.then, known, Correction()).then(Correction(pull=sgd.weight_decay))
        if folded.scale <= 0:
            return
        self.folded = folded
        for vector, weight in folded.vectors:
            self.drift.add(vector, weight / folded.scale)

    def _find_moves(self) -> None:
        """Find out how the point is moved in this round.

        Where that is alike in every step and nobody looks at the iterate, the iterate x is carried to the point
        `x + δ` once, and steps are taken from there: they are the same, but for a pull, which goes to x itself.
        """
        found = [(m, one_move(m, m.steady_shift(self.local), self.w)) for m in self.shifts]
        self.moves = [(m, move) for m, move in found if move is not None or overrides(m, "shift")]
        steady = [move for _, move in self.moves if move is not None]
        alone = self.folded is not None and not self.losses and not self.pulls
        self.carried = steady if alone and len(steady) == len(self.moves) else []
        if not self.carried:
            return
        assert self.folded is not None
        self.away.copy_(self.local.start)
        for vector, scale in self.carried:
            self.away.add_(vector, alpha=scale)
        self.w.copy_(self.away)
        self.moves = []
        if self.folded.pull:
            for vector, scale in self.carried:
                self.drift.add(vector, -self.folded.pull * scale / self.folded.scale)

    def _descend(self, step: Step, correction: Correction) -> Loss:
        """`w ← w − η scale (g + drift + pull/scale w)`; of an embedding only the rows in the batch. The loss."""
        lr, decay = self.local.lr * correction.scale, correction.pull / correction.scale
        chain = self.chain_for(step)
        if chain is not None and not decay:  # no need for a gradient at all
            loss = self.go_back(chain, step)
            chain.descend(self.w_views, lr)
            self.drift.carry(self.w, -lr)
            return loss
        if chain is not None:
            loss = self.differentiate_into(self.direction_views, step)
            drifting_sgd_(self.w_views, self.direction_views, self.drift.views, decay, lr)
            return loss
        gradients, loss = self.differentiate(step)
        if all_dense(gradients):  # no need to gather it first
            pieces: Pieces = cast("tuple[Tensor, ...]", gradients)
            drift = self.drift.views
            if decay or drift is not None:
                pieces = self._aligned(pieces)
            drifting_sgd_(self.w_views, pieces, drift, decay, lr)
            return loss
        if decay:  # beside w itself a small decay would be lost in rounding, beside the gradient it is not
            self.model.write(gradients, self.direction_views)
            drifting_sgd_(self.w_views, self.direction_views, self.drift.views, decay, lr)
            return loss
        self.drift.carry(self.w, -lr)
        for w, gradient in zip(self.w_views, gradients, strict=True):
            if gradient is not None and gradient.is_sparse:
                gradient = gradient.coalesce()
                w.index_add_(0, gradient.indices()[0], gradient.values(), alpha=-lr)
            elif gradient is not None:
                w.add_(gradient, alpha=-lr)
        return loss

    def _descend_with_memory(self, step: Step, first: bool) -> Loss:
        """A step of SGD with momentum along the gradient alone; the loss."""
        gradients, loss = self.differentiate(step)
        pieces = self.direction_views
        if all_dense(gradients):
            pieces = self._aligned(cast("tuple[Tensor, ...]", gradients))
        else:
            self.model.write(gradients, pieces)
        sgd = self.sgd
        sgd_(self.w_views, pieces, self.momentum_views, sgd.momentum, sgd.weight_decay, self.local.lr, first)
        return loss

    def _aligned(self, gradients: Pieces) -> list[Tensor]:
        """Gradients that lie in memory as the parameters do, which the fused update takes for granted."""
        return [
            gradient if gradient.stride() == view.stride() else view.copy_(gradient)
            for gradient, view in zip(gradients, self.direction_views, strict=True)
        ]

    def _teacher(self) -> FlatModel:
        """Another module in evaluation mode, made once, in which teachers are evaluated."""
        if self._teaching is None:
            self._teaching = self.model.copy(self.model.vector.device)
            self._teaching.module.eval()
        return self._teaching

    def _begin_buffers(self, received: Tensor | None, kept: Tensor | None) -> Tensor | None:
        """Write what the model's buffers are when the round begins, and return it."""
        if self.buffers == "reset":
            buffers = self.initial_buffers
        else:
            buffers = kept if self.buffers == "local" and kept is not None else received
        self.model.write_buffers(buffers)
        return buffers


def _remedy(reason: str, inputs: Tensor) -> str:
    """What to do about the usual reasons why a model does not take its samples."""
    end = "" if reason.endswith(".") else "."
    if "same dtype" in reason and not inputs.is_floating_point():
        return f"{end} The inputs are whole numbers: give the federation floats, with inputs.float()."
    if "out of bounds" in reason:
        return f"{end} Has the model an output for every class?"
    if "must be Tensor, not" in reason:
        return f"{end} The model must return one tensor, a row of outputs for every sample."
    return ""
