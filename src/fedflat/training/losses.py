"""Losses by name: `cross-entropy`, `focal(gamma=2)`, `bce(weights=balanced)`, `mse` and others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.parameters import check_parameters, number
from ..core.tasks import CLASSIFICATION, MULTI_LABEL, REGRESSION, LossFunction, is_single
from ..data.federation import Federation
from ..errors import FedflatError, nearest
from ..methods.text import method_terms


@dataclass(frozen=True)
class NamedLoss:
    """A loss with the task that it is for."""

    task: ClassVar[str]

    def __post_init__(self) -> None:
        check_parameters(self, "loss")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch."""
        raise NotImplementedError


# -- of classes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CrossEntropy(NamedLoss):
    """`−log p` of the true class, with weights of classes, with some of the probability spread over all classes."""

    task = CLASSIFICATION
    weights: tuple[float, ...] | None = None
    label_smoothing: float = number(default=0.0, at_least=0, below=1)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weight = None if self.weights is None else outputs.new_tensor(self.weights)
        return F.cross_entropy(outputs, targets, weight, label_smoothing=self.label_smoothing)


@dataclass(frozen=True)
class Focal(NamedLoss):
    """`−(1 − p)^γ log p` of the true class; a single output is the logit of class 1."""

    task = CLASSIFICATION
    weights: tuple[float, ...] | None = None
    gamma: float = number(default=2.0, at_least=0)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if is_single(outputs):
            z = outputs.reshape(-1)
            outputs, targets = torch.stack([torch.zeros_like(z), z], dim=1), targets.reshape(-1).long()
        weight = None if self.weights is None else outputs.new_tensor(self.weights)
        plain = F.cross_entropy(outputs, targets, reduction="none")
        each = (1 - torch.exp(-plain)) ** self.gamma * plain
        return each.mean() if weight is None else (each * weight[targets]).sum() / weight[targets].sum()


@dataclass(frozen=True)
class Bernoulli(NamedLoss):
    """`−log p` of a label that is there or not, from one logit, or from each of several.

    Of two columns of logits the difference is the logit of class 1: then it is cross-entropy.
    """

    weights: tuple[float, ...] | None = None
    """of absent and of present labels"""
    several: bool = False

    @property
    def task(self) -> str:  # type: ignore[override]
        """Several labels, or one of two classes."""
        return MULTI_LABEL if self.several else CLASSIFICATION

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not self.several and outputs.ndim == 2 and outputs.shape[1] == 2:
            outputs = outputs[:, 1] - outputs[:, 0]
        wanted = targets.to(outputs.dtype)
        weight = None if self.weights is None else torch.where(wanted > 0, self.weights[1], self.weights[0])
        return F.binary_cross_entropy_with_logits(alike(outputs, targets), wanted, weight)


# -- of numbers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SquaredError(NamedLoss):
    """`(z − y)²`."""

    task = REGRESSION

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(alike(outputs, targets), targets.to(outputs.dtype))


@dataclass(frozen=True)
class AbsoluteError(NamedLoss):
    """`|z − y|`."""

    task = REGRESSION

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.l1_loss(alike(outputs, targets), targets.to(outputs.dtype))


@dataclass(frozen=True)
class Huber(NamedLoss):
    """`(z − y)²/2` up to an error of δ, from there on `δ (|z − y| − δ/2)`."""

    task = REGRESSION
    delta: float = number(default=1.0, above=0)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.huber_loss(alike(outputs, targets), targets.to(outputs.dtype), delta=self.delta)


def alike(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs in the shape of the targets: a column (n, 1) and a row (n) would silently be compared n times n."""
    if outputs.numel() != targets.numel():
        raise FedflatError(
            f"The model gives outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}: "
            "this loss needs one output for every target."
        )
    return outputs.reshape(targets.shape)


@dataclass(frozen=True)
class OwnLoss:
    """A person's own loss for a task that was named."""

    function: LossFunction
    task: str

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch."""
        return self.function(outputs, targets)


# -- by name ---------------------------------------------------------------------------------------

LOSSES: dict[str, Callable[..., NamedLoss]] = {
    "cross-entropy": CrossEntropy,
    "focal": Focal,
    "bce": Bernoulli,
    "mse": SquaredError,
    "mae": AbsoluteError,
    "huber": Huber,
}
"""The losses that are known by name."""
USUAL = {CLASSIFICATION: "cross-entropy", MULTI_LABEL: "bce", REGRESSION: "mse"}
"""The loss of a task where none is named."""
FITTING = {
    CLASSIFICATION: ("cross-entropy", "focal", "bce"),
    MULTI_LABEL: ("bce",),
    REGRESSION: ("mse", "mae", "huber"),
}


def parse_loss(text: str) -> tuple[str, dict[str, Any]]:
    """The name of a loss and its parameters; "auto" stays as it is."""
    try:
        terms = method_terms(text)
    except FedflatError:
        terms = []
    if len(terms) != 1:
        raise FedflatError(
            f"loss '{text}' is not possible: write one, such as cross-entropy or focal(gamma=2)."
        )
    ((name, given),) = terms
    name = name.replace("_", "-").lower()
    if name == "auto" and not given:
        return name, {}
    if name not in LOSSES:
        raise FedflatError(f"There is no loss '{name}'.{nearest(name, LOSSES)}")
    known = [one for one in inspect.signature(LOSSES[name]).parameters if one != "several"]
    for parameter, value in given.items():
        if parameter not in known:
            hint = nearest(parameter, known) if known else " It has no parameters."
            raise FedflatError(f"The loss {name} has no parameter '{parameter}'.{hint}")
        if parameter == "weights" and value not in ("balanced", None):
            raise FedflatError(
                f"loss '{text}': weights are balanced, or left out; others take a function in Python."
            )
    LOSSES[name](**{key: value for key, value in given.items() if key != "weights"})  # its ranges
    return name, given


def make_loss(loss: str | LossFunction, task: str, federation: Federation) -> tuple[LossFunction, str]:
    """The loss, and a sentence where the task was found out in a way that a person should know of."""
    if not isinstance(loss, str):
        if not callable(loss):
            raise FedflatError(f"loss must be a name, such as cross-entropy, or a function, not {loss!r}.")
        if loss is F.cross_entropy:
            federation.check_classes()
        return (loss if task == "auto" else OwnLoss(loss, task)), ""
    name, given = parse_loss(loss)
    said = ""
    if task == "auto":
        task, said = _infer(federation, name)
    name = USUAL[task] if name == "auto" else name
    if name not in FITTING[task]:
        raise FedflatError(f"The loss {name} is not one for {task}: choose {' or '.join(FITTING[task])}.")
    if task == CLASSIFICATION and name != "bce":
        federation.check_classes()
    given = {key: value for key, value in given.items() if value is not None}
    if "weights" in given:
        given["weights"] = _balanced(federation, task)
    if name == "bce":
        given["several"] = task == MULTI_LABEL
    plain = name == "cross-entropy" and not any(given.values())
    return (F.cross_entropy if plain else LOSSES[name](**given)), said


def _infer(federation: Federation, loss: str) -> tuple[str, str]:
    """The task, from what targets are; and a sentence where it is not classification."""
    targets = federation.targets()
    floats = all(y.is_floating_point() for y in targets)
    columns = targets[0].shape[1] if floats and targets[0].ndim == 2 else 1
    if loss in FITTING[REGRESSION]:
        return REGRESSION, ""
    if not floats or loss in ("cross-entropy", "focal"):
        return CLASSIFICATION, ""
    binary = all(bool(((y == 0) | (y == 1)).all()) for y in targets)
    if loss == "bce":
        return (MULTI_LABEL if columns > 1 else CLASSIFICATION), ""
    if columns > 1:
        if all(
            bool(torch.isclose(y.sum(-1), y.new_ones(())).all()) and bool((y >= 0).all()) for y in targets
        ):
            return CLASSIFICATION, ""  # a probability of each class
        if binary:
            return MULTI_LABEL, (
                f"The targets are {columns} columns of 0 and 1: the task is multi-label, with a loss of each logit. "
                "Say task='classification' or task='regression' if it is another."
            )
    elif all(bool((y == y.round()).all()) for y in targets):
        return CLASSIFICATION, ""  # which is refused with a remedy: these may be classes as well as numbers
    return REGRESSION, (
        "The targets are numbers, not classes: the task is regression, with the squared error as its loss. Give "
        "classes as whole numbers, targets.long(), if it is classification."
    )


def _balanced(federation: Federation, task: str) -> tuple[float, ...]:
    """`n / (C n_c)`: classes weigh alike together, however often they occur in the training data."""
    _, labels = federation.union().stored()
    least = 2 if task == MULTI_LABEL or labels.is_floating_point() else federation.classes
    counts = torch.bincount(labels.long().flatten(), minlength=least)
    return tuple((counts.sum() / (len(counts) * counts.clamp(min=1))).tolist())
