"""Data of many clients, and a test set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import FedflatError

Arrays = tuple[Any, Any]


@dataclass(frozen=True)
class Shard:
    """One client's samples: all rows of two tensors, or the rows that `index` names."""

    inputs: Tensor
    targets: Tensor
    index: Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets) if self.index is None else len(self.index)

    def take(self, order: np.ndarray | None) -> tuple[Tensor, Tensor]:
        """The samples in the given order, gathered once; None is the order they have."""
        rows = self.index
        if order is not None:
            positions = torch.from_numpy(order).to(self.targets.device)
            rows = positions if rows is None else rows[positions]
        if rows is None:
            return self.inputs, self.targets
        return self.inputs.index_select(0, rows), self.targets.index_select(0, rows)


class Federation:
    """Clients with their own samples, and a test set that belongs to nobody.

    Either every client brings its own arrays, or they share two and each owns some rows (`from_indices`).
    """

    def __init__(
        self,
        clients: Iterable[Arrays],
        test: Arrays | None = None,
        classes: int | None = None,
        name: str = "custom",
    ) -> None:
        pairs = [_pair(f"client {i}", pair) for i, pair in enumerate(clients)]
        if not pairs:
            raise FedflatError("A federation needs at least one client; the list is empty.")
        for number, (inputs, _) in enumerate(pairs):
            if inputs.shape[1:] != pairs[0][0].shape[1:]:
                raise FedflatError(
                    f"client {number} has samples of shape {tuple(inputs.shape[1:])}, client 0 of "
                    f"{tuple(pairs[0][0].shape[1:])}; all clients need the same."
                )
        self._shards: Sequence[tuple[Tensor, Tensor]] = pairs
        self._indices: Sequence[Tensor] | None = None
        self.test = None if test is None else _pair("the test set", test)
        self.name = name
        self._sizes = [len(targets) for _, targets in pairs]
        self.classes = classes if classes is not None else self._count_classes()

    @classmethod
    def from_indices(
        cls,
        train: Arrays,
        indices: Sequence[Any],
        test: Arrays | None = None,
        classes: int | None = None,
        name: str = "custom",
    ) -> Federation:
        """Clients that each own the named rows of one training set."""
        inputs, targets = _pair("the training set", train)
        rows = [torch.as_tensor(np.asarray(index), dtype=torch.int64) for index in indices]
        for number, index in enumerate(rows):
            if len(index) == 0:
                raise FedflatError(
                    f"client {number} has no samples. Use fewer clients or a milder partition."
                )
            if int(index.min()) < 0 or int(index.max()) >= len(targets):
                raise FedflatError(f"client {number} asks for row {int(index.max())} of {len(targets)}.")
        federation = cls([(inputs, targets)], test, classes, name)
        federation._indices = rows
        federation._sizes = [len(index) for index in rows]
        return federation

    def __len__(self) -> int:
        """The number of clients."""
        return len(self._sizes)

    @property
    def sizes(self) -> list[int]:
        """The number of samples of every client."""
        return self._sizes

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self._shards[0][0].shape[1:])

    def client(self, number: int) -> Shard:
        """One client's samples."""
        if self._indices is None:
            return Shard(*self._shards[number])
        return Shard(*self._shards[0], self._indices[number])

    def all_samples(self) -> tuple[Tensor, Tensor]:
        """The union of the clients' training data, in client order."""
        parts = [self.client(i).take(None) for i in range(len(self))]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Federation:
        """The same federation with floating inputs of another type, on another device."""

        def move(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            inputs, targets = pair
            kind = dtype if inputs.is_floating_point() else inputs.dtype
            label = dtype if targets.is_floating_point() else targets.dtype
            return inputs.to(device, kind), targets.to(device, label)

        result = Federation.__new__(Federation)
        result.__dict__.update(self.__dict__)
        result._shards = [move(pair) for pair in self._shards]
        result.test = None if self.test is None else move(self.test)
        if self._indices is not None:
            result._indices = [index.to(device) for index in self._indices]
        return result

    def _count_classes(self) -> int:
        targets = [t for _, t in self._shards] + ([] if self.test is None else [self.test[1]])
        if any(t.is_floating_point() for t in targets):
            return max(int(t[0].numel()) for t in targets)
        return 1 + max(int(t.max()) for t in targets)


def _pair(owner: str, pair: Arrays) -> tuple[Tensor, Tensor]:
    """Two tensors of equal, positive length; whole-number targets as int64, from 0."""
    try:
        inputs, targets = (torch.as_tensor(thing) for thing in pair)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise FedflatError(f"{owner}: give a pair (inputs, targets) of arrays ({problem}).") from None
    if len(inputs) != len(targets):
        raise FedflatError(f"{owner} has {len(inputs)} inputs but {len(targets)} targets.")
    if len(inputs) == 0:
        raise FedflatError(f"{owner} has no samples. Leave it out or give it some.")
    if not targets.is_floating_point():
        targets = targets.long()
        if int(targets.min()) < 0:
            raise FedflatError(f"{owner} has the label {int(targets.min())}; labels start at 0.")
    return inputs, targets
