"""What all steps of a client's round have in common, found before the first of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch

from ..core.flat import axpy_
from ..methods.checks import one_move
from ..methods.mechanism import Correction, Mechanism, Move, overrides
from .local import Local
from .optimisers import LocalOptimiser


@dataclass(frozen=True)
class Plan:
    """How the point is moved and how the direction is corrected, in every step of one round."""

    moves: list[tuple[Mechanism, Move | None]]
    """None is by the mechanism's hook `shift`"""
    corrections: list[tuple[Mechanism, Correction | None]]
    """None is by the mechanism's hook `direction`"""
    folded: Correction | None = None
    """all corrections and weight decay in one, where they are alike in every step and SGD is plain"""

    @classmethod
    def of(cls, local: Local, mechanisms: Sequence[Mechanism], optimiser: LocalOptimiser) -> Plan:
        """Ask the mechanisms."""
        shifting = [m for m in mechanisms if overrides(m, "shift") or overrides(m, "steady_shift")]
        moves = [(m, one_move(m, m.steady_shift(local), local.start)) for m in shifting]
        moves = [(m, move) for m, move in moves if move is not None or overrides(m, "shift")]
        correcting = [m for m in mechanisms if overrides(m, "direction") or overrides(m, "correction")]
        corrections = [(m, m.correction(local)) for m in correcting]
        known = [correction for _, correction in corrections if correction is not None]
        if len(known) < len(corrections) or not optimiser.folds:
            return cls(moves, corrections)
        folded = reduce(Correction.then, [*known, Correction(pull=optimiser.weight_decay)], Correction())
        plan = cls(moves, corrections, folded)
        alike = moves and all(move is not None for _, move in moves)
        looked_at = any(overrides(m, "loss") for m in mechanisms)
        return plan.carried(local) if alike and not looked_at else plan

    def carried(self, local: Local) -> Plan:
        """Carry the iterate to the point `w + δ` once, where δ is alike in every step: steps from there lead alike.

        A pull goes to w itself, so it is taken off δ; `local.w` takes δ off again.
        """
        assert self.folded is not None
        offset = torch.zeros_like(local.start)
        for _, move in self.moves:
            assert move is not None
            axpy_(offset, *move)
        local.carry(offset)
        pull = self.folded.pull
        off = Correction(vectors=((offset, -pull),) if pull else ())
        return replace(self, moves=[], folded=self.folded.then(off))
