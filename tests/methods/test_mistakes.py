"""What people get wrong when they first train in Python: each mistake is one sentence that says what to do."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedflat as ff

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 5))
Y = (X[:, 0] > 0).astype(int)
WORDS = np.where(Y, "yes", "no")
LOCAL = ff.LocalSGD(lr=0.1, batch_size=20)


def federation(x: Any = X, y: Any = Y, **more: Any) -> ff.Federation:
    return ff.Federation(clients=[(x, y), (X, Y)] if len(np.shape(x)) == 2 else [(x, y)], **more)


def train(*arguments: Any, **more: Any) -> ff.Run:
    return ff.train(arguments[0] if arguments else federation(), *arguments[1:], **{"rounds": 1, **more})


class Pairs(nn.Linear):
    """Returns more than its outputs."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


IMAGES = RNG.normal(size=(8, 12, 12))

MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "words as classes": (lambda: federation(y=WORDS), "client 0: the targets are words.*yes.*number the classes"),
    "a list of words": (lambda: federation(y=list(WORDS)), "number the classes from 0"),
    "objects": (lambda: federation(X.astype(object)), r"the inputs are words or objects.*astype\(float\)"),
    "rows of unequal length": (lambda: ff.Federation([([[1.0], [1.0, 2.0]], [0, 1])]), "the inputs cannot be made"),
    "floats as classes": (lambda: train(federation(y=Y.astype(float))), r"no classes.*targets\.long\(\).*mse_loss"),
    "classes in a column": (lambda: train(federation(y=Y[:, None])), r"\(40, 1\).*targets\.squeeze\(1\)"),
    "more labels than classes": (lambda: federation(y=Y + 1, classes=2), "label 2, and there are 2 classes.*0 to 1"),
    "labels in the test set": (lambda: federation(test=(X, Y + 4), classes=2), "the test set has the label 5"),
    "a mapping of clients": (lambda: ff.Federation({"a": (X, Y)}), r"list\(clients\.values\(\)\)"),
    "arrays for clients": (lambda: ff.Federation((X, Y)), r"client 0: give a pair .* of shape \(40, 5\)"),
    "three arrays": (lambda: ff.Federation([(X, Y, Y)]), "client 0: give a pair"),
    "whole numbers as inputs": (lambda: train(federation((10 * X).astype(int))), r"inputs\.float\(\)"),
    "channels last": (
        lambda: train(federation(np.stack([IMAGES] * 3, axis=3), Y[:8]), "cnn"),
        r"Put the channels first: inputs\.permute\(0, 3, 1, 2\)",
    ),
    "no channel": (lambda: train(ff.Federation([(IMAGES, Y[:8])]), "cnn"), r"inputs\.unsqueeze\(1\)"),
    "a table for a cnn": (lambda: train(federation(), "cnn"), r"the shape \(5,\)\. For a table, take mlp"),
    "a function for a method": (lambda: train(method=ff.fedgmt), r"call it: fedgmt\(\.\.\.\)"),
    "a class for a mechanism": (lambda: train(method=ff.LocalAscent), r"call it: LocalAscent\(\.\.\.\)"),
    "a class for a model": (lambda: train(model=nn.Linear), r"the class Linear.*Linear\(\.\.\.\)"),
    "no model": (lambda: train(model=3), "a name or an nn.Module, not 3"),
    "too few outputs": (lambda: train(model=nn.Linear(5, 1)), "Has the model an output for every class"),
    "two outputs": (lambda: train(model=Pairs(5, 2)), "must return one tensor"),
    "a mapping for SGD": (lambda: train(local={"lr": 0.1}), r"LocalSGD\(lr=\.\.\., epochs=\.\.\.\), not {"),
    "half a round": (lambda: train(rounds=2.5), "rounds must be a whole number, not 2.5"),
    "arrays for a federation": (lambda: train((X, Y)), r"not with a tuple.*Federation\(clients="),
    "a name for a federation": (lambda: train("digits"), r"not with a str.*federate\('digits'"),
    "a device that is not there": (lambda: train(device="cuda:99"), "'cuda:99' cannot be used here"),
    "arrays to deal out": (lambda: ff.federate((X, Y), "iid", 2), "not a tuple"),
    "a file to deal out": (lambda: ff.federate("a.csv", "iid", 2), r"read_table\('a\.csv', target="),
    "a number in quotes": (lambda: ff.federate("digits", "iid", "5"), "clients='5': give a whole number"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(name: str):
    action, says = MISTAKES[name]
    with pytest.raises(ff.FedflatError, match=says) as caught:
        action()
    assert "\n" not in str(caught.value)


def test_a_folder_is_read_first(tmp_path: Path):
    with pytest.raises(ff.FedflatError, match=r"read_images\('"):
        ff.federate(tmp_path, "iid", 2)


def test_what_looks_like_a_mistake_and_is_none():
    """Probabilities as targets, numbers with a loss for them, and a class that only the test set has."""
    assert train(federation(y=Y.astype(bool))).history
    soft = np.eye(2)[Y]
    assert train(ff.Federation([(X, soft)], test=(X, soft))).history
    numbers = ff.Federation([(X, X[:, 0])])
    loss = lambda outputs, targets: (outputs[:, 0] - targets).square().mean()  # noqa: E731
    assert train(numbers, nn.Linear(5, 1), loss=loss).history
    assert train(federation(test=(X, Y + 1))).history


def spoiled(column: np.ndarray) -> np.ndarray:
    return np.where(np.arange(5) == 2, column[:, None], X)


def ended(*given: Any, **more: Any) -> ff.Run:
    """A run, also one of which no upload of three rounds was finite."""
    try:
        return train(*given, **more)
    except ff.Diverged as problem:
        return problem.run


@pytest.mark.parametrize(
    ("clients", "lr", "says"),
    [
        ([np.nan, 0.0], 0.1, "client 0, round 0: .*NaN.* fill or drop them. 1 of 2 uploads"),
        ([np.nan, np.nan], 0.1, "fill or drop them. All 2 uploads .*on_bad_upload='stop'"),
        ([0.0, 0.0], 1e30, "A lower lr may help"),
    ],
)
def test_refused_uploads_are_told_once(clients: list[float], lr: float, says: str):
    data = ff.Federation([(spoiled(np.full(len(X), value)), Y) for value in clients])
    with pytest.warns(UserWarning, match=says) as told:
        run = ended(data, local=ff.LocalSGD(lr=lr, epochs=4), rounds=3)
    assert len(told) == 1
    assert told[0].filename == __file__  # where train() is called, not where it warns
    assert sum(len(row["rejected"]) for row in run.history) > 1


def test_a_good_run_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(rounds=2, local=LOCAL).history[-1]["rejected"] == []
