"""How much faster than `nn.Conv2d` the other ways to convolve are, for the layers of the papers' networks.

A layer's forward and backward pass on images of 32x32 pixels, channels last, in single precision: processor time on
one core; the ways take turns. fedflat goes by a table of these numbers (`models/conv/conv2d.py`), with a column for
every kind of processor, and takes PyTorch's layer in doubt; a way that it takes here is in bold. The column for
AVX-512 also rests on an Intel machine, where Winograd took longer than PyTorch up to 64 channels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedflat.core.allocator import keep_memory
from fedflat.models import MODELS
from fedflat.models.conv.conv2d import Conv2d, _apply, _ways

from .pace import Target, markdown, ratio, say

NETWORKS = ("cnn", "lenet", "resnet8", "resnet18", "resnet18-cifar", "vgg11")
BATCHES = (20, 50, 100)


class Layer(NamedTuple):
    """A convolution and the side of the images that it sees."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    padding: int
    side: int

    def __str__(self) -> str:
        stride = f", stride {self.stride}" if self.stride > 1 else ""
        return f"{self.inputs} → {self.outputs}, {self.kernel}x{self.kernel}{stride}, {self.side}x{self.side} pixels"


def layers() -> dict[Layer, list[str]]:
    """The networks' convolutions of more than colours, and which networks have them."""
    found: dict[Layer, list[str]] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            assert isinstance(layer, Conv2d)
            sizes = layer.kernel_size[0], layer.stride[0], int(layer.padding[0])
            seen = Layer(layer.in_channels, layer.out_channels, *sizes, inputs[0].shape[-1])
            if seen.inputs > 3 and name not in found.setdefault(seen, []):
                found[seen].append(name)

        return hook

    for name in NETWORKS:
        network = MODELS[name]((3, 32, 32), 10).eval()
        for module in network.modules():
            if isinstance(module, Conv2d):
                module.register_forward_pre_hook(note(name))
        with torch.no_grad():
            network(torch.zeros(1, 3, 32, 32))
    return dict(sorted(found.items()))


def measure(quick: bool) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    keep_memory()
    result = []
    for layer, networks in layers().items():
        for batch in BATCHES[:1] if quick else BATCHES:
            seconds = compare(layer, batch, 3 if quick else 9)
            result.append({"layer": str(layer), "networks": networks, **seconds})
            say(f"{layer}, batch {batch}")
    return result


def compare(layer: Layer, batch: int, rounds: int) -> dict[str, Any]:
    """Seconds of every way, in turn, and the one that fedflat takes."""
    inputs, outputs, kernel, stride, padding, side = layer
    chosen = Conv2d(inputs, outputs, kernel, stride, padding)
    x = torch.randn(batch, inputs, side, side).contiguous(memory_format=torch.channels_last)
    w = chosen.weight.detach().contiguous(memory_format=torch.channels_last)
    plain = torch.conv2d(x, w, None, stride, padding)
    d = torch.randn_like(plain)
    winograd, taps = _ways((side, side), (kernel, kernel), (stride, stride), (padding, padding))
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "plain": lambda x, w: torch.conv2d(x, w, None, stride, padding),
        "taps": lambda x, w: _apply("convolve", x, w, taps).clone(),
    }
    if winograd is not None:
        ways["winograd"] = lambda x, w: _apply("convolve", x, w, winograd).clone()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
            began = time.process_time()
            torch.autograd.grad(ways[name](*leaves), leaves, d)
            if number > 0:
                seconds[name].append(round(time.process_time() - began, 6))
    way = chosen._way(x)
    taken = "plain" if way is None else type(way).__name__.lower()
    return {"batch": batch, "taken": taken, "seconds": seconds}


def table(result: list[dict[str, Any]]) -> str:
    rows = []
    for one in result:
        seconds, shown = one["seconds"], []
        for way in ("taps", "winograd"):
            text = str(ratio(seconds["plain"], seconds[way])) if way in seconds else "–"
            shown.append(f"**{text}**" if way == one["taken"] else text)
        networks = ", ".join(one["networks"])
        rows.append(
            [one["layer"], networks, str(one["batch"]), f"{1000 * median(seconds['plain']):.2f}", *shown]
        )
    return markdown(["layer", "of", "batch", "nn.Conv2d: ms", "faster: taps", "Winograd"], rows)


def targets(result: list[dict[str, Any]]) -> list[Target]:
    return []
