"""Large vision transformers from timm or torchvision."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import FedflatError, MissingExtra
from .shapes import image_shape

PIXELS = 224
"""Images of another size are resized to this inside the model."""

_IN_TIMM = {
    "vit-b16": "vit_base_patch16_224",
    "swin-s": "swin_small_patch4_window7_224",
    "swin-b": "swin_base_patch4_window7_224",
}
_IN_TORCHVISION = {"vit-b16": "vit_b_16", "swin-s": "swin_s", "swin-b": "swin_b"}
_STAND_INS: list[torch.library.Library] = []


def vit_b16(shape: tuple[int, ...], classes: int, vocabulary: int | None = None) -> nn.Module:
    """ViT-B/16 on 224x224 pixels (extra "vision"); 'vit-b16:file' starts from the weights in a file.

    Dosovitskiy et al. (2021), An Image is Worth 16x16 Words; FedNSAM, Table 3.
    """
    return _build("vit-b16", shape, classes, vocabulary)


def swin_s(shape: tuple[int, ...], classes: int, vocabulary: int | None = None) -> nn.Module:
    """Swin-S on 224x224 pixels (extra "vision"); 'swin-s:file' starts from the weights in a file.

    Liu et al. (2021), Swin Transformer; FedNSAM, Table 3.
    """
    return _build("swin-s", shape, classes, vocabulary)


def swin_b(shape: tuple[int, ...], classes: int, vocabulary: int | None = None) -> nn.Module:
    """Swin-B on 224x224 pixels (extra "vision"); 'swin-b:file' starts from the weights in a file.

    Liu et al. (2021), Swin Transformer; FedNSAM, Table 3.
    """
    return _build("swin-b", shape, classes, vocabulary)


def _build(name: str, shape: tuple[int, ...], classes: int, vocabulary: int | None) -> nn.Module:
    _, *size = image_shape(name, shape, vocabulary, channels=3)
    torchvision = _import("torchvision")  # first: timm imports it too
    timm = _import("timm")
    if timm is not None:
        model: nn.Module = timm.create_model(_IN_TIMM[name], pretrained=False, num_classes=classes)
    elif torchvision is not None:
        model = getattr(torchvision.models, _IN_TORCHVISION[name])(weights=None, num_classes=classes)
    else:
        raise MissingExtra("timm", "vision", f"The model {name}")
    if size != [PIXELS, PIXELS]:
        model.register_forward_pre_hook(partial(_resize, PIXELS))
    return model


def _resize(pixels: int, module: nn.Module, arguments: tuple[Tensor]) -> Tensor:
    return F.interpolate(arguments[0], size=(pixels, pixels), mode="bilinear", antialias=True)


def _import(package: str) -> Any:
    """The package, or None where it is not installed."""
    try:
        return import_module(package)
    except ModuleNotFoundError as problem:
        if problem.name == package:
            return None
        raise FedflatError(f"{package} is installed but cannot be imported: {problem}.") from problem
    except RuntimeError as problem:
        if "torchvision::nms" not in str(problem) or _STAND_INS:
            raise FedflatError(f"{package} is installed but cannot be imported: {problem}.") from problem
    # torchvision's own operators are a GPU build beside PyTorch for CPU. No model here uses them, but torchvision
    # wants to find them by name; declare them and import once more.
    for module in [m for m in sys.modules if m.partition(".")[0] == package]:
        del sys.modules[module]
    operators = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        signature = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        operators.define(signature)  # type: ignore[no-untyped-call]
    _STAND_INS.append(operators)
    return _import(package)
