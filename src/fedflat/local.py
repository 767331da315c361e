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
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from .data.federation import Shard
from .errors import FedflatError
from .flat import FlatModel
from .mechanism import check_parameters, choice, number, overrides
from .messages import Download, Upload
from .method import Method
from .randomness import generator, torch_seeded

LossFunction = Callable[[Tensor, Tensor], Tensor]


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
        self._frozen: dict[int, Tensor] = {}

    @property
    def w(self) -> Tensor:
        """The local iterate `w_{i,k}`."""
        return self.local.w

    @property
    def point(self) -> Tensor:
        """Where the gradient will be taken: the iterate plus the shifts so far."""
        self.settle()
        return self.local.model.vector

    def move(self, vector: Tensor, scale: float = 1.0) -> None:
        """Move the point by `scale * vector`."""
        if self._moved:
            self.local.model.vector.add_(vector, alpha=scale)
        else:
            torch.add(self.w, vector, alpha=scale, out=self.local.model.vector)
            self._moved = True

    def settle(self) -> None:
        """Make the model stand at the point even if no shift has moved it."""
        if not self._moved:
            if self.local.model.vector is not self.w:
                self.local.model.vector.copy_(self.w)
            self._moved = True

    def gradient(self) -> Tensor:
        """The gradient at the point, on this step's batch: one more forward and backward pass."""
        self.settle()
        self.first = self._training.first
        self._training.differentiate(self, self._training.first_views)
        return self.first

    def outputs_at(self, vector: Tensor) -> Tensor:
        """The outputs of the model with other, constant weights on this step's batch: one forward pass."""
        key = vector.data_ptr()
        if key not in self._frozen:
            self._frozen[key] = self._training.forward_at(vector, self.inputs)
        return self._frozen[key]

    def next_batch(self, index: int, inputs: Tensor, targets: Tensor) -> None:
        """Turn to the next step."""
        self.index, self.inputs, self.targets = index, inputs, targets
        self._moved = False
        self._frozen.clear()


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
            for hook in ("begin", "shift", "loss", "direction", "end")
        }
        self.begins, self.shifts, self.losses = hooks["begin"], hooks["shift"], hooks["loss"]
        self.directions, self.ends = hooks["direction"], hooks["end"]
        # Without shifts the iterate lives in the model itself; with them it is kept beside the model,
        # whose vector then is only the place where gradients are taken: nothing is ever restored.
        self.w = torch.empty_like(model.vector) if self.shifts else model.vector
        self.direction, self.first = torch.empty_like(self.w), torch.empty_like(self.w)
        self.direction_views = model.split(self.direction)
        self.first_views = model.split(self.first)
        self.w_views = model.split(self.w)
        self._only_gradients_move = not (self.directions or sgd.weight_decay or sgd.momentum or sgd.clip_norm)
        self.momentum = torch.empty_like(self.w) if sgd.momentum else None
        self.local = Local(model, self.w)
        self.step = Step(self.local, self)
        self.forward = self.backward = 0
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

    def _run(self, client: int, shard: Shard, download: Download, state: dict[str, Tensor]) -> Upload:
        local = self.local
        local.round, local.client, local.lr = download.round, client, download.lr
        local.samples, local.steps = len(shard), self.sgd.steps_for(len(shard))
        local.start, local.received, local.state = download.start, dict(download.values), state
        local.notes.clear()
        kept_buffers = state.pop("buffers", None)
        self._begin_buffers(download.buffers, kept_buffers)
        self.w.copy_(download.start)
        self.forward = self.backward = 0
        self._loss_sum.zero_()

        self.model.module.train()
        with torch_seeded(self.seed, "model", download.round, client):
            for mechanism in self.begins:
                mechanism.begin(local)
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
        return Upload(
            client=client,
            round=download.round,
            samples=len(shard),
            steps=local.steps,
            update=local.update,
            vectors=vectors,
            buffers=buffers if self.buffers in ("average", "reset") else None,
            loss=self._loss_sum.item() / local.steps,
            forward=self.forward,
            backward=self.backward,
            state=local.state,
        )

    def differentiate(self, step: Step, into: list[Tensor]) -> Tensor:
        """The gradient of the loss and every mechanism's term, where the model stands."""
        outputs = self.model.module(step.inputs)
        plain = total = self.loss(outputs, step.targets)
        for mechanism in self.losses:
            total = total + mechanism.loss(step, outputs)
        self.model.differentiate(total, into)
        self.forward += 1
        self.backward += 1
        return plain.detach()

    def forward_at(self, vector: Tensor, inputs: Tensor) -> Tensor:
        """The outputs of the module with other weights, in evaluation mode, without a graph."""
        self.forward += 1
        with torch.no_grad(), self.model.evaluating() as module:
            result: Tensor = functional_call(module, self.model.named(vector), (inputs,))
        return result

    def _take_step(self, first: bool) -> None:
        step, d, sgd, lr = self.step, self.direction, self.sgd, self.local.lr
        for mechanism in self.shifts:
            mechanism.shift(step)
        step.settle()
        self._loss_sum += self.differentiate(step, self.direction_views)
        if sgd.clip_norm is not None and sgd.clip_stage == "gradient":
            clip_(d, sgd.clip_norm)
        for mechanism in self.directions:
            mechanism.direction(step, d)
        if sgd.clip_norm is not None and sgd.clip_stage == "direction":
            clip_(d, sgd.clip_norm)
        if self.model.rows and self._only_gradients_move:
            self._step_rows(lr)
            return
        if sgd.weight_decay:
            d.add_(self.w, alpha=sgd.weight_decay)
        if self.momentum is not None:
            d = self.momentum.copy_(d) if first else self.momentum.mul_(sgd.momentum).add_(d)
        self.w.add_(d, alpha=-lr)

    def _step_rows(self, lr: float) -> None:
        """`w ← w − η d` where d is not zero: of an embedding only the rows of words in the batch."""
        for position, (w, d) in enumerate(zip(self.w_views, self.direction_views, strict=True)):
            rows = self.model.rows.get(position)
            if rows is None:
                w.add_(d, alpha=-lr)
            else:
                rows = torch.unique(rows)
                w.index_add_(0, rows, d.index_select(0, rows), alpha=-lr)

    def _batches(self, client: int, shard: Shard) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of freshly shuffled epochs; every epoch is gathered (and augmented) once, then sliced."""
        place = (self.local.round, client)
        shuffling, augmenting = generator(self.seed, "batches", *place), None
        stored, labels = shard.stored()
        if shard.pipeline.random:
            augmenting = generator(self.seed, "augmentation", *place)
        else:
            stored = shard.pipeline.test(stored)
        size, left = self.sgd.batch_size or len(shard), self.local.steps
        while left > 0:
            inputs, targets = stored, labels
            if size < len(shard):
                order = torch.from_numpy(shuffling.permutation(len(shard))).to(labels.device)
                inputs, targets = stored.index_select(0, order), labels.index_select(0, order)
            if augmenting is not None:
                inputs = shard.pipeline.train(inputs, augmenting)
            for first in range(0, len(shard), size):
                if left == 0:
                    return
                left -= 1
                yield inputs[first : first + size], targets[first : first + size]

    def _begin_buffers(self, received: Tensor | None, kept: Tensor | None) -> None:
        if self.buffers == "reset":
            self.model.write_buffers(self.initial_buffers)
        elif self.buffers == "local" and kept is not None:
            self.model.write_buffers(kept)
        else:
            self.model.write_buffers(received)


def clip_(vector: Tensor, norm: float) -> None:
    """Scale a vector in place so that it is no longer than `norm`."""
    length = torch.linalg.vector_norm(vector).item()
    if length > norm:
        vector.mul_(norm / length)
