"""A client's round: begin, local steps, end; and the local optimiser.

x = start
for every batch:
    the point is x plus every mechanism's shift
    d is the gradient of (loss + every mechanism's term) at the point
    every mechanism corrects d
    x takes an SGD step along d       (clipping, then weight decay at x, then momentum)
upload x - start
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .data.federation import Shard
from .errors import FedflatError
from .flat import FlatModel, Gradients, all_dense, inverse_norm
from .frozen import FrozenModels, Passes, Transform
from .mechanism import Correction, Mechanism, check_parameters, choice, number, overrides
from .messages import Download, Upload
from .method import Method
from .randomness import generator, torch_seeded

LossFunction = Callable[[Tensor, Tensor], Tensor]
Pieces = list[Tensor] | tuple[Tensor, ...]
"""A flat vector as one tensor per parameter."""


@dataclass(frozen=True)
class LocalSGD:
    """The clients' optimiser: SGD, its momentum started anew every round.

    `K_i = epochs * ceil(n_i / batch_size)` steps, the last partial batch kept; or exactly `steps` steps.
    `batch_size=None` is the full batch, so that `epochs=3` is then three steps.
    """

    lr: float = number(default=0.1, above=0)
    momentum: float = number(default=0.0, at_least=0, below=1)
    weight_decay: float = number(default=0.0, at_least=0)
    epochs: int | None = number(default=None, at_least=1, optional=True, whole=True)
    batch_size: int | None = number(default=50, at_least=1, optional=True, whole=True)
    steps: int | None = number(default=None, at_least=1, optional=True, whole=True)
    lr_decay: float = number(default=1.0, above=0, at_most=1)
    """the learning rate of round t is `lr * lr_decay**t`"""
    clip_norm: float | None = number(default=None, above=0, optional=True)
    clip_stage: str = choice("direction", "gradient", default="direction")
    """clip the corrected direction, or the raw gradient before any correction"""

    def __post_init__(self) -> None:
        check_parameters(self, "LocalSGD")
        if self.epochs is not None and self.steps is not None:
            raise FedflatError("LocalSGD: give epochs or steps, not both.")
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 1)

    def lr_in(self, round: int) -> float:
        """`η_t`."""
        return self.lr * self.lr_decay**round

    def steps_for(self, samples: int) -> int:
        """`K_i`."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * math.ceil(samples / (self.batch_size or samples))


class Local:
    """What a mechanism sees of a client's round."""

    def __init__(self, model: FlatModel, w: Tensor) -> None:
        self.model = model
        self.w = w
        """the local iterate; read it, never write it"""
        self.round = self.client = self.steps = self.samples = 0
        self.lr = 0.0
        self.start = w
        """the model received, where the client starts"""
        self.received: dict[str, Any] = {}
        """what came beside the model, by name"""
        self.state: dict[str, Tensor] = {}
        """what the client keeps between rounds: replace vectors, do not change them in place"""
        self.notes: dict[Any, Any] = {}
        """a mechanism's own notes for this round, under `self`"""
        self.update = w
        """`Δ_i`, from `end` on; `end` may change it in place, and that is what is uploaded"""
        self.seed = 0
        self.secret: bytes | None = None
        """the node's, in a real federation: what nobody else can know is drawn from it"""
        self._scratch: dict[str, Tensor] = {}

    def kept(self, name: str) -> Tensor:
        """A vector the client keeps; zeros where it keeps nothing yet."""
        value = self.state.get(name)
        return torch.zeros_like(self.w) if value is None else value

    def scratch(self, name: str) -> Tensor:
        """A vector to compute in, the same one every time for this name; its content is undefined."""
        if name not in self._scratch:
            self._scratch[name] = torch.empty_like(self.w)
        return self._scratch[name]

    def pseudo_gradient(self) -> Tensor:
        """`G_i = −Δ_i / (K_i η_t)`."""
        return self.update / (-self.steps * self.lr)


class Step:
    """What a mechanism sees of one local step."""

    def __init__(self, local: Local, training: LocalTraining) -> None:
        self.local = local
        self._training = training
        self.index = 0
        """`k`, from 0"""
        self.inputs = self.targets = torch.empty(0)
        self.first: Tensor = torch.empty(0)
        """the gradient that `gradient()` took in this step"""
        self._moved = False

    @property
    def w(self) -> Tensor:
        """The local iterate `w_{i,k}`."""
        return self.local.w

    @property
    def point(self) -> Tensor:
        """Where the gradient will be taken: the iterate plus the shifts so far; read it, never write it."""
        self.settle()
        return self.local.model.vector

    def move(self, vector: Tensor, scale: float = 1.0, times: Tensor | None = None) -> None:
        """Move the point by `scale * vector`, or by `scale * times * vector`, entry by entry."""
        away = self._training.away
        at = away if self._moved else self.w
        if times is None:
            torch.add(at, vector, alpha=scale, out=away)
        else:
            torch.addcmul(at, vector, times, value=scale, out=away)
        self._moved = True

    def move_pieces(self, pieces: Pieces, scale: float) -> None:
        """Move the point by `scale` times a vector that is given as one tensor per parameter."""
        away = self._training.away_views
        at = away if self._moved else self._training.w_views
        for here, piece, there in zip(at, pieces, away, strict=True):
            torch.add(here, piece, alpha=scale, out=there)
        self._moved = True

    def settle(self) -> None:
        """Let the model stand at the point: on the iterate itself, where no shift has moved it."""
        training = self._training
        if self._moved:
            self.local.model.stand_on(training.away, training.away_views)
        else:
            self.local.model.stand_on(training.w, training.w_views)

    def gradient(self) -> Tensor:
        """The gradient at the point, on this step's batch: one more forward and backward pass."""
        self.settle()
        self.first = self._training.first
        gradients, _ = self._training.differentiate(self)
        self.local.model.write(gradients, self._training.first_views)
        return self.first

    def gradient_pieces(self) -> Pieces:
        """The gradient at the point, on this step's batch, one tensor per parameter: one more pass each way."""
        self.settle()
        gradients, _ = self._training.differentiate(self)
        if all_dense(gradients):
            return cast("tuple[Tensor, ...]", gradients)
        self.local.model.write(gradients, self._training.first_views)
        return self._training.first_views

    def climb(self, length: float, normalize: bool) -> None:
        """Move the point by `length` along the gradient there, or by `length` times it: one more pass each way."""
        gradient = self.gradient_pieces()
        if normalize:
            length *= inverse_norm(torch.stack(torch._foreach_norm(gradient)))
        self.move_pieces(gradient, length)

    def outputs_at(self, vector: Tensor, then: Transform | None = None) -> Tensor:
        """The outputs of the model with other weights, constant in this round, on this step's batch.

        The method makes one more forward pass; mostly it is spared, since samples are known beforehand. `then`
        is applied to the outputs, to many samples at once and no more often than needed.
        """
        return self._training.frozen.outputs_at(vector, then)

    def spare(self, forward: int, backward: int) -> None:
        """Count passes that the method makes but whose result is not needed in this step."""
        self._training.passes.spare(forward, backward)

    def next_batch(self, index: int, inputs: Tensor, targets: Tensor) -> None:
        """Turn to the next step."""
        self.index, self.inputs, self.targets = index, inputs, targets
        self._moved = False


class LocalTraining:
    """Runs clients' rounds one after the other on one model, whose buffers are reused."""

    def __init__(
        self,
        model: FlatModel,
        method: Method,
        sgd: LocalSGD,
        loss: LossFunction,
        seed: int,
        buffers: str = "average",
    ) -> None:
        self.model, self.method, self.sgd, self.loss, self.seed = model, method, sgd, loss, seed
        self.buffers = buffers
        self.initial_buffers = model.read_buffers()
        hooks = {
            hook: [m for m in method.mechanisms if overrides(m, hook)]
            for hook in ("begin", "shift", "loss", "end", "leave")
        }
        self.begins, self.shifts, self.losses = hooks["begin"], hooks["shift"], hooks["loss"]
        self.ends, self.leaves = hooks["end"], hooks["leave"]
        self.correctors = [
            m for m in method.mechanisms if overrides(m, "direction") or overrides(m, "correction")
        ]
        self.corrections: list[tuple[Mechanism, Correction | None]] = []
        self.folded: Correction | None = None
        """all corrections of this round in one, where they are alike in every step"""
        self.drift: Tensor | None = None
        """its vectors, summed and scaled by −η"""
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
        self.local = Local(model, self.w)
        self.local.seed = seed
        self.step = Step(self.local, self)
        self.passes = Passes()
        self.frozen = FrozenModels(model, self.passes)
        self._loss_sum = torch.zeros((), dtype=model.vector.dtype, device=model.vector.device)

    def run(self, client: int, shard: Shard, download: Download, state: dict[str, Tensor]) -> Upload:
        """The whole round of one client."""
        try:
            return self._run(client, shard, download, state)
        except FedflatError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as problem:
            reason = str(problem).strip().split("\n")[0]
            raise FedflatError(
                f"client {client}, round {download.round}: training failed in step {self.step.index} on inputs "
                f"of shape {tuple(self.step.inputs.shape)}: {reason}"
            ) from problem
        finally:
            self.model.stand_on(self.away, self.away_views)

    def _run(self, client: int, shard: Shard, download: Download, state: dict[str, Tensor]) -> Upload:
        local = self.local
        local.round, local.client, local.lr = download.round, client, download.lr
        local.samples, local.steps = len(shard), self.sgd.steps_for(len(shard))
        local.start, local.received, local.state = download.start, dict(download.values), state
        local.notes.clear()
        kept_buffers = state.pop("buffers", None)
        self._begin_buffers(download.buffers, kept_buffers)
        self.w.copy_(download.start)
        self.passes = Passes()
        self.frozen = FrozenModels(self.model, self.passes)
        self._loss_sum.zero_()

        self.model.module.train()
        with torch_seeded(self.seed, "model", download.round, client):
            for mechanism in self.begins:
                mechanism.begin(local)
            self._fold_corrections()
            for index, (inputs, targets) in enumerate(self._batches(client, shard)):
                self.step.next_batch(index, inputs, targets)
                self._take_step(first=index == 0)

        local.update = self.w - download.start
        vectors: dict[str, Tensor] = {}
        for mechanism in self.ends:
            vectors.update(mechanism.end(local))
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
            loss=self._loss_sum.item() / local.steps,
            forward=self.passes.forward,
            backward=self.passes.backward,
            spared_forward=self.passes.spared_forward,
            spared_backward=self.passes.spared_backward,
            state=local.state,
        )
        for mechanism in self.leaves:
            mechanism.leave(local, upload)
        return upload

    def differentiate(self, step: Step) -> tuple[Gradients, Tensor]:
        """The gradient of the loss and every mechanism's term, where the model stands, and the plain loss."""
        outputs = self.model.module(step.inputs)
        plain = total = self.loss(outputs, step.targets)
        for mechanism in self.losses:
            total = total + mechanism.loss(step, outputs)
        self.passes.make(1, 1)
        return self.model.gradients(total), plain.detach()

    def _take_step(self, first: bool) -> None:
        step, d, sgd = self.step, self.direction, self.sgd
        for mechanism in self.shifts:
            mechanism.shift(step)
        step.settle()
        gradients, loss = self.differentiate(step)
        self._loss_sum += loss
        if self.folded is not None:  # no need to gather the gradient first
            self._descend(gradients, self.folded)
            return
        if not self.corrections and sgd.clip_norm is None:
            self._descend_with_memory(gradients, first)
            return
        self.model.write(gradients, self.direction_views)
        if sgd.clip_norm is not None and sgd.clip_stage == "gradient":
            clip_(d, sgd.clip_norm)
        for mechanism, correction in self.corrections:
            if correction is None:
                mechanism.direction(step, d)
            else:
                correction.apply(d, self.w)
        if sgd.clip_norm is not None and sgd.clip_stage == "direction":
            clip_(d, sgd.clip_norm)
        momentum = None if self.momentum is None else [self.momentum]
        sgd_([self.w], [d], momentum, sgd.momentum, sgd.weight_decay, self.local.lr, first)

    def _fold_corrections(self) -> None:
        """Find out how directions are corrected in this round."""
        sgd, local = self.sgd, self.local
        self.corrections = [(m, m.correction(local)) for m in self.correctors]
        known = [correction for _, correction in self.corrections if correction is not None]
        self.folded = self.drift = None
        if len(known) < len(self.corrections) or sgd.momentum or sgd.clip_norm is not None:
            return
        self.folded = reduce(Correction.then, known, Correction()).then(Correction(pull=sgd.weight_decay))
        if self.folded.vectors:
            self.drift = local.scratch("drift").zero_()
            for vector, weight in self.folded.vectors:
                self.drift.add_(vector, alpha=-local.lr * weight)

    def _descend(self, gradients: Gradients, correction: Correction) -> None:
        """`w ← (1 − η pull) w + drift − η scale g`, piece by piece; of an embedding only the rows in the batch."""
        kept, alpha = 1.0 - self.local.lr * correction.pull, -self.local.lr * correction.scale
        if self.drift is not None:
            torch.add(self.drift, self.w, alpha=kept, out=self.w)
        elif kept != 1.0 and correction.scale > 0 and all_dense(gradients):
            lr, decay = self.local.lr * correction.scale, correction.pull / correction.scale
            sgd_(self.w_views, self._aligned(cast("tuple[Tensor, ...]", gradients)), None, 0.0, decay, lr)
            return
        elif kept != 1.0:
            self.w.mul_(kept)
        if all_dense(gradients):
            torch._foreach_add_(self.w_views, cast("tuple[Tensor, ...]", gradients), alpha=alpha)
            return
        for w, gradient in zip(self.w_views, gradients, strict=True):
            if gradient is not None and gradient.is_sparse:
                gradient = gradient.coalesce()
                w.index_add_(0, gradient.indices()[0], gradient.values(), alpha=alpha)
            elif gradient is not None:
                w.add_(gradient, alpha=alpha)

    def _descend_with_memory(self, gradients: Gradients, first: bool) -> None:
        """A step of SGD with momentum along the gradient alone."""
        pieces = self.direction_views
        if all_dense(gradients):
            pieces = self._aligned(cast("tuple[Tensor, ...]", gradients))
        else:
            self.model.write(gradients, pieces)
        sgd = self.sgd
        sgd_(self.w_views, pieces, self.momentum_views, sgd.momentum, sgd.weight_decay, self.local.lr, first)

    def _aligned(self, gradients: tuple[Tensor, ...]) -> list[Tensor]:
        """Gradients that lie in memory as the parameters do, which the fused update takes for granted."""
        return [
            gradient if gradient.stride() == view.stride() else view.copy_(gradient)
            for gradient, view in zip(gradients, self.direction_views, strict=True)
        ]

    def _batches(self, client: int, shard: Shard) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of freshly shuffled epochs; every epoch is gathered (and augmented) once, then sliced."""
        place, left = (self.local.round, client), self.local.steps
        shuffling = generator(self.seed, "batches", *place)
        augmenting = generator(self.seed, "augmentation", *place) if shard.pipeline.random else None
        samples, size = len(shard), self.sgd.batch_size or len(shard)
        if left * size < samples:  # not even one epoch: do not touch samples that are not needed
            shard = shard.at(self._positions(shuffling.permutation(samples)[: left * size]))
        stored, labels = shard.stored()
        if augmenting is None:
            stored = shard.pipeline.test(stored)
            self.frozen.same_samples(stored)
        shuffled = size < samples and len(shard) == samples
        while left > 0:
            inputs, targets, order = stored, labels, None
            if shuffled:
                order = self._positions(shuffling.permutation(samples)[: left * size])
                inputs, targets = _rows(stored, order), labels.index_select(0, order)
            if augmenting is not None:
                inputs = shard.pipeline.train(inputs, augmenting, size)
            self.frozen.next_epoch(inputs, order, size)
            for first in range(0, len(targets), size):
                left -= 1
                self.frozen.next_batch(first)
                yield inputs[first : first + size], targets[first : first + size]

    def _positions(self, order: np.ndarray) -> Tensor:
        return torch.from_numpy(order).to(self.w.device)

    def _begin_buffers(self, received: Tensor | None, kept: Tensor | None) -> None:
        if self.buffers == "reset":
            self.model.write_buffers(self.initial_buffers)
        elif self.buffers == "local" and kept is not None:
            self.model.write_buffers(kept)
        else:
            self.model.write_buffers(received)


def _rows(stored: Tensor, order: Tensor) -> Tensor:
    """Some samples, in that order; images keep their channels last in memory, where they are."""
    if stored.dim() == 4 and stored.is_contiguous(memory_format=torch.channels_last):
        return stored.permute(0, 2, 3, 1).index_select(0, order).permute(0, 3, 1, 2)
    return stored.index_select(0, order)


def sgd_(
    w: list[Tensor],
    d: list[Tensor] | tuple[Tensor, ...],
    momentum: list[Tensor] | None,
    mu: float,
    weight_decay: float,
    lr: float,
    first: bool = False,
) -> None:
    """`b ← μ b + d + λ w` (b is d + λ w in the first step), `w ← w − η b`, in one sweep over memory."""
    if momentum is None and not weight_decay:
        torch._foreach_add_(w, d, alpha=-lr)
        return
    torch._fused_sgd_(
        w,
        d,
        momentum if momentum is not None else [],
        weight_decay=weight_decay,
        momentum=mu,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=first,
    )


def clip_(vector: Tensor, norm: float) -> None:
    """Scale a vector in place so that it is no longer than `norm`."""
    length = torch.linalg.vector_norm(vector).item()
    if length > norm:
        vector.mul_(norm / length)
