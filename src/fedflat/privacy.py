"""How private a training is: from the mechanisms' contracts, never from memory.

With `private-uploads` every vector that leaves is clipped to C and carries noise of deviation σC. Other data in a
client's place can move it by 2C at most. V vectors a round over T rounds are thus together one Gaussian mechanism
with multiplier `σ/(2√(V T))`, whatever the rounds have to do with each other; its ε at a given δ is computed exactly
(Balle and Wang 2018) by the library dp-accounting.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import FedflatError, MissingExtra
from .local_sgd import LocalSGD
from .mechanisms import PrivateUploads
from .method import Method
from .participation import Participation


@dataclass(frozen=True)
class Leaving:
    """What one method lets out of a client every round."""

    vectors: tuple[str, ...]
    """each as long as the model"""
    numbers: tuple[str, ...]
    kept: tuple[str, ...]
    """vectors that stay on the client"""
    held: tuple[str, ...]
    """vectors that the server keeps of every single client"""
    private: PrivateUploads | None


def leaving(method: Method) -> Leaving:
    """What leaves a client, from the contracts of a method's mechanisms."""
    noisy = [m for m in method.mechanisms if isinstance(m, PrivateUploads)]
    numbers = ("steps",) if noisy else ("samples", "steps", "training loss", "passes")
    cost = method.cost
    return Leaving(
        ("update", *method.up), numbers, cost.client, cost.server_per_client, noisy[0] if noisy else None
    )


def uncovered(method: Method, local: LocalSGD, buffers: str, has_buffers: bool) -> list[str]:
    """Sentences for everything that leaves a client without noise; empty if nothing does."""
    private = leaving(method).private
    if private is None:
        return [f"{method.name} uploads vectors as they are: add private-uploads(clip=1, noise=1)."]
    found = []
    if not private.noise:
        found.append("noise=0 hides nothing: give a multiplier above 0.")
    if local.steps is None:
        found.append("The number of local steps tells how many samples a client has: give steps, not epochs.")
    if has_buffers and buffers in ("average", "reset"):
        found.append(
            f"BatchNorm statistics are uploaded as they are (buffers='{buffers}'): use buffers='server'."
        )
    return found


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
    local: LocalSGD,
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


def table() -> str:
    """What leaves a client with every method by name, in Markdown."""
    from .methods import METHODS

    lines = [
        "| method | a client uploads | stays on the client | the server keeps of every client |",
        "| --- | --- | --- | --- |",
    ]
    for make in METHODS.values():
        method = make()
        found = leaving(method)
        cells = [", ".join(names) or "–" for names in (found.vectors, found.kept, found.held)]
        lines.append(f"| {method.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_table(page: Path) -> None:
    """Put the table into a page, between its marks."""
    before, begin, rest = page.read_text("utf-8").partition("<!-- leaving -->\n")
    _, end, after = rest.partition("<!-- /leaving -->")
    if not begin or not end:
        raise FedflatError(
            f"{page} has no place for the table: write <!-- leaving --> and <!-- /leaving -->."
        )
    page.write_text(f"{before}{begin}\n{table()}\n\n{end}{after}", "utf-8")


if __name__ == "__main__":
    write_table(Path(sys.argv[1]))
