"""Data of many clients, with a test set of the server's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from ..core.randomness import generator
from ..errors import FedflatError
from .augmentation import Pipeline, Plain

Arrays = tuple[Any, Any]

MOST_GROUPS = 100
"""Up to this many users or domains of a test set are told apart in every round's row."""


@dataclass(frozen=True)
class Shard:
    """Some samples: all rows of two tensors, or the rows that `index` names, and how they are prepared."""

    inputs: Tensor
    targets: Tensor
    index: Tensor | None = None
    pipeline: Pipeline = field(default_factory=Plain)
    groups: Tensor | None = None
    """the number of the user or domain of every row, where that is known"""

    def __len__(self) -> int:
        return len(self.targets) if self.index is None else len(self.index)

    def stored(self, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:
        """Samples as they are stored, from one position up to another."""
        if self.index is None:
            return self.inputs[first:last], self.targets[first:last]
        rows = self.index[first:last]
        return self.inputs.index_select(0, rows), self.targets.index_select(0, rows)

    def at(self, positions: Tensor) -> Shard:
        """The samples at some positions, in that order."""
        return replace(self, index=positions if self.index is None else self.index[positions])

    def thinned(self, most: int) -> Shard:
        """At most this many of the samples, evenly spaced."""
        if len(self) <= most:
            return self
        rows = torch.linspace(0, len(self) - 1, most, dtype=torch.float64, device=self.targets.device).long()
        return self.at(rows)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Samples in order, prepared for evaluation, a batch at a time."""
        for first in range(0, len(self), size):
            yield self.batch(first, size)

    def batch(self, first: int, size: int) -> tuple[Tensor, Tensor]:
        """Some samples in order, prepared for evaluation: a copy, whatever a model does with it."""
        inputs, targets = self.stored(first, first + size)
        prepared = self.pipeline.test(inputs)
        if self.index is not None:
            return prepared, targets
        return prepared.clone() if prepared is inputs else prepared, targets.clone()

    def group_numbers(self, first: int, size: int) -> Tensor | None:
        """The groups of some samples in order."""
        if self.groups is None:
            return None
        last = first + size
        return self.groups[first:last] if self.index is None else self.groups[self.index[first:last]]


class Federation:
    """Clients with their own samples, and a test set of the server's own.

    Either every client brings its own arrays, or they share two and each owns some rows (`from_indices`).
    """

    def __init__(
        self,
        clients: Iterable[Arrays],
        test: Arrays | None = None,
        classes: int | None = None,
        name: str = "custom",
        pipeline: Pipeline | None = None,
        vocabulary: int | None = None,
    ) -> None:
        if isinstance(clients, Mapping):
            raise FedflatError("clients are a mapping here; give a list of pairs, list(clients.values()).")
        pairs = [_pair(f"client {i}", pair) for i, pair in enumerate(clients)]
        if not pairs:
            raise FedflatError("A federation needs at least one client; the list is empty.")
        for number, (inputs, _) in enumerate(pairs):
            if inputs.shape[1:] != pairs[0][0].shape[1:]:
                raise FedflatError(
                    f"client {number} has samples of shape {tuple(inputs.shape[1:])}, client 0 of "
                    f"{tuple(pairs[0][0].shape[1:])}; all clients need the same."
                )
        self.name = name
        self.task = "classification"
        """or `"regression"`: every target is one number, not a class"""
        self.note = ""
        """what a person should know about the data"""
        self.preprocessing: dict[str, Any] | None = None
        """how raw samples became these, and what classes and clients are called, where that is known"""
        self.caveats: tuple[str, ...] = ()
        """what makes it another dataset than the published one, a sentence each"""
        self.pipeline: Pipeline = pipeline or Plain()
        self.vocabulary = vocabulary
        self._arrays: Sequence[tuple[Tensor, Tensor]] = pairs
        self._rows: Tensor | None = None
        """where clients share arrays: the rows of client 0, then of client 1, and so on"""
        self._ends = torch.tensor([len(targets) for _, targets in pairs]).cumsum(0)
        """how many samples the clients up to each one have together"""
        self._test = None if test is None else _pair("the test set", test)
        if self._test is not None and self._test[0].shape[1:] != pairs[0][0].shape[1:]:
            raise FedflatError(
                f"the test set has samples of shape {tuple(self._test[0].shape[1:])}, the clients of "
                f"{tuple(pairs[0][0].shape[1:])}; they need the same."
            )
        self.client_names: tuple[str, ...] = ()
        """what clients are called, where the data says so; else they are numbered"""
        self.test_owners: Tensor | None = None
        """the client that every test sample belongs to, where that is known"""
        self.origin: Federation | None = None
        """the clients whose samples were pooled, where they were"""
        self._test_groups: Tensor | None = None
        self.test_group_names: tuple[str, ...] = ()
        """the users or domains of the test set, where accuracy is recorded for each"""
        self.classes = classes if classes is not None else self._count_classes()
        if classes is not None:
            self._check_labels()

    @classmethod
    def from_indices(
        cls,
        train: Arrays,
        indices: Sequence[Any],
        test: Arrays | None = None,
        classes: int | None = None,
        name: str = "custom",
        pipeline: Pipeline | None = None,
        vocabulary: int | None = None,
    ) -> Federation:
        """Clients that each own the named rows of one training set.

        A two-dimensional tensor has a client per row; it takes no memory of its own, for a million clients too.
        """
        federation = cls([train], test, classes, name, pipeline, vocabulary)
        if len(indices) == 0:
            raise FedflatError("A federation needs at least one client; the list is empty.")
        if isinstance(indices, Tensor) and indices.ndim == 2:
            rows = _rows(0, indices.reshape(-1))
            sizes = torch.full((len(indices),), indices.shape[1])
        else:
            pieces = [_rows(number, index) for number, index in enumerate(indices)]
            sizes = torch.tensor([len(piece) for piece in pieces])
            rows = torch.cat(pieces)
        samples = len(federation._arrays[0][1])
        ends = sizes.cumsum(0)
        if int(sizes.min()) == 0:
            raise FedflatError(
                f"client {int(sizes.argmin())} has no samples. Use fewer clients or a milder partition."
            )
        wrong = (rows < 0) | (rows >= samples)
        if bool(wrong.any()):
            position = int(wrong.nonzero()[0])
            client = int(torch.searchsorted(ends, position, right=True))
            raise FedflatError(f"client {client} asks for row {int(rows[position])} of {samples}.")
        federation._rows, federation._ends = rows, ends
        return federation

    def __len__(self) -> int:
        """The number of clients."""
        return len(self._ends)

    @property
    def sizes(self) -> list[int]:
        """The number of samples of every client."""
        sizes: list[int] = self._ends.diff(prepend=self._ends.new_zeros(1)).tolist()
        return sizes

    @property
    def samples(self) -> int:
        """The number of samples of all clients together."""
        return int(self._ends[-1])

    def size(self, number: int) -> int:
        """The number of samples of one client."""
        first, last = self._span(number)
        return last - first

    def _span(self, number: int) -> tuple[int, int]:
        return int(self._ends[number - 1]) if number else 0, int(self._ends[number])

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one input, as a model sees it."""
        return self.pipeline.shape(tuple(self._arrays[0][0].shape[1:]))

    @property
    def test(self) -> Shard | None:
        """The test set."""
        return None if self._test is None else Shard(*self._test, None, self.pipeline, self._test_groups)

    def set_test_groups(self, numbers: Any, names: Sequence[str] = ()) -> None:
        """Say which user or domain every test sample is of, and what they are called.

        The accuracy of each is recorded then, unless there are more than `MOST_GROUPS`.
        """
        found, places = np.unique(np.asarray(numbers), return_inverse=True)
        if self._test is None or len(places) != len(self._test[1]):
            tests = 0 if self._test is None else len(self._test[1])
            raise FedflatError(f"{len(places)} groups for {tests} test samples; give one for each.")
        if len(found) <= MOST_GROUPS:
            self._test_groups = torch.from_numpy(places)
            self.test_group_names = tuple(names[n] if len(names) else str(n) for n in found.tolist())

    def client(self, number: int) -> Shard:
        """One client's samples."""
        if self._rows is None:
            return Shard(*self._arrays[number], None, self.pipeline)
        first, last = self._span(number)
        return Shard(*self._arrays[0], self._rows[first:last], self.pipeline)

    def union(self) -> Shard:
        """The training samples of all clients together, in client order."""
        if self._rows is not None:
            return Shard(*self._arrays[0], self._rows, self.pipeline)
        inputs = torch.cat([x for x, _ in self._arrays])
        return Shard(inputs, torch.cat([y for _, y in self._arrays]), None, self.pipeline)

    def labels_by_client(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The owner and the class of every sample, in client order; None where targets are no single classes."""
        if any(targets.is_floating_point() or targets.ndim > 1 for _, targets in self._arrays):
            return None
        owners = np.repeat(np.arange(len(self)), self.sizes)
        if self._rows is None:
            return owners, torch.cat([targets for _, targets in self._arrays]).cpu().numpy()
        return owners, self._arrays[0][1][self._rows].cpu().numpy()

    def about(self) -> dict[str, Any]:
        """What a run on other data, or on data partitioned in another way, has not in common."""
        about: dict[str, Any] = {"name": self.name, "clients": len(self), "samples": self.samples}
        about |= {"shape": list(self.sample_shape), "classes": self.classes}
        about |= {} if self.vocabulary is None else {"vocabulary": self.vocabulary}
        split = self.labels_by_client()
        if split is not None:
            owners, labels = split
            about["split"] = f"{crc32(labels.tobytes(), crc32(owners.tobytes())):08x}"
        return about

    def arrays(self) -> Iterator[Tensor]:
        """Everything that it holds, in an order that stays the same."""
        for inputs, targets in (*self._arrays, *([] if self._test is None else [self._test])):
            yield inputs
            yield targets
        yield self._ends
        if self._rows is not None:
            yield self._rows

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """The same federation with floating inputs of another type, on another device."""

        def move(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            inputs, targets = pair
            kind = dtype if inputs.is_floating_point() else inputs.dtype
            label = dtype if targets.is_floating_point() else targets.dtype
            return inputs.to(device, kind), targets.to(device, label)

        result = self._copy()
        result._arrays = [move(pair) for pair in self._arrays]
        result._test = None if self._test is None else move(self._test)
        result._test_groups = None if self._test_groups is None else self._test_groups.to(device)
        result.pipeline = self.pipeline.to(dtype)
        result._rows = None if self._rows is None else self._rows.to(device)
        result.test_owners = None if self.test_owners is None else self.test_owners.to(device)
        result.origin = None if self.origin is None else self.origin.to(dtype, device)
        return result

    def without_test(self) -> Self:
        """The federation without its test set, which nothing can look at then."""
        result = self._copy()
        result._test = result._test_groups = result.test_owners = None
        result.test_group_names = ()
        return result

    def with_validation(self, fraction: float, seed: int) -> Self:
        """The federation with a part of every client's samples taken out, which is its test set now.

        That is the fraction, rounded, of each client's samples, drawn at random: at least one, and never all of them.
        """
        result = self.without_test()
        if self.origin is not None:
            result.__dict__.update(self.origin.with_validation(fraction, seed).pooled().__dict__)
            return result
        sizes = np.array(self.sizes)
        held_sizes = np.minimum(np.maximum(np.rint(fraction * sizes), 1), sizes - 1).astype(int)
        if not held_sizes.any():
            raise FedflatError(
                f"validation={fraction:g}: no client has two samples, of which one could be held out. Leave it out."
            )
        owners = np.repeat(np.arange(len(sizes)), sizes)
        draws = generator(seed, "validation").random(len(owners))
        order = np.lexsort((draws, owners))  # every client's samples shuffled, client after client
        rank = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        held = np.zeros(len(owners), dtype=bool)
        held[order[rank < held_sizes[owners]]] = True
        everything, chosen = self.union(), torch.from_numpy(held)
        device = everything.targets.device
        result._test = everything.at(chosen.nonzero().flatten().to(device)).stored()
        result.test_owners = torch.from_numpy(owners[held]).to(device)
        kept = torch.from_numpy(sizes - held_sizes)
        result._ends = kept.cumsum(0)
        if self._rows is not None:
            result._rows = self._rows[~chosen.to(self._rows.device)]
        else:
            masks = [torch.from_numpy(one) for one in np.split(held, np.cumsum(sizes)[:-1])]
            result._arrays = [
                (x[~mask.to(x.device)], y[~mask.to(y.device)])
                for (x, y), mask in zip(self._arrays, masks, strict=True)
            ]
        return result

    def pooled(self) -> Self:
        """One client that has all samples; the test set knows whose its samples are as before."""
        result = self._copy()
        if self._rows is None:
            everything = self.union()
            result._arrays = [(everything.inputs, everything.targets)]
        result._ends, result.origin = self._ends[-1:], self
        return result

    def name_of(self, client: int) -> str:
        """What a client is called."""
        return self.client_names[client] if self.client_names else str(client)

    def _copy(self) -> Self:
        result = type(self).__new__(type(self))
        result.__dict__.update(self.__dict__)
        return result

    def targets(self) -> list[Tensor]:
        """The targets of every array, the test set's last."""
        return [targets for _, targets in self._owned_targets()]

    def _owned_targets(self) -> list[tuple[str, Tensor]]:
        """The targets of every array, and whose they are."""
        one = [
            ("the training set" if self._rows is not None else f"client {i}")
            for i in range(len(self._arrays))
        ]
        named = [(owner, targets) for owner, (_, targets) in zip(one, self._arrays, strict=True)]
        return named if self._test is None else [*named, ("the test set", self._test[1])]

    def _check_labels(self) -> None:
        for owner, targets in self._owned_targets():
            if not targets.is_floating_point() and int(targets.max()) >= self.classes:
                raise FedflatError(
                    f"{owner} has the label {int(targets.max())}, and there are {self.classes} classes; labels go "
                    f"from 0 to {self.classes - 1}."
                )

    def check_classes(self) -> None:
        """Whether targets are classes, or a probability of each: what cross-entropy takes."""
        for owner, targets in self._owned_targets():
            if targets.is_floating_point() and targets[0].numel() == 1:
                raise FedflatError(
                    f"{owner} has targets such as {float(targets[0]):g}, which are no classes: make them whole "
                    "numbers from 0, with targets.long(), or say task='regression', or give train() a loss for "
                    "numbers, such as mse_loss."
                )
            if targets.ndim == 2 and targets.shape[1] == 1 and not targets.is_floating_point():
                raise FedflatError(
                    f"{owner} has targets of shape {tuple(targets.shape)}: give one number for each sample, with "
                    "targets.squeeze(1)."
                )

    def _count_classes(self) -> int:
        targets = [targets for _, targets in self._owned_targets()]
        if any(t.is_floating_point() for t in targets):
            return max(int(t[0].numel()) for t in targets)
        return 1 + max(int(t.max()) for t in targets)


def _rows(number: int, index: Any) -> Tensor:
    """Row numbers as int64."""
    array = np.asarray(index)
    if len(array) and array.dtype.kind not in "iu":
        raise FedflatError(f"client {number}: give row numbers, not {array.dtype} values such as {array[0]}.")
    return torch.as_tensor(array, dtype=torch.int64)


def _pair(owner: str, pair: Arrays) -> tuple[Tensor, Tensor]:
    """Two tensors of equal, positive length; whole-number targets as int64, from 0."""
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        given = f"an array of shape {tuple(pair.shape)}" if hasattr(pair, "shape") else repr(pair)[:40]
        raise FedflatError(f"{owner}: give a pair (inputs, targets) of arrays, not {given}.")
    inputs, targets = _tensor(owner, "inputs", pair[0]), _tensor(owner, "targets", pair[1])
    if inputs.ndim == 0 or targets.ndim == 0:
        raise FedflatError(f"{owner}: give arrays with a row per sample, not single numbers.")
    if len(inputs) != len(targets):
        raise FedflatError(f"{owner} has {len(inputs)} inputs but {len(targets)} targets.")
    if len(inputs) == 0:
        raise FedflatError(f"{owner} has no samples. Leave it out or give it some.")
    if not targets.is_floating_point():
        targets = targets.long()
        if int(targets.min()) < 0:
            raise FedflatError(f"{owner} has the label {int(targets.min())}; labels start at 0.")
    return inputs, targets


def _tensor(owner: str, what: str, given: Any) -> Tensor:
    """Numbers as a tensor."""
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as problem:
        try:
            found = np.asarray(given)
        except ValueError:  # rows of unequal length
            found = np.empty(0)
        if found.dtype.kind in "USO" and found.size:
            remedy = (
                "number the classes from 0" if what == "targets" else "make them numbers, with astype(float)"
            )
            raise FedflatError(
                f"{owner}: the {what} are words or objects, such as {found.flat[0]!r:.40}; {remedy}."
            ) from None
        raise FedflatError(f"{owner}: the {what} cannot be made a tensor ({problem}).") from None
