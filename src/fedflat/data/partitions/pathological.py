"""Label skew by a fixed number of classes per client."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

import numpy as np

from ...core.randomness import generator
from ...errors import FedflatError
from .base import check_form, count_clients, rows_by_class
from .dealing import deal, deal_refilling, random_turns

Form = Literal["shards", "prior", "refill"]


@dataclass(frozen=True)
class Pathological:
    """Every client sees only a few classes, r of them. The forms:

    - `shards` (default; McMahan et al. 2017, in the manner of FedGMT's Path(r)): every class is cut into `r M / C`
      shards that are equal up to one sample, and every client is dealt r shards at random, perhaps several of one
      class. No sample goes twice, all are used. Where C does not divide r M, random classes are cut into one shard
      more than the others; where r M < C, some are not dealt at all.
    - `prior`: every client draws r different classes, and `N // M` samples with equal probability from them, no
      sample twice. A client whose classes are used up takes samples of others: the last draws can break the limit.
    - `refill`: the same, but a class that is used up is filled again. The limit holds, some samples occur several
      times and others never. This is FedWMSAM's Pathological(γ).
    """

    classes: int
    form: Form = "shards"

    def __post_init__(self) -> None:
        if not isinstance(self.classes, Integral) or self.classes < 1:
            raise FedflatError(f"pathological: classes must be a whole number from 1, not {self.classes}.")
        check_form("pathological", self.form, get_args(Form))

    def __str__(self) -> str:
        return f"pathological:{self.classes}" + ("" if self.form == "shards" else f":{self.form}")

    def split(
        self, labels: np.ndarray, clients: int | None, seed: int, groups: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """At most `classes` different labels each (mostly, in the prior form)."""
        classes = rows_by_class(labels)
        clients = count_clients(self, clients, len(labels))
        if self.classes > len(classes):
            raise FedflatError(f"{self}: there are only {len(classes)} classes; use at most that many.")
        rng = generator(seed, "partition pathological")
        if self.form == "shards":
            return self._shards(classes, clients, rng)
        chosen = rng.permuted(np.tile(np.arange(len(classes)), (clients, 1)), axis=1)[:, : self.classes]
        priors = np.zeros((clients, len(classes)))
        np.put_along_axis(priors, chosen, 1 / self.classes, axis=1)
        size = len(labels) // clients
        if self.form == "refill":
            return deal_refilling(priors, classes, size, rng)
        shuffled = [rng.permutation(rows) for rows in classes]
        return deal(priors, shuffled, random_turns(clients, size, rng), rng)

    def _shards(self, classes: list[np.ndarray], clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        deck = np.resize(rng.permutation(len(classes)), clients * self.classes)
        rng.shuffle(deck)
        shards: list[list[np.ndarray]] = []
        for rows, count in zip(classes, np.bincount(deck, minlength=len(classes)).tolist(), strict=True):
            parts = np.array_split(rng.permutation(rows), max(count, 1))
            shards.append([parts[k] for k in rng.permutation(count)])
        result = []
        for client, dealt in enumerate(deck.reshape(clients, self.classes).tolist()):
            result.append(np.sort(np.concatenate([shards[number].pop() for number in dealt])))
            if len(result[-1]) == 0:
                raise FedflatError(
                    f"{self}: client {client} gets no sample, since its classes are smaller than the number of "
                    f"their shards; use fewer clients or fewer classes for each."
                )
        return result
