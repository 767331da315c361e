"""SAM's ascent past a linear layer that samples go into, without its gradient.

In both passes of a step its inputs are the batch's samples `x`, a row each. With the gradient `δ` for its outputs
`y = x Wᵀ + b`, that for W is `δᵀx` and that for b is `δᵀ1`. So at the point that lies `s` times this away it gives

    y' = y + s (xxᵀ + 1) δ

and its share of the gradient's squared length is `Σ (xxᵀ + 1)δ ∘ δ`. The first pass needs no gradient of the weights
then, the second no product with them, and they need not be moved: what is left are products with `xxᵀ`, which is as
small as the batch. To rounding, all numbers are those of the plain way.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .flat import SMALLEST_NORM, FlatModel, Pieces


class FirstLayer:
    """The linear layer that samples go into, and what a step's first pass leaves of it."""

    def __init__(self, model: FlatModel, layer: nn.Linear, flattened: bool) -> None:
        self.model, self.layer, self.flattened = model, layer, flattened
        self.inputs = self.outputs = self.delta = self.lift = torch.empty(0)
        self.scale = 0.0
        outputs, inputs = layer.weight.shape
        self.largest_batch = inputs * outputs // (inputs + outputs)
        """half as many samples as make the products with xxᵀ as large as those that they replace"""
        own = {id(layer.weight), id(layer.bias)}
        self.own = [index for index, p in enumerate(model.parameters) if id(p) in own]
        self.others = [index for index, p in enumerate(model.parameters) if id(p) not in own]

    @classmethod
    def of(cls, model: FlatModel) -> FirstLayer | None:
        """It, where the model is a sequence that begins with it or flattens samples before, and trains all of it.

        Not where somebody's hook comes in between, which might do another thing in the second pass.
        """
        children = list(model.module) if type(model.module) is nn.Sequential else [model.module]
        flattened = type(children[0]) is nn.Flatten and (children[0].start_dim, children[0].end_dim) == (
            1,
            -1,
        )
        layer, *rest = children[1:] if flattened and len(children) > 1 else children
        if type(layer) is not nn.Linear or any(
            m._forward_pre_hooks for m in (model.module, children[0], layer)
        ):
            return None
        own = {id(p) for p in (layer.weight, layer.bias) if p is not None}
        elsewhere = {id(p) for child in rest for p in child.parameters()}
        trained = {id(p) for p in model.parameters}
        return cls(model, layer, flattened) if own <= trained and not own & elsewhere else None

    def pays(self, samples: Tensor) -> bool:
        """Whether this is the quicker way for a batch."""
        return len(samples) <= self.largest_batch and (self.flattened or samples.dim() == 2)

    def first_pass(self, samples: Tensor) -> Tensor:
        """The model's outputs, noting what the layer takes and gives."""
        return self._pass(samples, self._note)

    def climb(self, loss: Tensor, length: float, normalize: bool) -> Pieces:
        """Set out by `length` along the gradient of the first pass's loss, or by `length` times it.

        Returns the gradient of all other parameters; `scale` is what they move by along it.
        """
        others = [self.model.parameters[index] for index in self.others]
        self.delta, *gradient = torch.autograd.grad(loss, [self.outputs, *others], materialize_grads=True)
        kernel = self.inputs @ self.inputs.mT
        self.lift = (kernel if self.layer.bias is None else kernel.add_(1.0)) @ self.delta
        self.scale = length
        if normalize:
            norms = torch._foreach_norm(gradient) if gradient else ()
            share, *lengths = torch.stack([torch.sum(self.lift * self.delta), *norms]).tolist()
            norm = math.hypot(math.sqrt(max(0.0, share)), *lengths)
            self.scale = length / norm if norm > SMALLEST_NORM else 0.0
        return gradient

    def second_pass(self, samples: Tensor) -> Tensor:
        """The model's outputs at the point climbed to, to which all other parameters have been moved."""
        return self._pass(samples, self._lift)

    def gradient(self) -> Pieces:
        """That of the layer's own parameters, after all."""
        pieces = {
            id(self.layer.weight): self.delta.mT @ self.inputs,
            id(self.layer.bias): self.delta.sum(dim=0),
        }
        return [pieces[id(self.model.parameters[index])] for index in self.own]

    def _pass(self, samples: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """The module's outputs with the layer computing as given: its own entry comes before its class's method."""
        self.layer.__dict__["forward"] = forward
        try:
            outputs: Tensor = self.model.module(samples)
        finally:
            del self.layer.__dict__["forward"]
        return outputs

    def _note(self, x: Tensor) -> Tensor:
        self.inputs, self.outputs = x, F.linear(x, self.layer.weight, self.layer.bias)
        return self.outputs.clone()  # what follows may change it in place

    def _lift(self, _: Tensor) -> Tensor:
        return torch.add(self.outputs, self.lift, alpha=self.scale)
