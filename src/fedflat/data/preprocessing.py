"""What was done to raw data before a model saw it: enough to do the same to a new row or image.

A run keeps it as `preprocessing.json`; docs/own-data.md says what its keys are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .augmentation import Images
from .dataset import Dataset

FORMAT = 1
"""Of the file. Raise it when a reader of old ones would stumble."""
NAMED = 10_000
"""Up to this many clients their names are kept: the file is to be read by people, too."""


def describe_preprocessing(dataset: Dataset, clients: Sequence[np.ndarray]) -> dict[str, Any]:
    """As plain values: how inputs were made, which class every output is, and who every client is.

    `clients` has the positions of every client's samples among the training samples.
    """
    shape = list(dataset.train[0].shape[1:])
    about: dict[str, Any] = {"format": FORMAT, "dataset": dataset.name}
    if dataset.preparation:
        about |= dataset.preparation
    elif isinstance(dataset.pipeline, Images):
        about |= of_images(shape, 255, dataset.pipeline.mean, dataset.pipeline.std)
    else:
        about |= {"kind": "tensors" if dataset.vocabulary is None else "text", "shape": shape}
    if dataset.vocabulary is not None:
        about["vocabulary"] = dataset.vocabulary
    about |= {"classes": dataset.classes, "class_names": list(dataset.class_names)}
    names = client_names(dataset, clients)
    return {**about, "clients": names} if names is not None else about


def of_images(
    shape: Sequence[int], scale: float, mean: Sequence[float], deviation: Sequence[float]
) -> dict[str, Any]:
    """Images of a shape (height, width, channels): `(pixel / scale − mean) / deviation`, channel by channel."""
    height, width, channels = shape
    return {
        "kind": "images",
        "size": [height, width],
        "channels": channels,
        "colour": "L" if channels == 1 else "RGB",
        "resizing": "bilinear",
        "scale": scale,
        "mean": list(mean),
        "deviation": list(deviation),
    }


def client_names(dataset: Dataset, clients: Sequence[np.ndarray]) -> list[str] | None:
    """The user or domain that every client is; None where clients are not that."""
    if dataset.groups is None or not dataset.group_names or len(clients) > NAMED:
        return None
    owners = [np.unique(dataset.groups[positions]) for positions in clients]
    numbers = [int(found[0]) for found in owners if len(found) == 1]
    if len(numbers) < len(clients) or len(set(numbers)) < len(numbers):
        return None
    return [dataset.group_names[number] for number in numbers]
