"""How private a training is: from what is in a client's reply, never from memory.

A small client goes through the same code as a client on a node, several times: with other samples, and with another
secret. What is in its reply is all that leaves (`reply.py`). What differs with the samples depends on them;
what differs with the secret too carries noise.

With `private-uploads` every vector that leaves is clipped to C and carries noise of deviation σC. Other data in a
client's place can move it by 2C at most. V vectors a round over T rounds are thus together one Gaussian mechanism
with multiplier `σ/(2√(V T))`, whatever the rounds have to do with each other; its ε at a given δ is computed exactly
(Balle and Wang 2018) by the library dp-accounting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...client.optimisers import LocalOptimiser, LocalSGD
from ...client.round import ClientRound
from ...core.flat import FlatModel
from ...data.federation import Federation
from ...errors import FedflatError, MissingExtra
from ...methods.mechanism import Noise
from ...methods.method import Method, noisy_mechanisms
from ...server.participation import Participation
from ...server.server import Server

STEPS = LocalSGD(steps=3)
"""Local training whose number of steps is given."""

MEANING = {
    ("vectors", "update"): "what training changed in the model",
    ("vectors", "buffers"): "BatchNorm statistics",
    ("numbers", "client"): "which client this is",
    ("numbers", "round"): "which round was asked for",
    ("numbers", "samples"): "how many samples it trains on; 1 where that is withheld",
    ("numbers", "steps"): "how many steps it took",
    ("numbers", "forward"): "forward passes; 0 where that is withheld",
    ("numbers", "backward"): "backward passes; 0 where that is withheld",
    ("numbers", "spared_forward"): "those that did not have to be computed",
    ("numbers", "spared_backward"): "those that did not have to be computed",
    ("numbers", "loss"): "mean training loss; NaN where that is withheld",
    ("report", "accuracy"): "of the model that it received, on its own test set",
    ("report", "loss"): "of the model that it received, on its own test set",
    ("report", "samples"): "how many samples that is the result of",
    ("receipt", "round"): "the round after which it last kept a state",
    ("receipt", "mark"): "which order that state came from: a keyed hash of the order",
    ("hello", "client"): "which client this is",
    ("hello", "shape"): "of a sample",
    ("hello", "scalar"): "whether a sample is one number",
    ("hello", "classes"): "how many there are",
    ("hello", "vocabulary"): "how many words there are, if samples are words",
    ("hello", "samples"): "how many there are",
}
"""What everything that leaves is. A method's own vectors are not listed: their meaning is on the method's page."""


@dataclass(frozen=True)
class Field:
    """One thing that leaves a client."""

    part: str
    """of the reply: vectors, numbers, report or receipt; hello is said once, before the first round"""
    name: str
    meaning: str
    depends: bool
    """whether it is another with other samples"""
    noisy: bool
    """whether it depends on them and carries noise"""

    @property
    def covered(self) -> bool:
        """Whether ε covers it: it says nothing about samples, or carries noise."""
        return self.noisy or not self.depends

    @property
    def kind(self) -> str:
        """What it tells of samples, in words."""
        return "nothing" if not self.depends else "with noise" if self.noisy else "as it is"


@dataclass(frozen=True)
class Leaving:
    """What one method lets out of a client every round."""

    fields: tuple[Field, ...]
    """everything in a reply"""
    kept: tuple[str, ...]
    """vectors that stay on the client"""
    held: tuple[str, ...]
    """vectors that the server keeps of every single client"""
    private: Noise | None

    @property
    def vectors(self) -> tuple[str, ...]:
        """Those as long as the model."""
        return tuple(f.name for f in self.fields if f.part == "vectors" and f.name != "buffers")

    @property
    def numbers(self) -> tuple[str, ...]:
        """Everything else that depends on samples."""
        told = {"numbers": "{}", "report": "{} in the report", "vectors": "{}"}
        return tuple(
            told[f.part].format(f.name)
            for f in self.fields
            if f.depends and f.part in told and f.name not in self.vectors
        )


def leaving(
    method: Method,
    local: LocalOptimiser = STEPS,
    buffers: str = "average",
    has_buffers: bool = False,
    report: bool = True,
) -> Leaving:
    """What leaves a client, found by looking at replies."""
    # enough steps to see some samples again, which some methods need fewer passes for
    steps, batch_size = None if local.steps is None else 12, None if local.batch_size is None else 2
    small = LocalSGD(lr=0.05, epochs=local.epochs, steps=steps, batch_size=batch_size)
    places = [*((data, 0) for data in range(DATASETS)), (0, 1)]
    replies = [_reply(method, small, buffers, has_buffers, report, *place) for place in places]
    found = []
    names = dict.fromkeys((part, name) for reply in replies for part in reply for name in reply[part])
    for part, name in names:
        *others, drawn_anew = [reply.get(part, {}).get(name) for reply in replies]
        # an accuracy may be the same by chance
        depends = part in ("vectors", "report") or any(not _same(other, others[0]) for other in others)
        noise = depends and not _same(others[0], drawn_anew)
        if part == "vectors" and name in method.up:
            meaning = "a vector of the method's own"
        elif (part, name) in MEANING:
            meaning = MEANING[part, name]
        else:
            raise FedflatError(f"A client's reply holds '{name}' ({part}), which is not described.")
        found.append(Field(part, name, meaning, depends, noise))
    cost = method.cost
    return Leaving(tuple(found), cost.client, cost.server_per_client, method.noise)


def withholds_samples(method: Method) -> bool:
    """Whether no reply says how many samples there are."""
    return method.noise is not None


def hello(method: Method) -> tuple[Field, ...]:
    """What a node says before the first round."""
    from .reply import hello_of

    names = hello_of(0, _samples(0), samples=not withholds_samples(method))
    return tuple(Field("hello", name, MEANING["hello", name], name != "client", False) for name in names)


DATASETS = 3
"""That a small client's replies are compared with: of other samples, other labels and another number of them."""


def _samples(data: int) -> Federation:
    rng = torch.Generator().manual_seed(data)
    count = 4 + 4 * data
    inputs = torch.randn(count, 3, generator=rng) + data
    targets = torch.randint(3, (count,), generator=rng)
    return Federation([(inputs, targets)], classes=3)


def _reply(
    method: Method,
    local: LocalOptimiser,
    buffers: str,
    has_buffers: bool,
    report: bool,
    data: int,
    secret: int,
) -> Mapping[str, Mapping[str, Any]]:
    """What a small client answers in its first round, by the code of a real one."""
    from ...core.randomness import torch_seeded
    from .client_state import mark_of
    from .reply import reply_of, take_part

    with torch_seeded(0, "weights"):
        module = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4) if has_buffers else nn.Tanh(), nn.Linear(4, 3)
        )
    flat = FlatModel(module)
    server = Server(flat.vector.clone(), method, 1, buffers=flat.read_buffers())
    server.open(0, local.lr, local.rate_sum)
    download = server.download(0)
    training = ClientRound(flat, method, local, F.cross_entropy, 0, buffers)
    key = training.secret = bytes([secret]) * 32
    upload = take_part(training, 0, _samples(data), download, {}, report)
    order: dict[str, dict[str, object]] = {
        "order": {"round": 0, "lr": download.lr},
        "common": {"start": download.start},
    }
    return reply_of(upload, (0, mark_of(order, key)) if upload.state else None)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other) or (one != one and other != other)


def steps_tell(local: LocalOptimiser) -> bool:
    """Whether the number of steps tells the number of samples."""
    return local.steps is None and local.batch_size is not None


def leaving_buffers(policy: str, has_buffers: bool) -> bool:
    """Whether BatchNorm statistics are uploaded."""
    return has_buffers and policy in ("average", "reset")


def uncovered(method: Method, local: LocalOptimiser, buffers: str, has_buffers: bool) -> list[str]:
    """Sentences for everything that leaves a client without noise; empty if nothing does."""
    found = leaving(method, local, buffers, has_buffers)
    if found.private is None:
        return [f"{method.name} uploads vectors as they are: add {noisy_mechanisms()}(clip=1, noise=1)."]
    if not found.private.noise:
        return ["noise=0 hides nothing: give a multiplier above 0."]
    bare = [field.name for field in found.fields if not field.covered]
    remedies = {
        "steps": "The number of local steps tells how many samples a client has: give steps, not epochs.",
        "buffers": f"BatchNorm statistics are uploaded as they are (buffers='{buffers}'): use buffers='server'.",
    }
    return [remedies.get(name, f"'{name}' is uploaded as it is.") for name in bare]


@dataclass(frozen=True)
class Spent:
    """What a run costs the client that takes part most often."""

    epsilon: float
    delta: float
    rounds: int
    """in which that client takes part"""
    vectors: int
    """that it uploads in each"""


def spent(
    method: Method,
    local: LocalOptimiser,
    participation: Participation,
    clients: int,
    rounds: int,
    delta: float = 1e-5,
    seed: int = 0,
    buffers: str = "average",
    has_buffers: bool = False,
) -> Spent:
    """The ε of a run at a δ; refused where anything uncovered leaves a client.

    Nothing is gained by chance here: the server sees who takes part, so ε is that of the client that does most often.
    """
    if not 0 < delta < 1:
        raise FedflatError(f"delta={delta}: give a probability between 0 and 1, well below 1 / clients.")
    problems = uncovered(method, local, buffers, has_buffers)
    if problems:
        raise FedflatError(f"No ε can be stated for {method.name}. {' '.join(problems)}")
    found = leaving(method)
    assert found.private is not None
    counts = [0] * clients
    for index in range(rounds):
        for client in participation.choose(index, clients, seed):
            counts[client] += 1
    most, vectors = max(counts), len(found.vectors)
    epsilon = _epsilon(found.private.noise / (2 * math.sqrt(most * vectors)), delta) if most else 0.0
    return Spent(epsilon, delta, most, vectors)


def _epsilon(multiplier: float, delta: float) -> float:
    try:
        import dp_accounting
    except ImportError:
        raise MissingExtra("dp-accounting", "privacy", "Privacy accounting") from None
    return float(dp_accounting.get_epsilon_gaussian(multiplier, delta))
