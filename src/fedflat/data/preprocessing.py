"""What is done to raw data before a model sees it: plain values that travel with the model, and how to apply them.

A run keeps them as `preprocessing.json` and in the metadata of its weights; docs/own-data.md says what the keys are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from ..errors import FedflatError, shortened
from . import augmentation
from .dataset import Dataset
from .features import Feature, Missing, Number, apply_columns
from .readers.columns import columns_of

FORMAT = 1
"""Of the file. Raise it when a reader of old ones would stumble."""
NAMED = 10_000
"""Up to this many clients their names are kept: the file is to be read by people, too."""
METADATA = "fedflat.preprocessing"
"""Its name in the metadata of a file of weights."""


class Preprocessing(BaseModel):
    """How raw samples become a model's inputs, and what its outputs are called."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1]
    dataset: str
    task: Literal["classification", "regression"] = "classification"
    classes: int = Field(ge=1)
    """outputs of the model; 1 for regression"""
    class_names: list[str] = []
    clients: list[str] | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input of the model."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if self.class_names and len(self.class_names) != self.classes:
            raise ValueError(f"{len(self.class_names)} names for {self.classes} classes")
        return self

    def apply(self, rows: Any, dtype: torch.dtype = torch.float32, where: object = "The input") -> Tensor:
        """Raw samples as the model's inputs, without any augmentation.

        Args:
            rows: of a table, a data frame, a dict of columns or a list of dicts; of images, pixels as bytes of shape
                (images, height, width, channels).
            dtype: of the result.
            where: what sentences call the rows.
        """
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return self.model_dump(mode="json", exclude_none=True)

    @staticmethod
    def from_dict(content: Any, where: object = "The preprocessing") -> Preprocessing:
        """What `to_dict` gave; refuses other versions and whatever does not fit."""
        if not isinstance(content, Mapping) or "format" not in content:
            raise FedflatError(f"{where} does not say which format it has; was it edited? Put it back.")
        if content["format"] != FORMAT:
            raise FedflatError(
                f"{where} has format {shortened(str(content['format']), 20)}, and this version of fedflat knows "
                f"{FORMAT}; use the version that wrote it."
            )
        kind = KINDS.get(str(content.get("kind")))
        if kind is None:
            raise FedflatError(f"{where} is of an unknown kind, {shortened(str(content.get('kind')), 20)}.")
        try:
            return kind.model_validate(content)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            said = f"'{place}': {problem['msg']}" if place else problem["msg"]
            raise FedflatError(f"{where} is not sound ({said}); was it edited? Put it back.") from None

    @staticmethod
    def from_json(text: str | bytes, where: object = "The preprocessing") -> Preprocessing:
        """The same from a text."""
        try:
            return Preprocessing.from_dict(json.loads(text), where)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
            raise FedflatError(f"{where} is not JSON; was it edited? Put it back.") from None


class Table(Preprocessing):
    """Rows of a table: `features` are the model's inputs, in order."""

    kind: Literal["table"]
    target: str
    client_column: str | None = None
    missing: Missing = "refuse"
    features: list[Feature] = Field(min_length=1)

    @property
    def inputs(self) -> list[str]:
        """What every input of the model is called, in order."""
        return [name for column in self.features for name in column.inputs]

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (len(self.inputs),)

    def apply(self, rows: Any, dtype: torch.dtype = torch.float32, where: object = "The input") -> Tensor:
        inputs = apply_columns(where, self.features, columns_of(rows), self.missing, new=True)
        return torch.from_numpy(inputs).to(dtype)


class Images(Preprocessing):
    """Images: `(pixel / scale − mean) / deviation`, channel by channel."""

    kind: Literal["images"]
    size: tuple[int, int]
    channels: Literal[1, 3]
    colour: Literal["L", "RGB"]
    resizing: Literal["bilinear"] = "bilinear"
    scale: Number = Field(gt=0)
    mean: list[Number]
    deviation: list[Annotated[Number, Field(gt=0)]]

    @model_validator(mode="after")
    def _check_channels(self) -> Self:
        if not len(self.mean) == len(self.deviation) == self.channels:
            raise ValueError("mean and deviation need a number for every channel")
        return self

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.channels, *self.size)

    def apply(self, rows: Any, dtype: torch.dtype = torch.float32, where: object = "The input") -> Tensor:
        pixels = torch.as_tensor(rows)
        wanted = (*self.size, self.channels)
        if pixels.ndim != 4 or tuple(pixels.shape[1:]) != wanted:
            raise FedflatError(
                f"{where} has the shape {tuple(pixels.shape)}; images here are of shape (images, height, width, "
                f"channels) with {wanted}."
            )
        # as in training, to the last bit
        unit = self.scale / 255
        mean, deviation = (tuple(value * unit for value in one) for one in (self.mean, self.deviation))
        return augmentation.Images(mean, deviation, dtype=dtype).test(pixels)


class Tensors(Preprocessing):
    """Tensors, or the tokens of a text, that were ready for the model."""

    kind: Literal["tensors", "text"]
    shape: list[int]
    vocabulary: int | None = None
    characters: str | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.shape)

    def apply(self, rows: Any, dtype: torch.dtype = torch.float32, where: object = "The input") -> Tensor:
        raise FedflatError(
            f"{where}: the model of '{self.dataset}' was trained on tensors of shape {self.input_shape}, and how "
            "they were made is not known here. Make them likewise in Python, and give them to ff.load(RUN).predict()."
        )


KINDS: dict[str, type[Preprocessing]] = {
    "table": Table,
    "images": Images,
    "text": Tensors,
    "tensors": Tensors,
}


def describe_preprocessing(dataset: Dataset, clients: Sequence[np.ndarray]) -> dict[str, Any]:
    """As plain values: how inputs were made, which class every output is, and who every client is.

    `clients` has the positions of every client's samples among the training samples.
    """
    shape = list(dataset.train[0].shape[1:])
    about: dict[str, Any] = {"format": FORMAT, "dataset": dataset.name}
    if dataset.preparation:
        about |= dataset.preparation
    elif isinstance(dataset.pipeline, augmentation.Images):
        about |= of_images(shape, 255, dataset.pipeline.mean, dataset.pipeline.std)
    else:
        about |= {"kind": "tensors" if dataset.vocabulary is None else "text", "shape": shape}
    if dataset.vocabulary is not None:
        about["vocabulary"] = dataset.vocabulary
    about |= {"task": dataset.task, "classes": dataset.classes, "class_names": list(dataset.class_names)}
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
