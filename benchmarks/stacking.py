"""Whether training several clients at once pays: their parameters stacked, one batched product per layer, one thread.

Stacked steps are compared with the product's own loop, which takes the same steps one client after the other. The
stacked loops lack what the product does around a step (shuffling, gathering, states, aggregation), so they are the
best that stacking could give; a bare loop one after the other lacks it too and shows what stacking itself gains.
`bmm` is written by hand for fully connected networks, `vmap` is `torch.func` on any module.

fedflat does not stack. On the papers' models `vmap` gains nothing; it pays below some thousand parameters, where a
round takes milliseconds anyway, and `bmm` is for one kind of network. Against that, clients of a stack must take
equally many steps, every mechanism's vectors would be stacks too, and the last bits of a result would depend on who
is stacked with whom, so engines could not agree. On a GPU, where small kernels wait to be launched, stacking would
gain more than here; nobody has measured that. Several workers share a GPU instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import fedflat as ff
from fedflat.core.allocator import keep_memory
from fedflat.models import build_model

from .pace import Steps, Target, Training, markdown, ratio, say

LR = 0.01


@dataclass(frozen=True)
class Case:
    """A model, the batches of a client's round, and how many clients to stack."""

    model: str | tuple[int, ...]
    """a name, or the widths of a fully connected network"""
    shape: tuple[int, ...]
    batch: int
    batches: int
    stacks: tuple[int, ...] = (2, 4, 8)

    def federation(self, clients: int) -> ff.Federation:
        count = self.batch * self.batches
        data = torch.randn(clients * count, *self.shape), torch.randint(10, (clients * count,))
        return ff.Federation.from_indices(data, torch.arange(clients * count).view(clients, -1), classes=10)

    def module(self) -> nn.Module:
        if isinstance(self.model, str):
            return build_model(self.model, self.federation(1), seed=0)
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in zip(self.model, self.model[1:], strict=False):
            layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers[:-1])


CASES = {
    "MLP 784-200-200-10, batch 50": Case((784, 200, 200, 10), (784,), 50, 12),
    "MLP 32-16-10, batch 10": Case((32, 16, 10), (32,), 10, 12),
    "CNN of W2, batch 10": Case("cnn", (3, 32, 32), 10, 1, stacks=(2, 4)),
}


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    keep_memory()
    rounds = 2 if quick else 40
    return {
        label: {str(stack): compare(case, stack, rounds) for stack in case.stacks}
        for label, case in CASES.items()
    }


def compare(case: Case, stack: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of `stack` clients, each contender in turn."""
    federation = case.federation(stack)
    sgd = ff.LocalSGD(lr=LR, epochs=1, batch_size=case.batch)
    product = Training(federation, case.module(), local=sgd)
    stacked = {"bare": without(case, federation, stack), "vmap": with_vmap(case, federation, stack)}
    if not isinstance(case.model, str):
        stacked["bmm"] = with_bmm(case, federation, stack)
    seconds: dict[str, list[float]] = {name: [] for name in ("product", *stacked)}
    for number in range(rounds + 2):
        for name in seconds:
            began = time.perf_counter()
            product.round() if name == "product" else stacked[name](case.batches)
            if number >= 2:
                seconds[name].append((time.perf_counter() - began) / case.batches)
    product.close()
    say(f"{case.model}: {stack} clients")
    return seconds


def stacked_batches(case: Case, federation: ff.Federation, stack: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of all clients, beforehand."""
    each = [list(federation.client(n).batches(case.batch)) for n in range(stack)]
    return [tuple(torch.stack(part) for part in zip(*same, strict=True)) for same in zip(*each, strict=True)]


def without(case: Case, federation: ff.Federation, stack: int) -> Steps:
    batches = [list(federation.client(n).batches(case.batch)) for n in range(stack)]
    model = ff.FlatModel(case.module())
    values = model.layout.split(model.vector)

    def take(steps: int) -> None:
        for client in range(stack):
            for x, y in batches[client][:steps]:
                loss = F.cross_entropy(model.module(x), y)
                torch._foreach_add_(values, torch.autograd.grad(loss, model.parameters), alpha=-LR)

    return take


def with_bmm(case: Case, federation: ff.Federation, stack: int) -> Steps:
    batches = stacked_batches(case, federation, stack)
    linear = [layer for layer in case.module() if isinstance(layer, nn.Linear)]
    parameters = []
    for layer in linear:
        weight = layer.weight.detach().T.expand(stack, -1, -1).contiguous().requires_grad_()
        bias = layer.bias.detach().expand(stack, 1, -1).contiguous().requires_grad_()
        parameters += [weight, bias]
    values = [p.detach() for p in parameters]

    def take(steps: int) -> None:
        for step in range(steps):
            x, y = batches[step % len(batches)]
            for weight, bias in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
                x = torch.baddbmm(bias, x, weight).relu_()
            outputs = torch.baddbmm(parameters[-1], x, parameters[-2])
            loss = F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="sum") / case.batch
            torch._foreach_add_(values, torch.autograd.grad(loss, parameters), alpha=-LR)

    return take


def with_vmap(case: Case, federation: ff.Federation, stack: int) -> Steps:
    batches = stacked_batches(case, federation, stack)
    module = case.module()
    for child in module.modules():
        if isinstance(child, nn.ReLU):
            child.inplace = False  # vmap cannot write into what it has not batched
    parameters = {n: p.detach().expand(stack, *p.shape).contiguous() for n, p in module.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, values, (x,)), y)

    gradients = vmap(grad(loss))

    def take(steps: int) -> None:
        for step in range(steps):
            found = gradients(parameters, *batches[step % len(batches)])
            torch._foreach_add_(list(parameters.values()), list(found.values()), alpha=-LR)

    return take


def table(result: dict[str, Any]) -> str:
    rows = []
    for label, stacks in result.items():
        for stack, seconds in stacks.items():
            speeds = [
                str(ratio(seconds["product"], seconds[way])) if way in seconds else "–"
                for way in ("bare", "bmm", "vmap")
            ]
            rows.append([label, stack, f"{1000 * median(seconds['product']) / int(stack):.3f}", *speeds])
    header = ["model", "clients at once", "product, one after the other: ms a step"]
    return markdown(
        [*header, "faster: bare loop, one after the other", "stacked, bmm", "stacked, vmap"], rows
    )


def targets(result: dict[str, Any]) -> list[Target]:
    return []
