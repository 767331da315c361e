"""The loss on all of some data as a function of a model's weights: its value, gradient and Hessian.

Every measure looks at the loss through this. Samples pass in chunks, in evaluation mode and without augmentation;
afterwards the model has the bits, buffers and modes it had before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..core.evaluation import LossFunction
from ..core.flat import FlatModel, Gradients, write_gradients
from ..data.federation import Federation, Shard
from ..errors import FedflatError

CHUNK = 250
"""Samples per pass: more are no quicker, and a Hessian of a ResNet-18 then takes 1 GB."""


class Surface:
    """`L(w)`, the mean loss on all samples; of a federation, on all clients' training samples (its `union`)."""

    def __init__(
        self,
        model: nn.Module | FlatModel,
        data: Shard | Federation,
        loss: LossFunction = F.cross_entropy,
        at: Tensor | None = None,
    ) -> None:
        self.model = FlatModel.of(model)
        vector = self.model.vector
        if at is not None and at.shape != vector.shape:
            raise FedflatError(f"at= has shape {tuple(at.shape)}, the model's vector {tuple(vector.shape)}.")
        self.w = vector.clone() if at is None else at.to(vector, copy=True)
        """the point of interest: where the model is, or `at`"""
        self.data = _fitting(data, vector)
        self.loss = loss
        self._mask = _padding_mask(self.model)
        self._twice = False

    @property
    def size(self) -> int:
        """The number of weights."""
        return self.model.size

    def movable(self, vector: Tensor) -> Tensor:
        """The vector, 0 where weights are constants that no gradient moves: an embedding's padding row."""
        return vector if self._mask is None else vector.mul_(self._mask)

    def value(self, w: Tensor | None = None) -> float:
        """`L(w)`, by one forward pass."""
        total = 0.0
        with self._module_at(w), torch.no_grad():
            for inputs, targets in self.data.batches(CHUNK):
                total += self.loss(self.model.outputs(inputs), targets).item() * len(targets)
        return total / len(self.data)

    def value_and_gradient(self, w: Tensor | None = None) -> tuple[float, Tensor]:
        """`L(w)` and `∇L(w)`, by one forward and one backward pass."""
        total, gradient = 0.0, torch.zeros_like(self.w)
        part = torch.empty_like(self.w)
        views = self.model.layout.split(part)
        with self._module_at(w), torch.enable_grad():
            for inputs, targets in self.data.batches(CHUNK):
                loss = self.loss(self.model.outputs(inputs), targets)
                self.model.differentiate(loss, views)
                gradient.add_(part, alpha=len(targets) / len(self.data))
                total += loss.item() * len(targets)
        return total / len(self.data), gradient

    def hessian_times(self, vectors: Tensor) -> Tensor:
        """`∇²L(w) v` for every row v, by differentiating the gradient once more (Pearlmutter 1994).

        A chunk's forward and first backward pass serve all rows. PyTorch's fused attention has no second
        derivative on the CPU, so that attention is computed step by step here.
        """
        products, part = torch.zeros_like(vectors), torch.empty_like(self.w)
        views = self.model.layout.split(part)
        rows = [self.model.layout.split(vector) for vector in vectors]
        with self._module_at(None), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            for inputs, targets in self.data.batches(CHUNK):
                gradients = self._differentiable_gradient(self.loss(self.model.outputs(inputs), targets))
                for number, row in enumerate(rows):
                    if not gradients:
                        break  # the loss is linear
                    last = number == len(rows) - 1
                    self._differentiate_again(gradients, row, views, keep=not last)
                    products[number].add_(part, alpha=len(targets) / len(self.data))
        return products

    def _differentiable_gradient(self, loss: Tensor) -> dict[int, Tensor]:
        """The pieces of the gradient that depend on the weights, by the parameter's position."""
        pieces = torch.autograd.grad(loss, self.model.parameters, create_graph=True, allow_unused=True)
        if not self._twice:
            self._twice = _differentiable_twice(pieces)
        if not self._twice:
            raise self._refusal("a part of it is marked as differentiable once.")
        return {i: piece for i, piece in enumerate(pieces) if piece is not None and piece.requires_grad}

    def _differentiate_again(
        self, gradients: dict[int, Tensor], row: list[Tensor], into: list[Tensor], keep: bool
    ) -> None:
        try:
            pieces = torch.autograd.grad(
                list(gradients.values()),
                self.model.parameters,
                [row[i] for i in gradients],
                retain_graph=keep,
                allow_unused=True,
            )
        except RuntimeError as problem:
            reason = str(problem).strip().split("\n")[0]
            if not any(word in reason for word in ("derivative", "twice", "double backward")):
                raise
            raise self._refusal(reason) from problem
        write_gradients(pieces, into)

    def _refusal(self, reason: str) -> FedflatError:
        name = type(self.model.module).__name__
        return FedflatError(f"{name} cannot be differentiated twice, which a Hessian needs: {reason}")

    @contextmanager
    def _module_at(self, w: Tensor | None) -> Iterator[nn.Module]:
        """The module at a point, all of it in evaluation mode; every part's own mode is put back."""
        modes = [(part, part.training) for part in self.model.module.modules()]
        try:
            self.model.module.eval()
            with self.model.at(self.w if w is None else w) as module:
                yield module
        finally:
            for part, training in modes:
                part.training = training


def _fitting(data: Shard | Federation, vector: Tensor) -> Shard:
    """All samples, in the floating type and on the device of the model."""
    if isinstance(data, Federation):
        return data.to(vector.dtype, vector.device).union()
    if not isinstance(data, Shard):
        given = "None; has the federation a test set?" if data is None else f"{type(data).__name__}."
        raise FedflatError(f"Give a federation, or a part of one such as federation.test, not {given}")

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(vector.device, vector.dtype if tensor.is_floating_point() else tensor.dtype)

    index = None if data.index is None else data.index.to(vector.device)
    pipeline = data.pipeline.to(vector.dtype)
    return replace(data, inputs=move(data.inputs), targets=move(data.targets), index=index, pipeline=pipeline)


def _differentiable_twice(gradients: Gradients) -> bool:
    """Whether no part is marked `once_differentiable`: autograd would silently take it for a constant."""
    seen: set[Node] = set()
    waiting = [gradient.grad_fn for gradient in gradients if gradient is not None]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "torch::autograd::Error":
            return False
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return True


def _padding_mask(model: FlatModel) -> Tensor | None:
    """0 on the padding rows of embeddings, 1 elsewhere; None where there are none."""
    rows = {
        id(part.weight): part.padding_idx
        for part in model.module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.padding_idx is not None
    }
    if not any(id(parameter) in rows for parameter in model.parameters):
        return None
    mask = torch.ones_like(model.vector)
    for parameter, view in zip(model.parameters, model.layout.split(mask), strict=True):
        if id(parameter) in rows:
            view[rows[id(parameter)]] = 0
    return mask
