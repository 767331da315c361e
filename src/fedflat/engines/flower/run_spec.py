"""What the server agrees on with its clients before the first round: sent with every message, as plain text."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from ...client.optimisers import LocalOptimiser, read_optimiser
from ...errors import FedflatError
from ...methods.method import Method

FORMAT = 4
"""Raise it when terms or messages change; a client refuses others."""


@dataclass(frozen=True)
class RunSpec:
    """Everything that a client needs to know but the vectors of the round."""

    run: str
    """names the run: what a client keeps for one run is not seen by another"""
    method: str
    """as a composition"""
    local: dict[str, Any]
    model: str
    """a model's name, or empty where the app brings its own"""
    shape: tuple[int, ...]
    classes: int
    vocabulary: int | None
    seed: int
    buffers: str
    dtype: str
    report: bool
    """whether clients test what they receive and say how it did"""
    convolutions: str | None
    """the column of `models.fast` that the model's convolutions go by, chosen for the server's processor"""
    oracle: str
    """how gradients are computed, see `TrainingSettings`"""
    format: int = FORMAT

    @classmethod
    def of(
        cls,
        run: str,
        method: Method,
        optimiser: LocalOptimiser,
        model: str,
        shape: tuple[int, ...],
        classes: int,
        vocabulary: int | None,
        seed: int,
        buffers: str,
        dtype: str,
        report: bool,
        convolutions: str | None,
        oracle: str,
    ) -> RunSpec:
        """From the things they mean."""
        return cls(
            run,
            str(method),
            optimiser.to_dict(),
            model,
            shape,
            classes,
            vocabulary,
            seed,
            buffers,
            dtype,
            report,
            convolutions,
            oracle,
        )

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def read(cls, text: object) -> RunSpec:
        """From JSON; what does not fit is an error."""
        try:
            given = json.loads(str(text))
            if given.get("format") != FORMAT:
                raise FedflatError(
                    f"The server speaks format {given.get('format')}, this node {FORMAT}: install the same version "
                    "of fedflat on both."
                )
            terms = cls(**{**given, "shape": tuple(given["shape"])})
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError):
            raise FedflatError("The server's message has no readable terms.") from None
        # it becomes a directory's name
        if not isinstance(terms.run, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", terms.run):
            raise FedflatError("The server's message names a run that cannot be.")
        if not isinstance(terms.model, str) or not re.fullmatch(r"[A-Za-z0-9_-]*", terms.model):
            raise FedflatError(
                "The server's message names a model by more than a name: a node opens no file that a server asks "
                "for. Weights come with the message."
            )
        if terms.dtype not in ("float32", "float64"):
            raise FedflatError("The server's message names a type of numbers that cannot be.")
        if terms.oracle not in ("auto", "autograd"):
            raise FedflatError("The server's message names a way to compute gradients that cannot be.")
        return terms

    @property
    def optimiser(self) -> LocalOptimiser:
        """The clients' optimiser."""
        try:
            return read_optimiser(self.local)
        except (TypeError, AttributeError):
            raise FedflatError("The server's message has no readable terms.") from None
