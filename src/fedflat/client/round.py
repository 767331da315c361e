"""A client's round.

w = start
for every batch:
the point is w plus every mechanism's shift
d is the gradient of (loss + every mechanism's term) at the point
every mechanism corrects d
w takes a step of the local optimiser against d
upload w − start
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from ..core.buffers import Unsent
from ..core.evaluation import LossFunction
from ..core.flat import Flat, FlatModel, clip_
from ..core.messages import Download, Upload
from ..core.randomness import torch_seeded
from ..data.federation import Shard
from ..errors import FedflatError
from ..gradients import make_oracle
from ..gradients.base import Gradient
from ..methods.checks import (
    Kept,
    Received,
    Untouched,
    check_optimiser,
    check_upload,
    in_place,
    named,
    training_failed,
)
from ..methods.mechanism import Mechanism, overrides
from ..methods.method import Method
from .batches import batches
from .local import Local
from .optimisers import LocalOptimiser
from .plan import Plan
from .step import Step
from .teachers import Passes, Teacher, Transform

MOVE = "move the point with step.move or step.ascend"
CHANGE = "change d in place, as d.mul_(0.5) does; the iterate then follows it"


class ClientRound:
    """Runs clients' rounds one after the other on one model."""

    def __init__(
        self,
        model: FlatModel,
        method: Method,
        optimiser: LocalOptimiser,
        loss: LossFunction,
        seed: int,
        buffers: str = "average",
        measured: bool = False,
        oracle: str = "auto",
    ) -> None:
        check_optimiser(method, optimiser)
        self.model, self.method, self.optimiser, self.loss, self.seed = model, method, optimiser, loss, seed
        self.buffers = buffers
        self.measured = measured
        """whether uploads have the update as it was trained beside one that `end` changed"""
        self.secret: bytes | None = None
        """a node's, in a real federation"""
        self.initial_buffers = model.read_buffers()
        self._unsent = Unsent(model.module)
        self.terms = self._having("loss")
        self.oracle = make_oracle(oracle, model, loss)
        self._rule = optimiser.rule(model.vector)
        # The model's own vector is the iterate. Where the point is shifted, the iterate lies beside it, and that
        # vector is where the point goes: nothing is ever restored.
        self.away = model.layout.flat(model.vector)
        self.w = model.layout.empty() if self._having("shift", "steady_shift") else self.away
        self.passes = Passes()
        self._teachers: dict[tuple[int, Transform | None], Teacher] = {}
        self._step: Step | None = None

    def run(
        self,
        client: int,
        shard: Shard,
        download: Download,
        state: dict[str, Tensor],
        on_step: Callable[[Step], None] = lambda step: None,
    ) -> Upload:
        """Run the whole round of one client; `on_step` is called after every local step."""
        local = self._receive(client, shard, download, state)
        given = Untouched(**download.values, **{f"local.state['{n}']": v for n, v in local.state.items()})
        try:
            with torch_seeded(self.seed, "model", download.round, client):
                loss = self._train(local, shard, on_step)
                upload = self._upload(local, loss)
        except FedflatError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, ArithmeticError) as problem:
            raise training_failed(problem, client, download.round, self._step) from problem
        finally:
            self.model.stand_on(self.away)
        given.check("what is received or kept is read by others too: make a new vector of it")
        return upload

    def _train(self, local: Local, shard: Shard, on_step: Callable[[Step], None]) -> float:
        """Take the local steps; the mean loss."""
        for mechanism in self._having("begin"):
            mechanism.begin(local)
        plan = Plan.of(local, self.method.mechanisms, self.optimiser)
        rates = self.optimiser.rates(local.lr, local.steps)
        losses = torch.zeros_like(local.start[0])
        drawn = batches(shard, self.optimiser.batch_size, local.steps, self.seed, local.round, local.client)
        for index, batch in enumerate(drawn):
            step = self._step = Step(self, index, batch)
            for mechanism, move in plan.moves:
                if move is not None:
                    step.move(*move)
                else:
                    in_place(mechanism, "shift", MOVE, self.w.vector, step)
            gradient = step.differentiate()
            losses += gradient.loss
            if plan.folded is not None:  # w ← w − η (scale·g + pull·w + Σ weight·vector)
                lr, folded = rates[index], plan.folded
                gradient.add_to(self.w, -lr * folded.scale, -lr * folded.pull)
                for vector, weight in folded.vectors:
                    self.w.vector.add_(vector, alpha=-lr * weight)
            else:
                self._correct(step, gradient, plan)
                self._rule.step(self.w.vector, self.direction.vector, rates[index], index)
            on_step(step)
        return losses.item() / local.steps

    def _correct(self, step: Step, gradient: Gradient, plan: Plan) -> None:
        """Make the gradient the direction d."""
        optimiser, d = self.optimiser, self.direction.vector
        gradient.write(self.direction)
        if optimiser.clip_norm is not None and optimiser.clip_stage == "gradient":
            clip_(d, optimiser.clip_norm)
        for mechanism, correction in plan.corrections:
            if correction is None:
                in_place(mechanism, "direction", CHANGE, self.w.vector, step, d)
            else:
                correction.apply(d, self.w.vector)
        if optimiser.clip_norm is not None and optimiser.clip_stage == "direction":
            clip_(d, optimiser.clip_norm)

    def teacher(self, vector: Tensor, then: Transform | None) -> Teacher:
        """Find the teacher with these weights."""
        place = vector.data_ptr(), then
        if place not in self._teachers:
            self._teachers[place] = Teacher(self.oracle, self.model.layout.flat(vector), then, self.passes)
        return self._teachers[place]

    # -- beginning and end -------------------------------------------------------------------------

    def _receive(self, client: int, shard: Shard, download: Download, state: dict[str, Tensor]) -> Local:
        """Begin the round: what mechanisms see of it, with the model and its buffers as received."""
        state, steps = dict(state), self.optimiser.steps_for(len(shard))
        kept = state.pop("buffers", None)
        given = {"reset": self.initial_buffers, "local": download.buffers if kept is None else kept}
        buffers = given.get(self.buffers, download.buffers)
        local = self.local = Local(
            layout=self.model.layout,
            at=self.w,
            round=download.round,
            client=client,
            samples=len(shard),
            steps=steps,
            lr=download.lr,
            rate_sum=self.optimiser.rate_sum(download.lr, steps),
            start=download.start,
            received=Received(download.values),
            state=Kept(state),
            buffers=buffers,
            seed=self.seed,
            secret=self.secret,
        )
        self.model.write_buffers(buffers)
        self.model.module.train()
        self.w.vector.copy_(download.start)
        self.oracle.begin(buffers)
        self.passes, self._teachers, self._step = Passes(), {}, None
        return local

    def _upload(self, local: Local, loss: float) -> Upload:
        """End the round: what mechanisms keep and send."""
        local.update = local.moved()
        vectors: dict[str, Tensor] = {}
        ends, leaves = self._having("end"), self._having("leave")
        # where a mechanism hides what leaves the client, no measure sees more than that
        trained = local.update.clone() if self.measured and ends and not leaves else None
        for mechanism in ends:
            vectors.update(named(mechanism, "end", mechanism.end(local)))
        if trained is not None and torch.equal(trained, local.update):
            trained = None
        self._unsent.check()
        buffers = self.model.read_buffers()
        if self.buffers == "local" and buffers is not None:
            local.state["buffers"] = buffers
        upload = Upload(
            client=local.client,
            round=local.round,
            samples=local.samples,
            steps=local.steps,
            update=local.update,
            vectors=vectors,
            buffers=buffers if self.buffers in ("average", "reset") else None,
            loss=loss,
            **vars(self.passes),
            state=local.state,
            trained=trained,
        )
        for mechanism in leaves:
            in_place(mechanism, "leave", "change the upload in place", None, local, upload)
        check_upload(self.method, upload)
        return upload

    # -- room --------------------------------------------------------------------------------------

    @cached_property
    def direction(self) -> Flat:
        """Room for the direction d."""
        return self.model.layout.empty()

    @cached_property
    def first(self) -> Flat:
        """Room for a gradient that a mechanism asks for."""
        return self.model.layout.empty()

    def _having(self, *hooks: str) -> list[Mechanism]:
        """The mechanisms that have one of these hooks, in order."""
        return [m for m in self.method.mechanisms if any(overrides(m, hook) for hook in hooks)]
