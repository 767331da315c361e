"""What a run's tests compute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..core.flat import FlatModel
from ..core.metrics import STANDARD, Metric, Metrics, Score, make_metric
from ..core.monitor import Monitor
from ..core.tasks import CLASSIFICATION, MULTI_LABEL, REGRESSION, UNKNOWN, LossFunction, task_of
from ..data.federation import Federation
from ..errors import FedflatError
from ..methods.mechanism import overrides
from ..methods.method import Method

if TYPE_CHECKING:
    from .settings import TrainingSettings

BESIDE = {
    CLASSIFICATION: ("base-rate", "auroc", "f1"),
    MULTI_LABEL: ("auroc", "f1"),
    REGRESSION: ("mse", "mae", "r2"),
}
"""What is computed beside loss and accuracy where nothing is said; of classes, where accuracy alone misleads."""
MONITORED = {CLASSIFICATION: "accuracy", MULTI_LABEL: "f1", REGRESSION: "r2", UNKNOWN: "accuracy"}
OF_PARTS = ("accuracy_by_class", "accuracy_by_group", "class-counts")
"""What a test computes of classes and groups for other numbers, and is not kept itself."""
MOSTLY = 0.5
"""A class with a larger share of the test set makes accuracy a poor guide."""


def plan_evaluation(
    settings: TrainingSettings, federation: Federation, loss: LossFunction
) -> tuple[Metrics, Monitor]:
    """The metrics of a run's tests, and the one that the run is compared by."""
    task = _task(federation, loss)
    given = [make_metric(one) for one in settings.metrics]
    beside: Sequence[str] = BESIDE.get(task, ())
    if task == CLASSIFICATION and not _misleads(federation):
        beside = ()
    name = MONITORED[task] if settings.monitor == "auto" else settings.monitor
    own = {metric.name: metric for metric in given}
    monitored = own[name] if name in own else make_metric(name)
    counted = ("class-counts",) if task == CLASSIFICATION else ()
    return Metrics([*STANDARD, *counted, *(given or beside), monitored]), make_monitor(monitored)


def make_monitor(metric: Metric) -> Monitor:
    """A metric as the one to compare by; an error where its value is no number that is better or worse."""
    if metric.larger_is_better is None:
        raise FedflatError(
            f"monitor: {metric.name} is no number by which runs can be compared; choose another."
        )
    return Monitor(metric.name, metric.larger_is_better, metric.share)


def _task(federation: Federation, loss: LossFunction) -> str:
    """The task, as far as it shows without a model: outputs are taken to be shaped as the targets are."""
    targets = federation.targets()[-1]
    return task_of(loss, targets, targets)


def _misleads(federation: Federation) -> bool:
    """Whether there are two classes, or one that most test samples are of."""
    if federation.test is None:
        return False
    labels = federation.test.targets
    if labels.is_floating_point():
        return labels.ndim == 1 or labels.shape[-1] == 1  # of one logit
    return federation.classes == 2 or bool(torch.bincount(labels.flatten()).max() > MOSTLY * labels.numel())


def check_method(method: Method, model: FlatModel, federation: Federation, loss: LossFunction) -> None:
    """Whether the terms of the method are defined for the task, before anything is trained."""
    picky = [one for one in method.mechanisms if overrides(one, "check_task")]
    if not picky or federation.about().get("data") == "on the nodes":
        return
    inputs, targets = federation.client(0).batch(0, 1)
    with model.evaluating(), torch.no_grad():
        outputs = model.outputs(inputs)
    for mechanism in picky:
        mechanism.check_task(task_of(loss, outputs, targets), outputs)


def one_class_only(predicted: Sequence[int], actual: Sequence[int]) -> list[str]:
    """A sentence where a model gives every sample one class, and there are others."""
    said, there = ([c for c, count in enumerate(counts) if count] for counts in (predicted, actual))
    if len(said) != 1 or len(there) < 2:
        return []
    share = (actual[said[0]] if said[0] < len(actual) else 0) / sum(actual)
    return [
        f"The model predicts class {said[0]} for every test sample, so that its accuracy is the share of that class, "
        f"{share:.1%}: look at auroc and f1, train longer, or weigh classes alike with "
        "loss='cross-entropy(weights=balanced)'."
    ]


def score_row(score: Score) -> dict[str, Any]:
    """What a test found, as a round's row has it; without what tells test samples apart."""
    further = {name: value for name, value in score.items() if name not in ("loss", "accuracy", *OF_PARTS)}
    return {
        "accuracy": score.get("accuracy"),
        "loss": score.get("loss"),
        "metrics": plain_values(further),
    }


def plain_values(value: Any) -> Any:
    """Values of metrics as JSON can have them: what is not finite is None."""
    if isinstance(value, Mapping):
        return {name: plain_values(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
