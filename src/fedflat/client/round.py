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
from functools import cached_property, reduce

import torch
from torch import Tensor

from ..core.buffers import Unsent
from ..core.evaluation import LossFunction
from ..core.flat import Flat, FlatModel, axpy_, clip_
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
    one_move,
    training_failed,
)
from ..methods.mechanism import Correction, Mechanism, Move, overrides
from ..methods.method import Method
from .batches import batches
from .local import Local
from .optimisers import LocalOptimiser
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
        self.terms = self._with("loss")
        self._shifting, self._correcting = (
            self._with("shift", "steady_shift"),
            self._with("direction", "correction"),
        )
        self.oracle = make_oracle(oracle, model, loss)
        self._rule = optimiser.rule(model.vector)
        # The model's own vector is the iterate. Where the point is shifted, the iterate lies beside it, and that
        # vector is where the point goes: nothing is ever restored.
        self.away = model.layout.flat(model.vector)
        self.w = model.layout.empty() if self._shifting else self.away
        self.passes = Passes()
        self._teachers: dict[tuple[int, Transform | None], Teacher] = {}
        self._step: Step | None = None

    def run(
        self,
        client: int,
        shard: Shard,
        download: Download,
        state: dict[str, Tensor],
        on_step: Callable[[Step], None] | None = None,
    ) -> Upload:
        """Run the whole round of one client; `on_step` is called after every local step."""
        try:
            with torch_seeded(self.seed, "model", download.round, client):
                return self._run(client, shard, download, state, on_step)
        except FedflatError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, ArithmeticError) as problem:
            raise training_failed(problem, client, download.round, self._step) from problem
        finally:
            self.model.stand_on(self.away)

    def _run(
        self,
        client: int,
        shard: Shard,
        download: Download,
        state: dict[str, Tensor],
        on_step: Callable[[Step], None] | None,
    ) -> Upload:
        local = self._receive(client, shard, download, state)
        read = Untouched(**download.values, **{f"local.state['{n}']": v for n, v in local.state.items()})
        for mechanism in self._with("begin"):
            mechanism.begin(local)
        corrections = [(m, m.correction(local)) for m in self._correcting]
        moves = self._moves(local)
        folded = self._folded(corrections)
        if folded is not None and moves and not self.terms and all(move is not None for _, move in moves):
            folded, moves = self._carry(local, folded, moves), []
        rates = self.optimiser.rates(local.lr, local.steps)
        losses = torch.zeros_like(download.start[0])
        drawn = batches(shard, self.optimiser.batch_size, local.steps, self.seed, local.round, client)
        for index, batch in enumerate(drawn):
            step = self._step = Step(self, index, batch)
            if moves:
                self._shift(step, moves)
            gradient = step.differentiate()
            losses += gradient.loss
            if folded is not None:
                self._descend(gradient, folded, rates[index])
            else:
                self._correct(step, gradient, corrections)
                self._rule.step(self.w.vector, self.direction.vector, rates[index], index)
            if on_step is not None:
                on_step(step)
        return self._upload(local, losses.item() / local.steps, read)

    # -- a step ------------------------------------------------------------------------------------

    def _shift(self, step: Step, moves: list[tuple[Mechanism, Move | None]]) -> None:
        """Go from the iterate to the point."""
        for mechanism, move in moves:
            if move is not None:
                step.move(*move)
            else:
                in_place(mechanism, "shift", MOVE, self.w.vector, step)

    def _descend(self, gradient: Gradient, correction: Correction, lr: float) -> None:
        """`w ← w − η (scale·g + pull·w + Σ weight·vector)`."""
        gradient.add_to(self.w, -lr * correction.scale, -lr * correction.pull)
        for vector, weight in correction.vectors:
            self.w.vector.add_(vector, alpha=-lr * weight)

    def _correct(
        self, step: Step, gradient: Gradient, corrections: list[tuple[Mechanism, Correction | None]]
    ) -> None:
        """Make the gradient the direction d."""
        optimiser, d = self.optimiser, self.direction.vector
        gradient.write(self.direction)
        if optimiser.clip_norm is not None and optimiser.clip_stage == "gradient":
            clip_(d, optimiser.clip_norm)
        for mechanism, correction in corrections:
            if correction is None:
                in_place(mechanism, "direction", CHANGE, self.w.vector, step, d)
            else:
                correction.apply(d, self.w.vector)
        if optimiser.clip_norm is not None and optimiser.clip_stage == "direction":
            clip_(d, optimiser.clip_norm)

    # -- what is alike in every step ---------------------------------------------------------------

    def _folded(self, corrections: list[tuple[Mechanism, Correction | None]]) -> Correction | None:
        """Fold all corrections and weight decay into one, where they are alike in every step and SGD is plain."""
        known = [correction for _, correction in corrections if correction is not None]
        if len(known) < len(corrections) or not self.optimiser.folds:
            return None
        return reduce(Correction.then, known, Correction()).then(Correction(pull=self.optimiser.weight_decay))

    def _moves(self, local: Local) -> list[tuple[Mechanism, Move | None]]:
        """Find how the point is moved in every step of the round; None is by the hook `shift`."""
        found = [(m, one_move(m, m.steady_shift(local), self.w.vector)) for m in self._shifting]
        return [(m, move) for m, move in found if move is not None or overrides(m, "shift")]

    def _carry(
        self, local: Local, folded: Correction, moves: list[tuple[Mechanism, Move | None]]
    ) -> Correction:
        """Carry the iterate to the point `w + δ` once, where δ is alike in every step: steps from there are the same.

        A pull goes to w itself, so it is taken off δ; `local.w` takes δ off again.
        """
        offset = torch.zeros_like(local.start)
        for _, move in moves:
            assert move is not None
            axpy_(offset, *move)
        local.carry(offset)
        return folded.then(Correction(vectors=((offset, -folded.pull),) if folded.pull else ()))

    def teacher(self, vector: Tensor, then: Transform | None) -> Teacher:
        """Find the teacher with these weights."""
        place = vector.data_ptr(), then
        if place not in self._teachers:
            self._teachers[place] = Teacher(self.oracle, self.model.layout.flat(vector), then, self.passes)
        return self._teachers[place]

    # -- beginning and end -------------------------------------------------------------------------

    def _receive(self, client: int, shard: Shard, download: Download, state: dict[str, Tensor]) -> Local:
        """Begin the round: what mechanisms see of it, with the model and its buffers as received."""
        steps = self.optimiser.steps_for(len(shard))
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
            seed=self.seed,
            secret=self.secret,
        )
        kept = local.state.pop("buffers", None)
        given = {"reset": self.initial_buffers, "local": download.buffers if kept is None else kept}
        buffers = given.get(self.buffers, download.buffers)
        self.model.write_buffers(buffers)
        self.model.module.train()
        self.w.vector.copy_(download.start)
        self.oracle.begin(buffers)
        self.passes, self._teachers, self._step = Passes(), {}, None
        return local

    def _upload(self, local: Local, loss: float, read: Untouched) -> Upload:
        """End the round: what mechanisms keep and send."""
        local.update = local.moved()
        vectors: dict[str, Tensor] = {}
        ends, leaves = self._with("end"), self._with("leave")
        # where a mechanism hides what leaves the client, nobody sees more than that
        trained = local.update.clone() if self.measured and ends and not leaves else None
        for mechanism in ends:
            vectors.update(named(mechanism, "end", mechanism.end(local)))
        if trained is not None and torch.equal(trained, local.update):
            trained = None
        read.check("what is received or kept is read by others too: make a new vector of it")
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

    def _with(self, *hooks: str) -> list[Mechanism]:
        """The mechanisms that have one of these hooks, in order."""
        return [m for m in self.method.mechanisms if any(overrides(m, hook) for hook in hooks)]
