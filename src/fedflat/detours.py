"""SAM's ascent past the large linear layers of a network, without moving them.

Such a layer, `y = a Wᵀ + b`, has most parameters of a small convolutional network and little of its work: its
gradient is written, measured and moved along, all in main memory. At the point that lies `s` times the gradient away,
on inputs a', it gives

    y' = a' Wᵀ + b + s (a'aᵀ + 1) δ

where a and δ are its inputs and the gradient for its outputs in the first pass. Its share of the gradient's squared
length is `Σ (aaᵀ + 1)δ ∘ δ`. All that is as small as the batch. To rounding, numbers are those of moving the layer.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .chain import CANCELLED, altered
from .flat import SMALLEST_NORM, FlatModel, Gradients

SMALLEST = 2**16
"""Weights from which on a layer is worth it."""
SAME_ROWS = (nn.Linear, nn.ReLU, nn.Dropout, nn.Identity, nn.Tanh, nn.Sigmoid, nn.GELU)
"""What makes a row of a row."""


class _Passed:
    """A layer, and what its latest passes left."""

    def __init__(self, layer: nn.Linear, weight: int, bias: int | None) -> None:
        self.layer, self.weight, self.bias = layer, weight, bias
        self.inputs = self.outputs = self.delta = torch.empty(0)
        outputs, inputs = layer.weight.shape
        self.largest_batch = inputs * outputs // (inputs + outputs)
        """half as many samples as make the products with aaᵀ as large as those that they replace"""

    def kernel(self, inputs: Tensor) -> Tensor:
        """`a'aᵀ + 1`, or without the 1 where there is no bias."""
        kernel = inputs @ self.inputs.mT
        return kernel if self.bias is None else kernel + 1.0


class Detours:
    """The large linear layers of a sequence of modules."""

    def __init__(self, model: FlatModel, passed: list[_Passed]) -> None:
        self._model = model
        self._parts = list(cast(nn.Sequential, model.module))
        self._passed = {id(one.layer): one for one in passed}
        self.largest_batch = min(one.largest_batch for one in passed)
        self.own = [index for one in passed for index in (one.weight, one.bias) if index is not None]
        """where among the model's parameters theirs are"""
        self.others = [index for index in range(len(model.parameters)) if index not in self.own]
        self.scale = 0.0

    @classmethod
    def of(cls, model: FlatModel) -> Detours | None:
        """Those of a model; None if it has none.

        All get a row for each sample, run once in a pass, and share their parameters with nobody.
        """
        if type(model.module) is not nn.Sequential:
            return None
        parts = list(model.module)
        places = {id(p): index for index, p in enumerate(model.parameters)}
        every = [part for _, part in model.module.named_modules(remove_duplicate=False)]
        owners = [id(p) for part in every for p in part._parameters.values() if p is not None]
        passed, rows = [], False
        for layer in parts:
            flat = type(layer) is nn.Flatten and layer.start_dim == 1 and layer.end_dim == -1
            rows = flat or (rows and type(layer) in SAME_ROWS)
            if not rows or type(layer) is not nn.Linear or layer.weight.numel() < SMALLEST:
                continue
            own = [p for p in (layer.weight, layer.bias) if p is not None]
            if all(id(p) in places and owners.count(id(p)) == 1 for p in own):  # itself is there once then
                bias = None if layer.bias is None else places[id(layer.bias)]
                passed.append(_Passed(layer, places[id(layer.weight)], bias))
        return cls(model, passed) if passed else None

    def pay(self, samples: Tensor) -> bool:
        """Whether going past the layers is the quicker way for a batch, and nothing stands in it."""
        return len(samples) <= self.largest_batch and not altered(self._model)

    def forward(self, samples: Tensor) -> Tensor:
        """The outputs, for a pass back that leaves the layers' own gradients out."""
        x = samples
        for part in self._parts:
            one = self._passed.get(id(part))
            if one is None:
                x = part(x)
                continue
            one.inputs = x.detach()
            x = F.linear(x, one.layer.weight.detach(), None if one.bias is None else one.layer.bias.detach())
            one.outputs = x if x.requires_grad else x.requires_grad_()
            x = one.outputs.clone()  # which what follows may change in place
        return x

    def forward_again(self, samples: Tensor) -> Tensor:
        """The outputs at the point climbed to, to which all parameters but the layers' have been moved."""
        x = samples
        for part in self._parts:
            y = part(x)
            one = self._passed.get(id(part))
            x = y if one is None else torch.addmm(y, one.kernel(x), one.delta, alpha=self.scale)
        return x

    @property
    def outputs(self) -> list[Tensor]:
        """Those of the layers in the latest pass."""
        return [one.outputs for one in self._passed.values()]

    def climb(self, length: float, normalize: bool, gradient: Gradients, deltas: Gradients) -> bool:
        """Set out by `length` along the gradient, or by `length` times it; `scale` is what parameters move by.

        `deltas` are for the layers' outputs. False where the samples' shares of a layer's gradient cancel, so that
        little but rounding would be left, where an embedding's gradient is sparse, or where somebody else uses a
        layer's parameters too.
        """
        pieces = [piece for piece in gradient if piece is not None]
        for one, delta in zip(self._passed.values(), deltas, strict=True):
            one.delta = torch.zeros_like(one.outputs) if delta is None else delta
            one.outputs = one.delta  # which lets go of the first pass
        self.scale = length
        shared = any(gradient[index] is not None for index in self.own)
        if shared or any(piece.is_sparse for piece in pieces):
            return False
        if not normalize:
            return True
        sizes: list[Tensor] = []
        for one in self._passed.values():
            sizes += [torch.sum(one.kernel(one.inputs) @ one.delta * one.delta)]
            sizes += torch._foreach_norm([one.inputs, one.delta])
        found = torch.stack([*sizes, *(torch._foreach_norm(pieces) if pieces else ())]).tolist()
        count = 3 * len(self._passed)
        shares, rounding = found[:count:3], CANCELLED * torch.finfo(sizes[0].dtype).eps
        for share, a, d in zip(shares, found[1:count:3], found[2:count:3], strict=True):
            most = a * d
            if share < rounding * most * most:
                return False
        norm = math.hypot(*(math.sqrt(share) for share in shares), *found[count:])
        self.scale = length / norm if norm > SMALLEST_NORM else 0.0
        return True

    def moves(self) -> list[Tensor]:
        """What the layers' own parameters move along, after all."""
        found: list[Tensor] = []
        for one in self._passed.values():
            found.append(one.delta.mT @ one.inputs)
            if one.bias is not None:
                found.append(one.delta.sum(dim=0))
        return found
