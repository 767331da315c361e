"""Gradients of fully connected networks by hand: on small ones autograd's bookkeeping takes as long as a product.

With samples `a_0 = x`, a row each, layers `z_l = a_{l−1} W_lᵀ + b_l`, `a_l = relu(z_l)`, and the gradient `δ_l` with
respect to z_l,

    δ_{l−1} = δ_l W_l ∘ [z_{l−1} > 0]      ∇W_l = δ_lᵀ a_{l−1}      ∇b_l = δ_lᵀ 1

A step of SGD needs no gradient in memory: `W ← W + scale·δᵀa` is one product that adds to what is there. Nor does
SAM's ascent need that of the first layer, whose inputs are the samples in both passes: `s` times the gradient away it
gives

    z' = z + s (xxᵀ + 1) δ

and its share of the gradient's squared length is `Σ (xxᵀ + 1)δ ∘ δ`. To rounding, all numbers are those of autograd.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..core.flat import SMALLEST_NORM, Flat, FlatModel, axpy
from .autograd import Autograd, AutogradGradient, add_with_pull
from .base import LossFunction, Point, Pull, Terms, step_along

# what autograd itself calls, by the shortest way
_relu_backward = torch.ops.aten.threshold_backward.default
_nll_loss = torch.ops.aten.nll_loss_forward.default
_nll_loss_backward = torch.ops.aten.nll_loss_backward.default
_log_softmax_backward = torch.ops.aten._log_softmax_backward_data.default
CANCELLED = 1e3
"""A sum below this many times the rounding of its terms has cancelled."""
_MEAN, _IGNORED = 1, -100
"""`F.cross_entropy`'s defaults"""


class Dense:
    """The oracle of a sequence of linear layers with ReLU between them, on the CPU.

    What it cannot take goes to autograd: other batches than rows of numbers, a network that is watched by hooks or
    partly frozen, terms of the loss that depend on the weights otherwise than through the outputs.
    """

    def __init__(self, model: FlatModel, loss: LossFunction, layers: list[nn.Linear], flattens: bool) -> None:
        self._model, self.loss, self._flattens = model, loss, flattens
        self._plain = Autograd(model, loss)
        self._by_hand = True
        """whether this round's gradients can be taken by hand"""
        self.probed = False
        """whether the loss and its terms have been looked at in this round"""
        self._one = torch.empty(0)
        places = {id(p): index for index, p in enumerate(model.parameters)}
        self.layers = [(places[id(layer.weight)], places.get(id(layer.bias))) for layer in layers]
        """where the weight and the bias of every layer are among the parameters"""
        outputs, inputs = layers[0].weight.shape
        self.first = sum(model.layout.sizes[index] for index in self.layers[0] if index is not None)
        """how many entries of a flat vector, from its beginning, are the first layer's"""
        self._largest_batch = inputs * outputs // (inputs + outputs)
        """half as many samples as would make products with xxᵀ as large as those they replace"""

    @classmethod
    def of(cls, model: FlatModel, loss: LossFunction) -> Dense | None:
        """Take the model, if it is a network of this kind; samples may be flattened first."""
        if type(model.module) is not nn.Sequential or not model.vector.is_cpu:
            return None
        parts = list(model.module)
        first = parts[0] if parts else None
        flattens = type(first) is nn.Flatten and first.start_dim == 1 and first.end_dim == -1
        parts = parts[1:] if flattens else parts
        layers = [part for part in parts[::2] if type(part) is nn.Linear]
        if not parts or len(parts) != 2 * len(layers) - 1 or any(type(r) is not nn.ReLU for r in parts[1::2]):
            return None
        named = [id(p) for layer in layers for p in (layer.weight, layer.bias) if p is not None]
        # none is used twice, not trained, or known by another name, under which it might come first
        return cls(model, loss, layers, flattens) if named == [id(p) for p in model.parameters] else None

    @cached_property
    def room(self) -> Flat:
        """Room for a gradient."""
        return self._model.layout.empty()

    def begin(self, buffers: Tensor | None) -> None:
        self._plain.begin(buffers)
        self._by_hand, self.probed = not is_watched(self._model), False

    def gradient(
        self, point: Point, inputs: Tensor, targets: Tensor, terms: Terms | None
    ) -> DenseGradient | AutogradGradient:
        if not self._takes(inputs):
            return self._plain.gradient(point, inputs, targets, terms)
        if isinstance(point, Ascended) and not point.whole and point.samples is inputs:
            found = DenseGradient(self, self.layers_at(point.rest), point.inputs, point.first_outputs())
        else:
            x, layers = inputs.flatten(1) if self._flattens else inputs, self.layers_at(point.flat)
            found = DenseGradient(self, layers, x, F.linear(x, *layers[0]))
        try:
            found.backward(targets, terms)
        except PastTheOutputs:
            self._by_hand = False
            return self._plain.gradient(point, inputs, targets, terms)
        return found

    def ascend(
        self,
        point: Point,
        inputs: Tensor,
        targets: Tensor,
        terms: Terms | None,
        length: float,
        normalize: bool,
        into: Flat,
    ) -> Point:
        found = self.gradient(point, inputs, targets, terms)
        base, along = point.flat, self.room.vector
        if isinstance(found, DenseGradient) and len(inputs) <= self._largest_batch:
            scale = found.write_rest(self.room, length, normalize)
            if scale is not None:
                rest = slice(self.first, None)
                torch.add(base.vector[rest], along[rest], alpha=scale, out=into.vector[rest])
                return Ascended(into, base, found, scale, inputs)
        found.write(self.room)
        axpy(base.vector, along, step_along(length, normalize, along), out=into.vector)
        return Point(into)

    def outputs(self, w: Flat, inputs: Tensor) -> Tensor:
        if not self._takes(inputs):
            return self._plain.outputs(w, inputs)
        z = inputs.flatten(1) if self._flattens else inputs
        for number, layer in enumerate(self.layers_at(w)):
            z = F.linear(z.relu_() if number else z, *layer)
        return z

    def layers_at(self, flat: Flat) -> list[tuple[Tensor, Tensor | None]]:
        """The weight and the bias of every layer at a point."""
        pieces = flat.pieces
        return [(pieces[weight], None if bias is None else pieces[bias]) for weight, bias in self.layers]

    def ones(self, delta: Tensor) -> Tensor:
        """A one for every sample: a product with them is a sum, and adds to what is there."""
        if len(self._one) != len(delta):
            self._one = delta.new_ones(len(delta))
        return self._one

    def _takes(self, inputs: Tensor) -> bool:
        return self._by_hand and (self._flattens or inputs.dim() == 2) and not inputs.requires_grad


class DenseGradient:
    """Inputs and deltas of every layer, of which the gradient is made."""

    loss: Tensor

    def __init__(
        self, oracle: Dense, layers: list[tuple[Tensor, Tensor | None]], x: Tensor, z: Tensor
    ) -> None:
        self._oracle, self._layers, self.inputs, self.first = oracle, layers, [x], z
        for layer in layers[1:]:
            self.inputs.append(torch.relu(z))
            z = F.linear(self.inputs[-1], *layer)
        self._outputs = z
        self.deltas: list[Tensor] = []
        self.lift = z

    def backward(self, targets: Tensor, terms: Terms | None) -> None:
        """Find the loss, and the gradient with respect to every layer's outputs."""
        oracle = self._oracle
        self.loss, delta = differentiate_loss(oracle.loss, self._outputs, targets, not oracle.probed)
        if terms is not None:
            delta = differentiate_terms(terms, self._outputs, delta, not oracle.probed)
        oracle.probed = True
        deltas = [delta]
        for number in range(len(oracle.layers) - 1, 0, -1):
            delta = _relu_backward(delta @ self._layers[number][0], self.inputs[number], 0)
            deltas.append(delta)
        self.deltas = deltas[::-1]

    def write(self, into: Flat, start: int = 0) -> None:
        """Write the gradient out, from a layer on."""
        for number in range(start, len(self.deltas)):
            (weight, bias), delta = self._oracle.layers[number], self.deltas[number]
            torch.mm(delta.mT, self.inputs[number], out=into.pieces[weight])
            if bias is not None:
                torch.sum(delta, dim=0, out=into.pieces[bias])

    def add_to(self, w: Flat, scale: float, pull: float = 0.0) -> None:
        oracle = self._oracle
        if pull:
            self.write(oracle.room)
            add_with_pull([w.vector], [oracle.room.vector], scale, pull)
            return
        ones = oracle.ones(self.deltas[0])
        for (weight, bias), delta, a in zip(oracle.layers, self.deltas, self.inputs, strict=True):
            w.pieces[weight].addmm_(delta.mT, a, alpha=scale)
            if bias is not None:
                w.pieces[bias].addmv_(delta.mT, ones, alpha=scale)

    # -- the ascent past the first layer -----------------------------------------------------------

    def write_rest(self, into: Flat, length: float, normalize: bool) -> float | None:
        """Write all but the first layer's gradient; find what to go by along the whole of it.

        None where the samples' shares of the first layer's gradient cancel, so that little but rounding is left.
        """
        x, delta, has_bias = self.inputs[0], self.deltas[0], self._oracle.layers[0][1] is not None
        kernel = x @ x.mT
        self.lift = (kernel.add_(1.0) if has_bias else kernel) @ delta
        self.write(into, start=1)
        if not normalize:
            return length
        norms = torch._foreach_norm([x, delta, into.vector[self._oracle.first :]])
        share, *lengths = torch.stack([torch.sum(self.lift * delta), *norms]).tolist()
        inputs = lengths[0] ** 2 + (len(x) if has_bias else 0)  # a bias is a weight of inputs 1
        if share < CANCELLED * torch.finfo(x.dtype).eps * inputs * lengths[1] ** 2:
            return None
        norm = math.hypot(math.sqrt(share), lengths[2])
        return length / norm if norm > SMALLEST_NORM else 0.0


class Ascended(Point):
    """A point up the gradient, to which all but the first layer has been moved; that one moves when it is read."""

    def __init__(
        self, rest: Flat, base: Flat, gradient: DenseGradient, scale: float, samples: Tensor
    ) -> None:
        super().__init__(rest)
        self.rest, self._base, self._gradient, self._scale = rest, base, gradient, scale
        self.samples = samples
        """the batch on which the gradient was taken; on another one the first layer has to move"""
        self.whole = False

    @property
    def inputs(self) -> Tensor:
        """The samples, a row each."""
        return self._gradient.inputs[0]

    def first_outputs(self) -> Tensor:
        """The first layer's outputs there."""
        return torch.add(self._gradient.first, self._gradient.lift, alpha=self._scale)

    @property
    def flat(self) -> Flat:
        if not self.whole:
            weight, bias = self._gradient._oracle.layers[0]
            delta, there = self._gradient.deltas[0], self.rest.pieces
            torch.add(self._base.pieces[weight], delta.mT @ self.inputs, alpha=self._scale, out=there[weight])
            if bias is not None:
                torch.add(self._base.pieces[bias], delta.sum(dim=0), alpha=self._scale, out=there[bias])
            self.whole = True
        return self.rest


class PastTheOutputs(Exception):
    """A loss, or a term of it, may reach the weights otherwise than through the outputs."""


def differentiate_loss(
    loss: LossFunction, outputs: Tensor, targets: Tensor, probe: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute a loss and its gradient with respect to the outputs; with `probe` look for other ways to weights."""
    if loss is F.cross_entropy and outputs.dim() == 2 and targets.dim() == 1:
        logs = torch.log_softmax(outputs, 1)
        value, weight = _nll_loss(logs, targets, None, _MEAN, _IGNORED)
        delta = _nll_loss_backward(torch.ones_like(value), logs, targets, None, _MEAN, _IGNORED, weight)
        return value, _log_softmax_backward(delta, logs, 1, outputs.dtype)
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        value = loss(leaf.clone(), targets)  # which may change its outputs in place
        if probe:
            check_path(value, leaf)
        (delta,) = torch.autograd.grad(value, leaf, materialize_grads=True)
    return value.detach(), delta


def differentiate_terms(terms: Terms, outputs: Tensor, delta: Tensor, probe: bool = False) -> Tensor:
    """Add the gradient of the mechanisms' terms to that of the loss; with `probe` look for other ways to weights."""
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        tensors: list[Tensor] = []
        for term in terms(leaf):
            if isinstance(term, Pull):
                delta = torch.add(delta, term.vector.detach(), alpha=term.scale)
            elif isinstance(term, Tensor) and term.requires_grad:
                tensors.append(term)
                if probe:
                    check_path(term, leaf)
        if tensors:  # all at once: they may share a part of their graph
            (added,) = torch.autograd.grad(tensors, leaf, materialize_grads=True, allow_unused=True)
            delta = delta + added
    return delta


def check_path(term: Tensor, leaf: Tensor) -> None:
    """Raise `PastTheOutputs` where another leaf of autograd's graph leads to a term."""
    waiting, seen = [term.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", leaf) is not leaf:
            raise PastTheOutputs
        waiting += [follower for follower, _ in node.next_functions]


def is_watched(model: FlatModel) -> bool:
    """Whether a module or parameter does what its class does not: hooks look on, or it is frozen."""
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
