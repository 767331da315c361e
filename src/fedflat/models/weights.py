"""Weights from a file on this machine."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import FedflatError
from .resnet import from_torchvision


def load_weights(model: nn.Module, file: str | Path) -> None:
    """Copy the weights in a `.safetensors`, `.pth` or `.pt` file into the model.

    Names and shapes have to be the model's, but for its head, the last linear layer: where the file has one for
    another number of classes, or none, the model's own stays. Files of torchvision's ResNets are taken as they are by
    `resnet18-bn`, `resnet34-bn` and `resnet50-bn`. Pickled code is never run (`weights_only=True`).
    """
    file = Path(file)
    stored, own = _read(file, model), model.state_dict()
    if "layer1.0.conv1.weight" in stored and "stage1.0.body.conv1.weight" in own:
        stored = {from_torchvision(name): value for name, value in stored.items()}
    for name in _head(model):
        same_features = name in stored and stored[name].shape[1:] == own[name].shape[1:]
        if name not in stored or (same_features and not _same(name, stored, own)):
            stored[name] = own[name]
    # older files also hold what the model now computes itself
    computed = {name for name, _ in model.named_buffers()} - own.keys()
    complaints = [
        _count("lacks", own.keys() - stored.keys()),
        _count("has without use", stored.keys() - own.keys() - computed),
        _count("has in another shape", [n for n in stored.keys() & own.keys() if not _same(n, stored, own)]),
    ]
    if any(complaints):
        raise FedflatError(
            f"The weights in {file} are not of this model: the file {', '.join(filter(None, complaints))}."
        )
    model.load_state_dict({name: stored[name] for name in own})


def _read(file: Path, model: nn.Module) -> dict[str, Tensor]:
    if not file.is_file():
        raise FedflatError(f"There is no file {file} to take weights from.")
    if file.suffix not in (".safetensors", ".pth", ".pt"):
        raise FedflatError(f"{file}: weights come as .safetensors, .pth or .pt, not '{file.suffix}'.")
    try:
        stored: Any = (
            load_file(file)
            if file.suffix == ".safetensors"
            else torch.load(file, map_location="cpu", weights_only=True)
        )
        for wrapper in ("state_dict", "model"):
            if isinstance(stored, dict) and isinstance(stored.get(wrapper), dict):
                stored = stored[wrapper]
        # timm knows the layouts that its models had before, or have elsewhere
        convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        tensors: dict[str, Tensor] = dict(convert(stored, model) if convert else stored)
    except Exception as problem:
        reason = (str(problem) or type(problem).__name__).splitlines()[0]
        raise FedflatError(f"{file} cannot be read as weights: {reason}") from problem
    if not all(isinstance(value, Tensor) for value in tensors.values()):
        raise FedflatError(f"{file} holds other things than tensors by name; save a model's state_dict().")
    return tensors


def _head(model: nn.Module) -> list[str]:
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in model.state_dict() if linear and name.rpartition(".")[0] == linear[-1]]


def _same(name: str, stored: dict[str, Tensor], own: dict[str, Tensor]) -> bool:
    return name in stored and stored[name].shape == own[name].shape


def _count(what: str, names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
    return f"{what} {len(names)} ({shown})" if names else ""
