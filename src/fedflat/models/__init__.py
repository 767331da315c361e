"""The papers' architectures, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import nn

from ..core.randomness import torch_seeded
from ..errors import FedflatError, nearest
from .char_lstm import char_lstm
from .cnn import cnn, lenet
from .conv.conv2d import PLAIN, set_column
from .fasttext import fasttext
from .mlp import mlp, mlp_200_100
from .pretrained import swin_b, swin_s, vit_b16
from .resnet import DEPTHS, NORMS, STEMS, variant
from .vgg import vgg11
from .vit import vit_small
from .weights import load_weights

if TYPE_CHECKING:
    from ..data.federation import Federation


class Builder(Protocol):
    """Makes a model for samples of a shape; the first line of its docstring describes the model."""

    def __call__(self, shape: tuple[int, ...], classes: int, vocabulary: int | None = None) -> nn.Module:
        """The model, its weights drawn from torch's generator."""


MODELS: dict[str, Builder] = {
    "mlp": mlp,
    "mlp-200-100": mlp_200_100,
    "cnn": cnn,
    "lenet": lenet,
    **{
        f"resnet{depth}{stem}{norm}": variant(depth, NORMS[norm], STEMS[stem])
        for depth in DEPTHS
        for stem in STEMS
        for norm in NORMS
    },
    "vgg11": vgg11,
    "vit-small": vit_small,
    "fasttext": fasttext,
    "char-lstm": char_lstm,
    "vit-b16": vit_b16,
    "swin-s": swin_s,
    "swin-b": swin_b,
}


def model_names() -> list[str]:
    """The names that `build_model` knows."""
    return list(MODELS)


def describe_model(name: str) -> str:
    """One line about a model."""
    return (_builder(name).__doc__ or "").partition("\n")[0]


def build_model(name: str, federation: Federation, seed: int, fast: bool = True) -> nn.Module:
    """A named model for a federation's samples, its weights drawn from the seed.

    `name:file` starts from the weights in a file, say a former run's `model.safetensors`; see `load_weights`.
    Convolutions are those that are quickest on this processor, or PyTorch's own with `fast=False`.
    """
    name, _, file = name.partition(":")
    vocabulary = getattr(federation, "vocabulary", None)
    model = make_model(name, federation.sample_shape, federation.classes, vocabulary, seed)
    if not fast:
        set_column(model, PLAIN)
    if file:
        load_weights(model, file)
    return model


def make_model(
    name: str, shape: tuple[int, ...], classes: int, vocabulary: int | None = None, seed: int = 0
) -> nn.Module:
    """A named model for samples of a shape, its weights drawn from the seed."""
    builder = _builder(name)
    with torch_seeded(seed, "weights"):
        return builder(shape, classes, vocabulary=vocabulary)


def _builder(name: str) -> Builder:
    if name not in MODELS:
        raise FedflatError(f"There is no model '{name}'.{nearest(name, MODELS)}")
    return MODELS[name]


__all__ = ["MODELS", "Builder", "build_model", "describe_model", "load_weights", "make_model", "model_names"]
