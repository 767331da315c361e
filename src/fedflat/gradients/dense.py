"""A fully connected network, differentiated by hand.

Between the products of a small network autograd's bookkeeping takes as long as a product. With samples `a_0 = x`, a
row each, layers `z_l = a_{l−1} W_lᵀ + b_l`, `a_l = relu(z_l)`, and the gradient `δ_l` for z_l,

    δ_{l−1} = δ_l W_l ∘ [z_{l−1} > 0]      ∇W_l = δ_lᵀ a_{l−1}      ∇b_l = δ_lᵀ 1

A step of SGD then needs no gradient in memory: `W ← W − η δᵀa` is one product that adds to what is there.

SAM's ascent does without most of the first layer. In both passes of a step its inputs are the samples, so at the
point that lies `s` times the gradient away it gives

    z' = z + s (xxᵀ + 1) δ

and its share of the gradient's squared length is `Σ (xxᵀ + 1)δ ∘ δ`. The first pass needs no gradient of its weights,
the second no product with them, and they need not be moved: what is left are products with `xxᵀ`, which is as small
as the batch. FedASAM's ascent, along `P = T² ∘ ∇W`, has both products, `z' = z + s xPᵀ`, and does not move them
either. To rounding, all numbers are those of autograd.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..core.evaluation import LossFunction
from ..core.flat import SMALLEST_NORM, FlatModel, Pieces, length_of_own
from .cross_entropy import log_softmax_backward

# what autograd itself calls, by the shortest way
_relu_backward = torch.ops.aten.threshold_backward.default
_nll_loss = torch.ops.aten.nll_loss_forward.default
_nll_loss_backward = torch.ops.aten.nll_loss_backward.default
CANCELLED = 1e3
"""a sum that is less than so many times the rounding of its terms"""
_MEAN, _IGNORED = 1, -100
"""`F.cross_entropy`'s defaults"""


class Chain:
    """The layers of such a network, and what the latest passes leave for the next."""

    def __init__(self, model: FlatModel, layers: list[nn.Linear], flattened: bool) -> None:
        self.flattened = flattened
        places = {id(p): index for index, p in enumerate(model.parameters)}
        self.places = [(places[id(layer.weight)], places.get(id(layer.bias))) for layer in layers]
        """where among the model's parameters weights and biases are"""
        self.own = [index for index in self.places[0] if index is not None]
        """where those of the first layer are: they come first"""
        self._first = sum(model.sizes[index] for index in self.own)
        self._rests: dict[int, tuple[Tensor, Tensor]] = {}
        self.classes = layers[-1].out_features
        outputs, inputs = layers[0].weight.shape
        self.largest_batch = inputs * outputs // (inputs + outputs)
        """half as many samples as make the products with xxᵀ as large as those that they replace"""
        self.layers: list[tuple[Tensor, Tensor | None]] = []
        """weights and biases of the latest pass"""
        self.inputs: list[Tensor] = []
        """of every layer"""
        self.deltas: list[Tensor] = []
        """for the outputs of every layer"""
        self.first = self.delta = self._one = torch.empty(0)
        self.lift: Tensor | None = None
        """`(xxᵀ + 1) δ`; None where the ascent is a stretched one"""
        self.move: Pieces = ()
        """what such an ascent goes along, in the first layer"""
        self.scale = 0.0

    @classmethod
    def of(cls, model: FlatModel) -> Chain | None:
        """It, where the model is a sequence of linear layers with ReLU between them and nothing else, all trained.

        Samples may be flattened before.
        """
        if type(model.module) is not nn.Sequential or altered(model):
            return None
        parts = list(model.module)
        first = parts[0] if parts else None
        flattened = type(first) is nn.Flatten and first.start_dim == 1 and first.end_dim == -1
        parts = parts[1:] if flattened else parts
        layers = [layer for layer in parts[::2] if type(layer) is nn.Linear]
        if not parts or len(parts) != 2 * len(layers) - 1 or any(type(r) is not nn.ReLU for r in parts[1::2]):
            return None
        named = [p for layer in layers for p in (layer.weight, layer.bias) if p is not None]
        # none is used twice, not trained, or known by another name, under which it might come first
        all_once = [id(p) for p in named] == [id(p) for p in model.parameters]
        return cls(model, layers, flattened) if all_once else None

    def takes(self, samples: Tensor) -> bool:
        """Whether samples are a row each."""
        return (self.flattened or samples.dim() == 2) and not samples.requires_grad

    def forward(self, at: Pieces, samples: Tensor) -> Tensor:
        """The outputs with parameters that need no gradient."""
        x = samples.flatten(1) if self.flattened else samples
        self.layers = self._layers(at)
        self.first = F.linear(x, *self.layers[0])
        return self._on(x, self.first)

    def forward_again(self, at: Pieces) -> Tensor:
        """The same at the point climbed to, to which all parameters but the first layer's have been moved."""
        x, self.layers = self.inputs[0], self._layers(at)
        if self.lift is not None:
            return self._on(x, torch.add(self.first, self.lift, alpha=self.scale))
        z = torch.addmm(self.first, x, self.move[0].mT, alpha=self.scale)
        return self._on(x, z.add_(self.move[1], alpha=self.scale) if len(self.move) > 1 else z)

    def _layers(self, at: Pieces) -> list[tuple[Tensor, Tensor | None]]:
        return [(at[weight], None if bias is None else at[bias]) for weight, bias in self.places]

    def _on(self, x: Tensor, z: Tensor) -> Tensor:
        """Through all layers but the first."""
        self.inputs = [x]
        for weight, bias in self.layers[1:]:
            a = torch.relu(z)
            self.inputs.append(a)
            z = F.linear(a, weight, bias)
        return z

    def outputs_at(self, pieces: Pieces, samples: Tensor) -> Tensor:
        """The outputs with other parameters; nothing is left for a backward pass."""
        z = samples.flatten(1) if self.flattened else samples
        for number, (weight, bias) in enumerate(self.places):
            z = F.linear(z.relu_() if number else z, pieces[weight], None if bias is None else pieces[bias])
        return z

    def backward(self, delta: Tensor) -> None:
        """Find the gradient for every layer's outputs, from the one for the last's."""
        deltas = [delta]
        for number in range(len(self.places) - 1, 0, -1):
            delta = _relu_backward(delta @ self.layers[number][0], self.inputs[number], 0)
            deltas.append(delta)
        self.deltas = deltas[::-1]

    def gradients(self) -> tuple[Tensor, ...]:
        """One per parameter."""
        pieces: dict[int, Tensor] = {}
        for (weight, bias), delta, a in zip(self.places, self.deltas, self.inputs, strict=True):
            pieces[weight] = delta.mT @ a
            if bias is not None:
                pieces[bias] = delta.sum(dim=0)
        return tuple(pieces[index] for index in range(len(pieces)))

    def write(self, into: list[Tensor], start: int = 0) -> None:
        """The same into views of a flat vector, from a layer on."""
        for number in range(start, len(self.places)):
            (weight, bias), delta = self.places[number], self.deltas[number]
            torch.mm(delta.mT, self.inputs[number], out=into[weight])
            if bias is not None:
                torch.sum(delta, dim=0, out=into[bias])

    def descend(self, w: Pieces, lr: float) -> None:
        """`w ← w − η g`, with w as one tensor per parameter."""
        for (weight, bias), delta, a in zip(self.places, self.deltas, self.inputs, strict=True):
            w[weight].addmm_(delta.mT, a, alpha=-lr)
            if bias is not None:
                w[bias].addmv_(delta.mT, self._ones(delta), alpha=-lr)

    def _ones(self, delta: Tensor) -> Tensor:
        """As many as there are samples: a product with them is a sum, and adds to what is there."""
        if len(self._one) != len(delta):
            self._one = delta.new_ones(len(delta))
        return self._one

    # -- the ascent past the first layer -----------------------------------------------------------

    def rest_of(self, vector: Tensor) -> Tensor:
        """All of a flat vector but the first layer's; it is kept, since cutting takes as long as adding."""
        if id(vector) not in self._rests:
            self._rests[id(vector)] = vector, vector[self._first :]
        return self._rests[id(vector)][1]

    def pays(self, samples: Tensor) -> bool:
        """Whether going past the first layer is the quicker way for a batch."""
        return len(samples) <= self.largest_batch

    def climb(self, length: float, normalize: bool, into: Tensor, views: list[Tensor]) -> bool:
        """Set out by `length` along the gradient of the latest backward pass, or by `length` times it.

        The gradient of all parameters but the first layer's is written into a flat vector; `scale` is what they move
        by along it. False where the samples' shares of the first layer's gradient cancel, so that little but rounding
        would be left.
        """
        x, self.delta = self.inputs[0], self.deltas[0]
        kernel = x @ x.mT
        self.lift = (kernel if len(self.own) == 1 else kernel.add_(1.0)) @ self.delta
        self.scale = length
        self.write(views, start=1)
        if normalize:
            norms = torch._foreach_norm([x, self.delta, self.rest_of(into)])
            share, *lengths = torch.stack([torch.sum(self.lift * self.delta), *norms]).tolist()
            inputs = lengths[0] ** 2 + (len(x) if len(self.own) > 1 else 0)  # a bias is a weight of inputs 1
            if share < CANCELLED * torch.finfo(x.dtype).eps * inputs * lengths[1] ** 2:
                return False
            norm = math.hypot(math.sqrt(share), lengths[2])
            self.scale = length / norm if norm > SMALLEST_NORM else 0.0
        return True

    def climb_stretched(
        self, length: float, eta: float, sizes: Tensor, into: Tensor, views: list[Tensor]
    ) -> None:
        """Set out by `length T² g / ‖T g‖` with `T = sizes + eta`; `T² g` is written into a flat vector.

        With `T/η = 1 + sizes/η` either factor is one sweep that adds to what is there.
        """
        self.write(views)
        into.addcmul_(sizes, into, value=1.0 / eta)
        norm = eta * length_of_own(into)
        into.addcmul_(sizes, into, value=1.0 / eta)
        self.scale = length * eta**2 / norm if norm > SMALLEST_NORM else 0.0
        self.lift, self.move = None, [views[index] for index in self.own]

    def moves(self) -> Pieces:
        """What the first layer's own parameters move along, after all."""
        if self.lift is None:
            return self.move
        return (self.delta.mT @ self.inputs[0], self.delta.sum(dim=0))[: len(self.own)]


def differentiate_loss(loss: LossFunction, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A loss and its gradient for the outputs."""
    if loss is F.cross_entropy and outputs.dim() == 2 and targets.dim() == 1:
        logs = torch.log_softmax(outputs, 1)
        value, weight = _nll_loss(logs, targets, None, _MEAN, _IGNORED)
        delta = _nll_loss_backward(torch.ones_like(value), logs, targets, None, _MEAN, _IGNORED, weight)
        return value, log_softmax_backward(delta, logs, 1, outputs.dtype)
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        value = loss(leaf.clone(), targets)  # which may change its outputs in place
        (delta,) = torch.autograd.grad(value, leaf, materialize_grads=True)
    return value.detach(), delta


def altered(model: FlatModel) -> bool:
    """Whether a module or parameter does what its class does not: somebody's hooks look on, or it is frozen."""
    watched = _has_any_global_hook()  # type: ignore[no-untyped-call]
    if watched or not all(p.requires_grad and not p._backward_hooks for p in model.parameters):
        return True
    return any(
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        or "forward" in vars(part)
        for part in model.module.modules()
    )
