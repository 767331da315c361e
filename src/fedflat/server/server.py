"""The server's round: send, validate and fold uploads in client order, combine, finish.

Each upload is folded into sums as it comes, so memory does not grow with the number of active clients. Only what
limits a single client lets some wait: see `limit` and `bound`.

A round that would leave anything but finite numbers behind is undone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.finite import is_as_finite, is_finite
from ..core.messages import Download, Upload
from ..errors import Diverged, FedflatError
from ..methods.checks import Untouched, named, vector_like
from ..methods.mechanism import Value, overrides
from ..methods.method import Method
from ..storage.client_store import ClientStore, OverlayStore
from .aggregates import HELD, Middle
from .buffer_rules import BufferRules
from .norm_bounds import Bound, NormBounds
from .shares import largest_weight
from .uploads import RejectedUpload, bounded_vector, fault_of, length_of, owned, within_bounds

IN_ORDER = 16
"""Uploads that wait for one that weighs too much before lighter ones are folded without it."""
FIRST = 50
"""Uploads of a first round from which a bound is learnt that later rounds take from earlier ones."""

NOT_UNDONE = (
    "With state_memory a round cannot be undone. The last checkpoint stands; try a lower lr or a norm_bound."
)


class Server:
    """The global model, what the method keeps beside it, and the sums of the round under way.

    `server.w` is the flat global model, `server["ema"]` a named vector or number of the method's.
    """

    def __init__(
        self,
        w: Tensor,
        method: Method,
        clients: int,
        weighting: str = "samples",
        buffers: Tensor | None = None,
        state_memory: int | None = None,
    ) -> None:
        self.w = w
        self.method = method
        self.clients = clients
        """`M`, all clients, active or not"""
        self.weighting = weighting
        self.buffers = buffers
        self.state: dict[str, Value | None] = {}
        for mechanism in method.mechanisms:
            self.state.update(named(mechanism, "server_state", mechanism.server_state(w)))
        self.per_client = ClientStore(budget=state_memory, device=w.device)
        """what the server keeps for every client"""
        self._receivers = [m for m in method.mechanisms if overrides(m, "receive")]
        self._senders = [m for m in method.mechanisms if overrides(m, "send")]
        self.average = w
        """the plain average of the client models of the last round"""
        self.step = torch.zeros_like(w)
        """what the last round added to w"""
        self.start = w
        """where the clients of this round start, which momentum may look ahead for"""
        self.rules: BufferRules | None = None
        """what uploaded buffers must be"""
        self.max_share = 1.0
        self._middle: Middle | None = None
        self.bound(None, clip=False)
        self.open(0, 0.0)

    def bound(self, norm: Bound | Mapping[str, Bound] | None, clip: bool) -> None:
        """Refuse uploads with longer vectors, or shorten these.

        A bound that goes by the median of earlier rounds lets the first uploads of all wait for each other.
        """
        names = ("update", *self.method.up, *(() if self.buffers is None else ("buffers",)))
        self.norm_bounds, self.clips = NormBounds(norm, names, self.method.name), clip

    def limit(self, max_share: float | None = None, aggregate: str = "mean") -> None:
        """Let no client weigh more than a share of its round, or take a middle in the place of the mean.

        An upload that weighs too much waits for others; for a middle all uploads of a round are held.
        """
        share = 1.0 if max_share is None else max_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise FedflatError(f"max_share={max_share!r}: give a share above 0 and at most 1, such as 0.5.")
        self.max_share, self._middle = float(share), Middle.of(aggregate, self.method)

    # -- state, as mechanisms see it ---------------------------------------------------------------

    def __getitem__(self, name: str) -> Value:
        self._check_kept(name)
        value = self.state[name]
        if value is None:
            raise FedflatError(
                f"'{name}' has no value before the first round; server.get('{name}') is None then."
            )
        return value

    def __setitem__(self, name: str, value: Value) -> None:
        self._check_kept(name)
        self.state[name] = value

    def _check_kept(self, name: str) -> None:
        if name not in self.state:
            raise FedflatError(
                f"No mechanism of {self.method.name} keeps '{name}' on the server: let server_state name it."
            )

    def get(self, name: str, default: Value | None = None) -> Value | None:
        """A value, or the default where there is none (yet)."""
        value = self.state.get(name)
        return default if value is None else value

    def vector(self, name: str) -> Tensor:
        """A named vector; it may be changed in place."""
        value = self[name]
        assert isinstance(value, Tensor), name
        return value

    def scalar(self, name: str, default: float | None = None) -> float:
        """A named number."""
        value = self.get(name, default)
        assert isinstance(value, float | int), name
        return float(value)

    def scalars(self) -> dict[str, float]:
        """All named numbers, such as FedGF's c or FedWMSAM's alpha."""
        return {k: float(v) for k, v in self.state.items() if isinstance(v, float | int)}

    def of(self, client: int) -> dict[str, Tensor]:
        """What the server keeps of one client; `keep` stores it again."""
        return dict(self._staged[client]) if client in self._staged else self.per_client.get(client)

    def keep(self, client: int, name: str, value: Tensor) -> None:
        """Keep a vector of one client; it becomes the server's and must not be changed afterwards."""
        self._staged[client] = {**self.of(client), name: value}
        if self.per_client.budget is not None:  # no room for vectors of a whole round
            self._commit()

    def _commit(self) -> None:
        """Make what is kept of clients last."""
        for client, vectors in self._staged.items():
            self.per_client.put(client, vectors, copy=False)
        self._staged.clear()

    # -- checkpoints -------------------------------------------------------------------------------

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next round depends on, but `per_client`: vectors and numbers by name."""
        vectors = {"w": self.w, "average": self.average, "step": self.step}
        if self.buffers is not None:
            vectors["buffers"] = self.buffers
        vectors |= {f"state {name}": v for name, v in self.state.items() if isinstance(v, Tensor)}
        numbers = {name: value for name, value in self.state.items() if not isinstance(value, Tensor)}
        past = {"lengths": self.norm_bounds.medians} if self.norm_bounds.factors else {}
        return vectors, {"state": numbers, **past}

    def restore(self, vectors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Be as at a snapshot."""
        there = {name: vector.to(self.w.device) for name, vector in vectors.items()}
        self.w, self.average, self.step = there["w"], there["average"], there["step"]
        self.buffers = there.get("buffers")
        self.state = {name: there.get(f"state {name}", numbers["state"].get(name)) for name in self.state}
        self.norm_bounds.medians |= copy.deepcopy(numbers.get("lengths", {}))

    def copy(self) -> Server:
        """A server that stands where this one does; what it goes through leaves this one alone."""
        twin = Server(self.w, self.method, self.clients, self.weighting, self.buffers)
        vectors, numbers = self.snapshot()
        twin.norm_bounds, twin.clips = copy.deepcopy(self.norm_bounds), self.clips
        twin.rules, twin.max_share, twin._middle = self.rules, self.max_share, self._middle
        twin.restore({name: vector.clone() for name, vector in vectors.items()}, numbers)
        twin.per_client = OverlayStore(self.per_client)
        return twin

    # -- sums of the round under way ---------------------------------------------------------------

    def add(self, name: str, vector: Tensor, weight: float = 1.0) -> None:
        """Add to a sum over this round's uploads."""
        if name in self._totals:
            self._totals[name].add_(vector, alpha=weight)
        else:
            self._totals[name] = vector * weight

    def total(self, name: str) -> Tensor:
        """A sum over this round's uploads."""
        if name not in self._totals:
            raise FedflatError(f"Nothing was added to '{name}' in this round: call server.add in `receive`.")
        return self._totals[name]

    def count(self, name: str, value: float) -> None:
        """Add to a sum of numbers over this round's uploads."""
        self._counts[name] = self._counts.get(name, 0.0) + value

    def counted(self, name: str) -> float:
        """A sum of numbers over this round's uploads."""
        if name not in self._counts:
            raise FedflatError(
                f"Nothing was counted as '{name}' in this round: call server.count in `receive`."
            )
        return self._counts[name]

    def notice(self, sentence: str) -> None:
        """Let a person know something of how the run goes, in `finish`: it is said as a warning, and logged."""
        self.notices.append(sentence)

    def rate_sum(self, upload: Upload) -> float:
        """`Σ_k η_k` over a client's local steps."""
        return self._rate_sum(self.lr, upload.steps)

    @property
    def delivered(self) -> Tensor:
        """The vector that is tested, measured and saved: w, unless a mechanism names another."""
        for mechanism in self.method.mechanisms:
            if overrides(mechanism, "deliver"):
                return vector_like(mechanism, "deliver", mechanism.deliver(self), self.w)
        return self.w

    def weight(self, upload: Upload) -> float:
        """The weight of an upload in the average, before division by `total_weight`."""
        return self.weigh(upload.samples)

    def weigh(self, samples: int) -> float:
        """The weight of a number of samples; of a client with too many it is known when the round is closed."""
        by_samples = self.weighting == "samples" and self._middle is None
        return min(float(samples), self._cap) if by_samples else 1.0

    # -- the round ---------------------------------------------------------------------------------

    def open(
        self, round: int, lr: float, rate_sum: Callable[[float, int], float] = lambda lr, steps: lr * steps
    ) -> None:
        """Begin a round; `rate_sum` gives `Σ_k η_k` of a number of steps, where the rate changes within a round."""
        self.round, self.lr, self._rate_sum = round, lr, rate_sum
        self.accepted = 0
        self.heard: set[int] = set()
        self.clipped: list[str] = []
        """what was shortened in this round"""
        self.notices: list[str] = []
        """what mechanisms say in this round"""
        self.refused: list[tuple[int, str]] = []
        """clients whose uploads were found too long only later in the round, and why"""
        self.undone: str | None = None
        """why the round does not count, once it is closed"""
        self._waiting: list[Upload] = []
        self._weights: dict[int, float] = {}
        """of all good uploads of this round by client, those that wait among them"""
        self._cap = math.inf
        """what no upload weighs more than"""
        self._staged: dict[int, dict[str, Tensor]] = {}
        """what is to be kept of clients when the round is done"""
        self.norm_bounds.open()
        self._learning = self.norm_bounds.unknown
        self.total_weight = 0.0
        self._agreed: tuple[Tensor, Tensor] | None = None
        """the first buffers that came, and where all others are the same"""
        self._totals: dict[str, Tensor] = {}
        self._counts: dict[str, float] = {}
        self.start = self.w
        for mechanism in self.method.mechanisms:
            self.start = vector_like(mechanism, "start", mechanism.start(self, self.start), self.w)
        self._common = {name: value for name in self.method.down if (value := self.state[name]) is not None}

    def download(self, client: int) -> Download:
        """What a client receives this round."""
        values: dict[str, Value] = dict(self._common)
        for mechanism in self._senders:
            values.update(named(mechanism, "send", mechanism.send(self, client)))
        return Download(self.round, self.lr, self.start, values, self.buffers)

    def receive(self, upload: Upload) -> None:
        """Take one upload into the round; raises `RejectedUpload` and leaves no trace if it is bad."""
        reason = fault_of(upload, self)
        if reason is None:
            upload, reason = within_bounds(upload, self)
        if reason:
            raise RejectedUpload(f"client {upload.client}, round {upload.round}: {reason}")
        self.heard.add(upload.client)
        if not self._learning:
            self._admit(upload)
            return
        self._wait(upload)
        if len(self._waiting) >= FIRST:
            self._learn()

    def _learn(self) -> None:
        """Go by the uploads of this first round to find out which of them are too long."""
        self._learning = False
        waiting, self._waiting = self._waiting, []
        names = self.norm_bounds.factors
        self.norm_bounds.learn(
            {name: [length_of(bounded_vector(u, name, self)) for u in waiting] for name in names}
        )
        for upload in waiting:
            upload, reason = within_bounds(upload, self)
            if reason is None:
                self._admit(upload)
            else:
                self.refused.append(
                    (upload.client, f"client {upload.client}, round {upload.round}: {reason}")
                )

    def _admit(self, upload: Upload) -> None:
        """Fold a good upload, or let it wait for others."""
        for name in self.norm_bounds.factors:
            self.norm_bounds.accept(name, length_of(bounded_vector(upload, name, self)))
        if self._middle is not None:
            self._wait(upload)
            if len(self._waiting) > HELD:
                raise FedflatError(
                    f"aggregate: a median or trimmed mean holds all uploads of a round, at most {HELD}. Let fewer "
                    "clients take part."
                )
        elif self.max_share < 1 and self.weighting == "samples":
            self._weights[upload.client] = self.weight(upload)
            self._wait(upload)
            self._fold_light()
        else:
            self._fold(upload)

    def _wait(self, upload: Upload) -> None:
        self._waiting.append(owned(upload) if upload.borrowed else upload)

    def _fold_light(self) -> None:
        """Fold, in client order, what weighs no more than it may whoever else answers."""
        most = largest_weight(list(self._weights.values()), self.max_share)
        heavy: list[Upload] = []
        for upload in self._waiting:
            if self.weight(upload) <= most and (not heavy or len(self._waiting) > IN_ORDER):
                self._fold(upload)
            else:
                heavy.append(upload)
        self._waiting = heavy

    def _fold_heavy(self) -> None:
        """Fold what still waits, with no more weight than it may have; with too few clients all weigh alike."""
        weights = list(self._weights.values())
        most = largest_weight(weights, self.max_share) or min(weights)
        total = sum(min(weight, most) for weight in weights)
        for upload in self._waiting:
            if (weight := self.weight(upload)) > most:
                self.clipped.append(
                    f"client {upload.client}, round {upload.round}: {upload.samples} samples would be "
                    f"{weight / sum(weights):.1%} of the round; it counts {most / total:.1%}."
                )
        self._cap = most
        for upload in self._waiting:
            self._fold(upload)
        self._waiting = []

    def _fold(self, upload: Upload) -> None:
        """Add one upload to the round's sums."""
        weight = self.weight(upload)
        self.accepted += 1
        self.total_weight += weight
        self.add("update", upload.update, weight)
        if upload.buffers is not None:
            self.add("buffers", upload.buffers, weight)
            self.count("buffers", weight)
            self._agree(upload.buffers, weight)
        for mechanism in self._receivers:
            mechanism.receive(self, upload)

    def close(self) -> None:
        """End the round: combine, step, finish.

        A round without uploads changes nothing, nor does one that would leave NaN or infinite values behind.
        """
        if self._learning:
            self._learn()
        if self._middle is None and self._waiting:
            self._fold_heavy()
        elif self._waiting:
            self._fold_middle(self._middle)
        if not self.accepted:
            return
        # vectors are replaced, but for the method's own, which mechanisms change in place
        before = self.w, self.average, self.step, self.buffers
        state = {name: v.clone() if isinstance(v, Tensor) else v for name, v in self.state.items()}
        try:
            self._advance()
            wrong = self._not_finite(state, before[-1])
        except (OverflowError, RuntimeError) as problem:
            if isinstance(problem, RuntimeError) and "without overflow" not in str(problem):
                raise
            wrong = f"{self.method.name}'s step"
        if wrong is None:
            self._commit()
            self.norm_bounds.close()
            return
        self.w, self.average, self.step, self.buffers = before
        self.state, self.accepted = state, 0
        self._staged.clear()
        self.undone = f"{wrong} would hold NaN or infinite values."
        if self.per_client.budget is not None and self.method.cost.server_per_client:
            raise Diverged(f"round {self.round}: {self.undone} {NOT_UNDONE}")

    def _advance(self) -> None:
        """From the sums of the round to the next model."""
        update = self.total("update").div_(self.total_weight)
        self.average = self.start + update
        for mechanism in self.method.mechanisms:
            update = vector_like(mechanism, "combine", mechanism.combine(self, update), self.w)
        self.step = update
        self.w = self.w + update
        if "buffers" in self._totals:
            self.buffers = self._next_buffers()
        untouched = Untouched(**{"server.w": self.w})
        for mechanism in self.method.mechanisms:
            mechanism.finish(self)
        untouched.check("`combine` is where the update can be changed")

    def _agree(self, buffers: Tensor, weight: float) -> None:
        """Note which entries of all uploaded buffers are alike, and how much weight left them as they were."""
        if self.rules is not None and self.buffers is not None:
            self.add("unchanged buffers", torch.eq(buffers, self.buffers).to(buffers.dtype), weight)
            self.count("unchanged buffers", weight)
        if self._agreed is None:
            self._agreed = buffers.clone(), torch.ones_like(buffers, dtype=torch.bool)
        else:
            first, same = self._agreed
            same.logical_and_(buffers == first)

    def _next_buffers(self) -> Tensor:
        """The average; but what no client changed stays as it was, and whole numbers that all agree on are that.

        A whole number that half of the round left as it was stays too: it may be an index, of which an average with
        one client's word would be none.
        """
        average = self.total("buffers").div_(self.counted("buffers"))
        assert self._agreed is not None
        assert self.buffers is not None
        first, same = self._agreed
        if self.rules is None:
            return torch.where(same & torch.eq(first, self.buffers), first, average)
        whole = ~self.rules.averaged
        average = torch.where(same & (torch.eq(first, self.buffers) | whole), first, average)
        constant = whole & (2 * self.total("unchanged buffers") >= self.counted("unchanged buffers"))
        return torch.where(constant, self.buffers, average)

    def _fold_middle(self, middle: Middle | None) -> None:
        """Take the middle of what was held as the round's update."""
        assert middle is not None
        waiting, self._waiting = self._waiting, []
        self.accepted = len(waiting)
        self.total_weight = 1.0
        self.add("update", middle([upload.update for upload in waiting]))
        if buffers := [upload.buffers for upload in waiting if upload.buffers is not None]:
            self.add("buffers", middle(buffers))
            self.count("buffers", 1.0)
            for one in buffers:
                self._agree(one, 1.0)

    def _not_finite(self, before: Mapping[str, Value | None], buffers: Tensor | None) -> str | None:
        """What the next round would depend on and is no longer finite; a number may have been infinite before."""
        there: dict[str, Value | None] = {"the model": self.w, "the average": self.average}
        if self.buffers is not None and not is_as_finite(self.buffers, buffers):
            return "the buffers"
        there |= {f"'{name}'": value for name, value in self.state.items()}
        for client, held in self._staged.items():
            there |= {f"'{name}' of client {client}": vector for name, vector in held.items()}
        odd = {f"'{name}'" for name, value in before.items() if value is not None and not is_finite(value)}
        return next(
            (n for n, value in there.items() if value is not None and n not in odd and not is_finite(value)),
            None,
        )
