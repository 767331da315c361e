"""What a mechanism sees of a client's round, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..core.flat import FlatModel, Pieces, all_dense, inverse_norm_of
from ..errors import FedflatError
from .teachers import Transform

if TYPE_CHECKING:
    from ..gradients.dense import Chain
    from .round import ClientRound

ETAS = (1e-3, 10.0)
"""Between these `1 + x/η` keeps as many digits as `η + x`."""


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
        self.memo: dict[Any, Any] = {}
        """a mechanism's own memo for this round, under `self`"""
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

    def __init__(self, local: Local, training: ClientRound) -> None:
        self.local = local
        self._training = training
        self.index = 0
        """`k`, from 0"""
        self.inputs = self.targets = self._targets = torch.empty(0)
        self._moved = False
        self._past: Chain | None = None
        """whose own parameters stay behind, when the others have climbed past them,"""
        self._behind: list[Tensor] = []
        """and where these still are"""

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
        away = self._away()
        at = away if self._moved else self.w
        if times is None:
            torch.add(at, vector, alpha=scale, out=away)
        else:
            torch.addcmul(at, vector, times, value=scale, out=away)
        self._moved = True

    def move_pieces(self, pieces: Pieces, scale: float, times: Pieces | None = None) -> None:
        """The same with vectors that are given as one tensor per parameter."""
        self._away()
        away = self._training.away_views
        at = away if self._moved else self._training.w_views
        if times is None:
            for here, piece, there in zip(at, pieces, away, strict=True):
                torch.add(here, piece, alpha=scale, out=there)
        else:
            for here, piece, factor, there in zip(at, pieces, times, away, strict=True):
                torch.addcmul(here, piece, factor, value=scale, out=there)
        self._moved = True

    def room(self) -> tuple[Tensor, Pieces]:
        """A vector to compute a move in, whole and as one tensor per parameter; its content is undefined.

        Where nothing has moved the point yet, it is where the point will be: one vector less in the cache.
        """
        away = self._away()
        if not self._moved:
            return away, self._training.away_views
        return self._training.room()

    def _away(self) -> Tensor:
        """Where points away from the iterate are; there is such a place where a mechanism has `shift`."""
        self._catch_up()
        away = self._training.away
        if away is self.w:
            raise FedflatError(
                "The point is moved in a mechanism's hook `shift`; none of this method's has one."
            )
        return away

    def settle(self) -> None:
        """Let the model stand at the point: on the iterate itself, where no shift has moved it."""
        self._catch_up()
        training = self._training
        if self._moved:
            self.local.model.stand_on(training.away, training.away_views)
        else:
            self.local.model.stand_on(training.w, training.w_views)

    def stand(self) -> None:
        """The same for somebody who hardly looks: parameters that stayed behind may do so."""
        if self._past is None:
            self.settle()
        else:
            self.local.model.stand_on(self._training.away, self._training.away_views)

    def gradient(self) -> Tensor:
        """The gradient at the point, on this step's batch: one more forward and backward pass.

        The vector is written again when a gradient is next asked for, by whichever mechanism: copy what is kept.
        """
        self.settle()
        self._training.differentiate_into(self._training.first_views, self)
        return self._training.first

    def gradient_pieces(self) -> Pieces:
        """The same, one tensor per parameter, some of which may share their memory: read them, never write them."""
        self.settle()
        gradients, _ = self._training.differentiate(self)
        if all_dense(gradients):
            return cast("tuple[Tensor, ...]", gradients)
        self.local.model.write(gradients, self._training.first_views)
        return self._training.first_views

    def climb(self, length: float, normalize: bool) -> None:
        """Move the point by `length` along the gradient there, or by `length` times it: one more pass each way."""
        training = self._training
        chain = training.chain_for(self)
        if chain is not None and chain.pays(self.inputs):
            self._away()
            training.go_back(chain, self)
            room, views = training.room()
            if chain.climb(length, normalize, room, views):
                self._climb_past(chain, room)
                return
            gradient: Pieces = chain.gradients()
        else:
            gradient = self.gradient_pieces()
        self.move_pieces(gradient, length * inverse_norm_of(gradient) if normalize else length)

    def climb_stretched(self, length: float, eta: float, stretched: tuple[bool, ...]) -> None:
        """Move the point by `length T² g / ‖T g‖` along the gradient g there: one more pass each way.

        `T = |w| + eta` for the parameters that are stretched, w the iterate, and 1 for all others.
        """
        training = self._training
        chain = training.chain_for(self)
        if chain is None or not ETAS[0] <= eta <= ETAS[1]:
            self._climb_along_stretched(self.gradient_pieces(), length, eta, stretched)
            return
        self._away()
        training.go_back(chain, self)
        sizes, pieces = training.sizes(eta, stretched)
        for here, piece, wanted in zip(training.w_views, pieces, stretched, strict=True):
            if wanted:
                torch.abs(here, out=piece)
        room, views = training.room()
        chain.climb_stretched(length, eta, sizes, room, views)
        self._climb_past(chain, room)

    def _climb_along_stretched(
        self, gradient: Pieces, length: float, eta: float, stretched: tuple[bool, ...]
    ) -> None:
        scale, scales = self.room()
        torch.abs(self.w, out=scale).add_(eta)
        for piece, wanted in zip(scales, stretched, strict=True):
            if not wanted:
                piece.fill_(1.0)
        scaled = torch._foreach_mul(gradient, scales)  # not in place: parameters may share a gradient
        self.move_pieces(scaled, length * inverse_norm_of(scaled), times=scales)

    def _climb_past(self, chain: Chain, along: Tensor) -> None:
        """Move all but the first layer's parameters, without which the second pass can do."""
        training = self._training
        at, views = (training.away, training.away_views) if self._moved else (self.w, training.w_views)
        rests = chain.rest_of(at), chain.rest_of(along), chain.rest_of(training.away)
        torch.add(*rests[:2], alpha=chain.scale, out=rests[2])
        self._past, self._behind = chain, [views[index] for index in chain.own]
        self._moved = True

    def _catch_up(self) -> None:
        """Move the parameters that stayed behind to the point too, where somebody wants to see or move it."""
        if self._past is not None:
            past, behind, away = self._past, self._behind, self._training.away_views
            self.let_go()
            for index, here, piece in zip(past.own, behind, past.moves(), strict=True):
                torch.add(here, piece, alpha=past.scale, out=away[index])

    def let_go(self) -> None:
        """Let all of the model be where it stands again."""
        self._past = None

    def outputs(self) -> Tensor:
        """The outputs of the model at the point, on this step's batch."""
        self.settle()
        return self.local.model.outputs(self.inputs)

    def outputs_of(self, chain: Chain) -> Tensor:
        """The same of a chain, which alone can be differentiated then; the model itself stays where it is."""
        training = self._training
        if self._past is chain:
            return chain.forward_again(training.away_views)
        return chain.forward(training.away_views if self._moved else training.w_views, self.inputs)

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
        self.let_go()
        self.index, self.inputs, self.targets = index, inputs, targets
        self._targets, self._moved = targets, False

    @property
    def has_own_targets(self) -> bool:
        """Whether no mechanism has put others in their place."""
        return self.targets is self._targets
