"""A federation whose data is elsewhere: the server knows who there is and what samples look like, and no sample."""

from __future__ import annotations

from typing import Any, NoReturn, Self

import torch

from ...data.federation import Arrays, Federation, Shard
from ...errors import FedflatError


class RemoteFederation(Federation):
    """Clients by number; perhaps a test set that the server has of its own."""

    def __init__(
        self,
        clients: int,
        shape: tuple[int, ...],
        classes: int,
        vocabulary: int | None = None,
        test: Federation | Arrays | None = None,
        name: str = "elsewhere",
    ) -> None:
        held = test if isinstance(test, Federation) else None
        super().__init__([(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.int64))], classes=classes)
        self.name, self.vocabulary = name, vocabulary
        self._clients, self._shape = clients, tuple(shape)
        if held is not None:
            self.pipeline, self._test = held.pipeline, held._test
            self._test_groups, self.test_group_names = held._test_groups, held.test_group_names
        elif test is not None:
            self._test = Federation([test], classes=classes)._arrays[0]  # type: ignore[list-item]
        if self.test is not None and self.pipeline.shape(tuple(self.test.inputs.shape[1:])) != self._shape:
            raise FedflatError(
                f"The server's test set has samples of shape "
                f"{self.pipeline.shape(tuple(self.test.inputs.shape[1:]))}, the clients of {self._shape}; they need "
                "the same."
            )

    def __len__(self) -> int:
        """The number of clients."""
        return self._clients

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one input, as a model sees it."""
        return self._shape

    def about(self) -> dict[str, Any]:
        """What is known here, and what a run with other clients has not in common."""
        about: dict[str, Any] = {"name": self.name, "clients": len(self), "data": "on the nodes"}
        about |= {"shape": list(self._shape), "classes": self.classes}
        if self.vocabulary is not None:
            about["vocabulary"] = self.vocabulary
        return {**about, "test_samples": 0 if self.test is None else len(self.test)}

    def labels_by_client(self) -> None:
        """Unknown: the labels are on the nodes."""
        return None

    def size(self, number: int) -> int:
        """Unknown: the labels are on the nodes."""
        self._elsewhere()

    def client(self, number: int) -> Shard:
        """Its samples are not here."""
        self._elsewhere()

    def with_validation(self, fraction: float, seed: int) -> Self:
        """Samples are not here."""
        self._elsewhere()

    def union(self) -> Shard:
        """Samples are not here."""
        self._elsewhere()

    def _elsewhere(self) -> NoReturn:
        raise FedflatError("The clients' data is on their own nodes: the server cannot look at it.")
