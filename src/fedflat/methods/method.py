"""A method: an ordered list of mechanisms with a name, checked when it is built."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from ..errors import FedflatError
from .checks import named
from .mechanism import STAGES, Contract, Mechanism, Noise, overrides, registry


@dataclass(frozen=True)
class Cost:
    """What a method moves per active client and round, and computes per local step."""

    down: int
    """vectors sent to a client, the model among them"""
    down_scalars: tuple[str, ...]
    """numbers sent to a client"""
    up: int
    """vectors a client returns, its update among them"""
    forward: int
    backward: int
    server: tuple[str, ...]
    """vectors the server keeps beside the model"""
    client: tuple[str, ...]
    """vectors every client keeps"""
    server_per_client: tuple[str, ...]
    """vectors the server keeps for every client"""


@dataclass(frozen=True)
class Method:
    """An ordered list of mechanisms; the order of the list is the order of application in every phase."""

    name: str
    mechanisms: tuple[Mechanism, ...] = ()
    paper: str = ""

    def __init__(self, name: str, mechanisms: Iterable[Mechanism] = (), paper: str = "") -> None:
        if not isinstance(name, str):
            raise FedflatError(
                "Method: the name comes first, then a list: Method('mine', [LocalAscent(rho=0.05)])."
            )
        if not isinstance(mechanisms, Iterable):
            raise FedflatError(f"Method '{name}': give a list, [{mechanisms!r}].")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "mechanisms", tuple(mechanisms))
        object.__setattr__(self, "paper", paper)
        self._check_types()
        self._check_writers()
        self._check_readers()
        self._check_order()
        self._check_delivery()

    def __str__(self) -> str:
        """The composition, as it can be written on the command line."""
        return " + ".join(_written(m) for m in self.mechanisms) or "fedavg"

    @cached_property
    def contracts(self) -> tuple[Contract, ...]:
        """Every mechanism's contract, in order."""
        return tuple(_contract(m) for m in self.mechanisms)

    @cached_property
    def cost(self) -> Cost:
        """What it moves and computes, summed over its mechanisms' contracts."""
        contracts = self.contracts
        vectors = [name for m in self.mechanisms for name, scalar in _server_names(m) if not scalar]
        down = {name for c in contracts for name in c.down}
        each = [name for c in contracts for name in c.each]
        return Cost(
            down=1 + len(down & set(vectors)) + len(each),
            down_scalars=tuple(sorted(down - set(vectors))),
            up=1 + sum(len(c.up) for c in contracts),
            forward=1 + sum(c.forward for c in contracts),
            backward=1 + sum(c.backward for c in contracts),
            server=tuple(vectors),
            client=tuple(name for c in contracts for name in c.client),
            server_per_client=tuple(name for c in contracts for name in c.server_per_client),
        )

    @cached_property
    def noise(self) -> Noise | None:
        """The noise on everything that leaves; where others change an upload after it, none is certain."""
        leaving = [c for m, c in zip(self.mechanisms, self.contracts, strict=True) if overrides(m, "leave")]
        return leaving[-1].noise if leaving else None

    @cached_property
    def down(self) -> tuple[str, ...]:
        """Names of the server state that every client receives."""
        return tuple(dict.fromkeys(name for c in self.contracts for name in c.down))

    @cached_property
    def up(self) -> tuple[str, ...]:
        """Names of the vectors that clients upload beside their update."""
        return tuple(name for c in self.contracts for name in c.up)

    # -- checks ------------------------------------------------------------------------------------

    def _check_types(self) -> None:
        for thing in self.mechanisms:
            if not isinstance(thing, Mechanism):
                raise FedflatError(
                    f"Method '{self.name}': {thing!r} is not a mechanism. "
                    "Give instances, such as LocalAscent(rho=0.05)."
                )

    def _check_writers(self) -> None:
        """Two mechanisms must not write the same name."""
        places: dict[tuple[str, str], str] = {}
        for mechanism, contract in zip(self.mechanisms, self.contracts, strict=True):
            written = [
                *(("server state", name) for name, _ in _server_names(mechanism)),
                *(("client state", name) for name in contract.client),
                *(("per-client state of the server", name) for name in contract.server_per_client),
                *(("download", name) for name in contract.each),
                *(("upload", name) for name in contract.up),
            ]
            for place in written:
                if place in places:
                    raise FedflatError(
                        f"Method '{self.name}': {places[place]} and {mechanism.name} both write "
                        f"'{place[1]}' ({place[0]}). Keep one of them."
                    )
                places[place] = mechanism.name

    def _check_readers(self) -> None:
        """Every name that is read must be written by another mechanism."""
        for reader, contract in zip(self.mechanisms, self.contracts, strict=True):
            own = {name for name, _ in _server_names(reader)}
            others = [m for m in self.mechanisms if m is not reader]
            given = {name for m in others for name in _gives(m)}
            for name in (*contract.reads, *contract.down):
                if name not in given and name not in own:
                    raise FedflatError(
                        f"Method '{self.name}': {reader.name} reads '{name}', which no other "
                        f"mechanism of the method writes.{_givers_of(name)}"
                    )

    def _check_order(self) -> None:
        """Orders that would silently mean something else are refused."""
        for phase, stages in STAGES.items():
            staged = [
                (stages.index(contract.stage[phase]), mechanism.name)
                for mechanism, contract in zip(self.mechanisms, self.contracts, strict=True)
                if phase in contract.stage
            ]
            for (stage, name), (later, other) in itertools.pairwise(staged):
                if stage > later:
                    raise FedflatError(
                        f"Method '{self.name}': {name} must come after {other}, otherwise it would mean something "
                        f"else: {stages[later]} comes before {stages[stage]}. Write {other} first."
                    )

    def _check_delivery(self) -> None:
        """One vector is tested, measured and saved."""
        names = [m.name for m in self.mechanisms if overrides(m, "deliver")]
        if len(names) > 1:
            raise FedflatError(
                f"Method '{self.name}': {names[0]} and {names[1]} both name the vector to deliver. Keep one of them."
            )


def _contract(mechanism: Mechanism) -> Contract:
    contract = mechanism.contract()
    if not isinstance(contract, Contract):
        raise FedflatError(f"{mechanism.name}: contract returns {contract!r}; it must return Contract(...).")
    return contract


def _server_names(mechanism: Mechanism) -> list[tuple[str, bool]]:
    """The names of a mechanism's server state, and whether each is a scalar."""
    state = named(mechanism, "server_state", mechanism.server_state(torch.zeros(0)))
    return [(name, isinstance(value, float | int)) for name, value in state.items()]


def _gives(mechanism: Mechanism) -> set[str]:
    return {name for name, _ in _server_names(mechanism)} | set(_contract(mechanism).each)


def _givers_of(name: str) -> str:
    """` Add ...` with the known mechanisms that write a name."""
    givers = []
    for known in registry.values():
        try:
            if name in _gives(known()):
                givers.append(known.name)
        except Exception:  # has parameters without defaults, or is half written
            continue
    return f" Add {' or '.join(sorted(givers))}." if givers else ""


def noisy_mechanisms() -> str:
    """The names of the known mechanisms that add noise to what leaves a client."""
    return " or ".join(sorted(kind.name for kind in registry.values() if _adds_noise(kind)))


def _adds_noise(kind: type[Mechanism]) -> bool:
    try:
        return kind().contract().noise is not None
    except Exception:  # has parameters without defaults, or is half written
        return False


def _written(mechanism: Mechanism) -> str:
    given = [
        f"{f.name}={getattr(mechanism, f.name)!r}"
        for f in dataclasses.fields(mechanism)  # type: ignore[arg-type]
        if f.default is dataclasses.MISSING or getattr(mechanism, f.name) != f.default
    ]
    return f"{mechanism.name}({', '.join(given)})" if given else mechanism.name
