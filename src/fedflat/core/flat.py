"""A module as one contiguous vector.

Trainable parameters are views of `vector`, so every piece of algebra on models is one operation on one tensor. To
take a gradient elsewhere, let the model stand on another vector: nothing is copied, no module is duplicated.
A kernel of the papers' convolutions lies in the vector with its channels last, which is how they are quickest; any
other parameter in the order it has in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import FedflatError
from .buffers import Buffers, check_numbers

Pieces = list[Tensor] | tuple[Tensor, ...]
"""A flat vector as one tensor per parameter."""
Gradients = tuple[Tensor | None, ...]
"""A gradient as one tensor per parameter: None where the loss does not depend on it, sparse for some embeddings."""
Scalar = float | Tensor
"""A number: a float on the CPU, a tensor without dimensions on an accelerator, which is never read back in a step."""
SMALLEST_NORM = 1e-12
"""Below this length a vector has no direction: `n(v) = 0`."""
CHANNELS_LAST = (0, 2, 3, 1)
"""Of a kernel (outputs, inputs, height, width), from the slowest dimension in memory to the quickest."""


# -- algebra ---------------------------------------------------------------------------------------


def inverse_norm(vector: Tensor) -> Scalar:
    """Find what makes `v` a unit vector: `1/‖v‖₂`, and 0 where v is 0, so that n(0) = 0."""
    norm = torch.linalg.vector_norm(vector)
    if not vector.is_cpu:
        return torch.where(norm > SMALLEST_NORM, norm.reciprocal(), 0.0)
    length = norm.item()
    return 1.0 / length if length > SMALLEST_NORM else 0.0


def axpy(at: Tensor, vector: Tensor, scale: Scalar, out: Tensor | None = None) -> Tensor:
    """`at + scale·vector`, in `out` or a new vector."""
    if isinstance(scale, Tensor):
        return torch.addcmul(at, vector, scale, out=out)
    return torch.add(at, vector, alpha=scale, out=out)


def axpy_(into: Tensor, vector: Tensor, scale: Scalar) -> Tensor:
    """`into ← into + scale·vector`."""
    return into.addcmul_(vector, scale) if isinstance(scale, Tensor) else into.add_(vector, alpha=scale)


def clip_(vector: Tensor, norm: float) -> None:
    """Shorten a vector in place to `norm`, if it is longer."""
    length = torch.linalg.vector_norm(vector)
    if not vector.is_cpu:
        vector.mul_((norm / length).clamp(max=1.0))
    elif (found := length.item()) > norm:
        vector.mul_(norm / found)


def sgd_(
    w: Pieces,
    d: Pieces,
    momentum: list[Tensor] | None,
    mu: float,
    weight_decay: float,
    lr: float,
    nesterov: bool = False,
    first: bool = False,
) -> None:
    """`b ← μ b + d + λ w` (b is d + λ w in the first step), `w ← w − η b`, in one sweep over memory."""
    if momentum is None and not weight_decay:
        torch._foreach_add_(w, d, alpha=-lr)
        return
    torch._fused_sgd_(
        w,
        d,
        momentum or [],
        weight_decay=weight_decay,
        momentum=mu,
        lr=lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=first,
    )


def cosine(a: Tensor, b: Tensor) -> float | None:
    """The cosine between two vectors; None where one of them is zero."""
    scale = float(inverse_norm(a)) * float(inverse_norm(b))
    # not torch.dot: its last bits depend on where in memory the vectors lie, which a resumed run need not repeat
    return torch.sum(a * b).item() * scale if scale else None


def all_dense(gradients: Gradients) -> bool:
    """Whether every piece is an ordinary tensor."""
    return not any(gradient is None or gradient.is_sparse for gradient in gradients)


# -- vectors in the shape of a model ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Flat:
    """One vector of parameters; `pieces` are its views in the parameters' shapes."""

    vector: Tensor
    pieces: list[Tensor]


@dataclass(frozen=True, eq=False)
class Layout:
    """How a model's trainable parameters lie in a flat vector."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    orders: tuple[tuple[int, ...], ...]
    """of every parameter's dimensions in memory, from the slowest to the quickest"""
    like: Tensor
    """a vector with no entries, of the model's type and on its device"""

    @property
    def sizes(self) -> list[int]:
        """How many entries each parameter has."""
        return [shape.numel() for shape in self.shapes]

    def split(self, vector: Tensor) -> list[Tensor]:
        """View a flat vector as one tensor per parameter, in the parameters' order."""
        pieces = zip(torch.split(vector, self.sizes), self.shapes, self.orders, strict=True)
        return [_view(piece, shape, order) for piece, shape, order in pieces]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """View a flat vector as one tensor per parameter, by name."""
        return dict(zip(self.names, self.split(vector), strict=True))

    def flat(self, vector: Tensor) -> Flat:
        """Put a vector beside its views."""
        return Flat(vector, self.split(vector))

    def empty(self) -> Flat:
        """A new vector; its content is undefined."""
        return self.flat(self.like.new_empty(sum(self.sizes)))

    def mask(self, choose: Callable[[str], bool]) -> Tensor:
        """1 on the entries of the parameters whose name is chosen, 0 elsewhere."""
        mask = self.like.new_zeros(sum(self.sizes))
        for name, view in self.named(mask).items():
            view.fill_(float(choose(name)))
        return mask


def write_gradients(gradients: Gradients, into: list[Tensor]) -> None:
    """Write a gradient into the views of a flat vector; no zeroing is needed before."""
    if all_dense(gradients):
        torch._foreach_copy_(into, cast("tuple[Tensor, ...]", gradients))
        return
    for view, gradient in zip(into, gradients, strict=True):
        if gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            view.zero_().index_add_(0, gradient._indices()[0], gradient._values())
        else:
            view.copy_(gradient)


class FlatModel:
    """A module whose trainable parameters are one vector.

    The module is taken over in place: its parameters become views of `vector`. Frozen parameters
    (`requires_grad=False`) stay as they are and are no part of it.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        check_numbers(module, dtype)
        self.module = module.to(device=device, dtype=dtype)
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise FedflatError(
                f"{type(module).__name__} has no trainable parameters; "
                "set requires_grad=True on what shall be trained."
            )
        self.parameters = [p for _, p in named]
        turned = {id(c.weight) for c in module.modules() if getattr(c, "channels_last", False)}
        orders = [CHANNELS_LAST if id(p) in turned else _order_in_memory(p) for p in self.parameters]
        self.vector = torch.cat(
            [p.detach().permute(order).reshape(-1) for p, order in zip(self.parameters, orders, strict=True)]
        )
        self.layout = Layout(
            names=tuple(name for name, _ in named),
            shapes=tuple(p.shape for p in self.parameters),
            orders=tuple(orders),
            like=self.vector.new_empty(0),
        )
        for p, value in zip(self.parameters, self.layout.split(self.vector), strict=True):
            p.data = value
            p.grad = None
        self.buffers = Buffers(module)
        self._writes: dict[bool, bool] = {}
        """whether the module changes its input in place, in evaluation and in training mode, once that is known"""

    @classmethod
    def of(cls, model: nn.Module | FlatModel) -> FlatModel:
        """A flat copy of a module, which stays as it is; a flat model is returned itself."""
        if isinstance(model, FlatModel):
            return model
        if not isinstance(model, nn.Module):
            raise FedflatError(f"Give a module, such as a run's model, not {type(model).__name__}.")
        first = next(model.parameters())
        return cls(copy.deepcopy(model), first.dtype, first.device)

    def copy(self, device: torch.device | str) -> FlatModel:
        """Another flat model of the same module, with its own memory, on a device."""
        module = copy.deepcopy(self.module)
        for name in self.layout.names:  # a mechanism may have frozen some for the round
            module.get_parameter(name).requires_grad_(True)
        return FlatModel(module, self.vector.dtype, device)

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent to another process as a module that owns its memory, and made flat again there."""
        module = copy.deepcopy(self.module)
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
            parameter.grad = None
        return FlatModel, (module, self.vector.dtype, self.vector.device)

    def release(self) -> nn.Module:
        """The module with parameters that own their memory again; this flat model is then done."""
        for parameter in self.parameters:
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
            parameter.grad = None
        return self.module

    @property
    def size(self) -> int:
        """The number of trainable parameters."""
        return self.vector.numel()

    def stand_on(self, point: Flat) -> None:
        """Let another vector be the model's, without a copy.

        It must lie in memory as the model's own does (where products' last bits may depend on that).
        """
        if point.vector is not self.vector:
            self.vector = point.vector
            for parameter, piece in zip(self.parameters, point.pieces, strict=True):
                parameter.data = piece

    def outputs(self, inputs: Tensor) -> Tensor:
        """What the module makes of a batch, which stays as it is: a module that writes to its input gets a copy.

        The first pass in either mode shows whether it does, on a copy that lies in memory as the batch does.
        """
        mode = self.module.training
        writes = self._writes.get(mode)
        if writes or torch.is_inference_mode_enabled():  # where nothing counts writes
            outputs: Tensor = self.module(inputs.clone())
            return outputs
        given = _copy_lying_alike(inputs) if writes is None else inputs
        version = given._version
        outputs = self.module(given)
        if writes is None:  # `x.data` and numpy write without being counted
            self._writes[mode] = given._version != version or not torch.equal(given, inputs)
        elif given._version != version:
            raise FedflatError(
                f"{type(self.module).__name__} changes some of its inputs in place, and not the first one, so the "
                "samples themselves are changed now: let its forward begin with x = x.clone(), and load them again."
            )
        return outputs

    # -- gradients ---------------------------------------------------------------------------------

    def differentiate(self, loss: Tensor, into: list[Tensor]) -> None:
        """Write the gradient of `loss` at the present point into views of a flat vector."""
        write_gradients(torch.autograd.grad(loss, self.parameters, allow_unused=True), into)

    def gradient(self, loss: Callable[[nn.Module], Tensor], at: Tensor | None = None) -> Tensor:
        """The gradient of `loss(module)` at `at` (default: where the model is), as a new vector."""
        result = torch.empty_like(self.vector)
        with self.at(at):
            self.differentiate(loss(self.module), self.layout.split(result))
        return result

    @contextmanager
    def at(self, point: Tensor | None) -> Iterator[nn.Module]:
        """The module at another point; afterwards every bit is as before (saved and copied back)."""
        if point is None:
            yield self.module
            return
        saved = self.vector.clone()
        try:
            self.vector.copy_(point)
            yield self.module
        finally:
            self.vector.copy_(saved)

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The module in evaluation mode (dropout off, normalisation by running statistics)."""
        if not self.module.training:
            yield self.module
            return
        self.module.eval()
        try:
            yield self.module
        finally:
            self.module.train()

    # -- buffers -----------------------------------------------------------------------------------

    def read_buffers(self) -> Tensor | None:
        """All persistent buffers (BatchNorm statistics and counters) as one vector; None where there are none."""
        return self.buffers.read(self.vector.dtype)

    def write_buffers(self, values: Tensor | None) -> None:
        """Put back what `read_buffers` gave, or an average of it; whole numbers are rounded."""
        if values is not None:
            self.buffers.write(values)


def _copy_lying_alike(batch: Tensor) -> Tensor:
    """A copy at the same place within 64 bytes, on which the last bits of products may depend."""
    copy = batch.clone()
    skipped = batch.data_ptr() % 64 // batch.element_size()
    if batch.device.type != "cpu" or not skipped or copy.stride() != batch.stride():
        return copy
    room = copy.new_empty(skipped + copy.numel())
    return room.as_strided(copy.shape, copy.stride(), skipped).copy_(batch)


def _order_in_memory(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions from the slowest to the quickest in memory; as they are, where there are gaps or overlaps."""
    given = tuple(range(tensor.dim()))
    if tensor.is_contiguous():
        return given
    order = tuple(sorted(given, key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else given


def _view(piece: Tensor, shape: torch.Size, order: tuple[int, ...]) -> Tensor:
    """A stretch of a vector as a tensor whose entries lie in memory in this order of dimensions."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return piece.view([shape[dimension] for dimension in order]).permute(back)
