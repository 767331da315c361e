"""The quick convolution is PyTorch's, to rounding: outputs, gradients, second derivatives, names."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import fedflat.models.conv.conv2d
import fedflat.models.conv.winograd
from fedflat.models.cnn import cnn, lenet
from fedflat.models.conv.conv2d import Conv2d, Limits
from fedflat.models.conv.taps import Taps
from fedflat.models.conv.winograd import Winograd, transforms
from fedflat.models.resnet import resnet
from fedflat.models.vgg import vgg11


@pytest.fixture(autouse=True)
def on_avx2(monkeypatch):
    """Where more layers are computed otherwise than by PyTorch than on other processors."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


def derivatives(conv: nn.Conv2d, x: torch.Tensor) -> list[torch.Tensor]:
    """Outputs, gradients, and a product with the Hessian."""
    x = x.clone().requires_grad_()
    y = conv(x)
    inputs = [x, *conv.parameters()]
    gradients = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
    product = sum((g * g).sum() for g in gradients)
    return [y, *gradients, *torch.autograd.grad(product, inputs)]


@pytest.mark.parametrize("side", [1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (1, 1), (1, 2), (5, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_same_numbers_as_pytorch(side, kernel, stride, bias):
    torch.manual_seed(side + kernel)
    plain = nn.Conv2d(129, 131, kernel, stride, padding=kernel // 2, bias=bias).double()
    quick = Conv2d(129, 131, kernel, stride, padding=kernel // 2, bias=bias).double()
    quick.load_state_dict(plain.state_dict())
    x = torch.randn(3, 129, side, side, dtype=torch.float64)
    for ours, theirs in zip(derivatives(quick, x), derivatives(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


MODELS = {
    "resnet18": partial(resnet, depth=18),
    "resnet8-cifar": partial(resnet, depth=8, stem="cifar"),
    "cnn": cnn,
    "lenet": lenet,
    "vgg11": vgg11,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_network_is_the_same(name, monkeypatch):
    torch.manual_seed(0)
    model = MODELS[name]((3, 32, 32), 10).double()
    x, y = torch.randn(8, 3, 32, 32, dtype=torch.float64), torch.randint(10, (8,))

    def gradients() -> list[torch.Tensor]:
        loss = F.cross_entropy(model(x), y)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    taken = set()
    find = Conv2d._way
    monkeypatch.setattr(Conv2d, "_way", lambda self, x: [way := find(self, x), taken.add(type(way))][0])
    quick = gradients()
    assert taken & {Taps, Winograd}, "another way was taken somewhere"
    monkeypatch.setattr(Conv2d, "forward", nn.Conv2d.forward)
    for ours, theirs in zip(quick, gradients(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_what_follows_may_change_the_output_in_place():
    quick = nn.Sequential(Conv2d(128, 128, 3, padding=1, bias=False), nn.ReLU(inplace=True)).double()
    x = torch.randn(2, 128, 2, 2, dtype=torch.float64, requires_grad=True)
    plain = nn.functional.conv2d(x, quick[0].weight, padding=1).relu()
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (quick(x), plain)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


# -- fewer multiplications -------------------------------------------------------------------------


@pytest.mark.parametrize("taps", [3, 4, 5])
def test_a_tile_is_a_convolution(taps):
    a, g, b = transforms(taps, torch.float64)
    x, w = torch.randn(taps + 3, dtype=torch.float64), torch.randn(taps, dtype=torch.float64)
    direct = torch.stack([x[first : first + taps] @ w for first in range(4)])
    torch.testing.assert_close(a.mT @ ((g @ w) * (b @ x)), direct)


def images(samples: int, channels: int, height: int, width: int, dtype=torch.float64) -> torch.Tensor:
    x = torch.randn(samples, channels, height, width, dtype=dtype)
    return x.contiguous(memory_format=torch.channels_last)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([3, 4, 5]),
    st.integers(0, 3),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(1, 5),
    st.integers(1, 300),
)
def test_any_image_by_fewer_multiplications(taps, padding, more_rows, more_columns, samples, largest):
    height, width = (max(1, taps - 2 * padding) + more for more in (more_rows, more_columns))
    x, w = images(samples, 3, height, width).requires_grad_(), images(2, 3, taps, taps).requires_grad_()
    y = F.conv2d(x, w, padding=padding)
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, [x, w], dy)
    way = Winograd((height, width), taps, (padding, padding))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(fedflat.models.conv.winograd, "LARGEST", largest * 100)  # some samples at a time
        close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-10)
        close(way.convolve(x, w), y)
        close(way.gradient_for_inputs(dy, w), dx)
        close(way.gradient_for_weights(dy, x), dw)
        for ours, theirs in zip(way.gradients(dy, x, w), (dx, dw), strict=True):
            close(ours, theirs)


@pytest.mark.parametrize(("kernel", "side", "padding"), [(5, 16, 2), (5, 14, 0), (3, 8, 1), (3, 7, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_second_derivatives_by_fewer_multiplications(kernel, side, padding, bias, monkeypatch):
    monkeypatch.setitem(fedflat.models.conv.conv2d.TABLE, "AVX2", Limits(0, 0, 0, 0, 0))
    torch.manual_seed(kernel + side)
    plain = nn.Conv2d(5, 6, kernel, padding=padding, bias=bias).double()
    quick = Conv2d(5, 6, kernel, padding=padding, bias=bias).double()
    quick.load_state_dict(plain.state_dict())
    x = images(3, 5, side, side)
    assert isinstance(quick._way(x), Winograd)
    for ours, theirs in zip(derivatives(quick, x), derivatives(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kernel", "inputs", "side"), [(5, 32, 16), (3, 64, 8)])
def test_rounding_stays_rounding_in_single_precision(kernel, inputs, side):
    torch.manual_seed(0)
    x, w = (
        images(50, inputs, side, side, torch.float32).relu(),
        images(64, inputs, kernel, kernel, torch.float32),
    )
    dy = images(50, 64, side, side, torch.float32)

    def derive(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        x, w = x.requires_grad_(), w.requires_grad_()
        y = F.conv2d(x, w, padding=kernel // 2)
        return [y.detach(), *torch.autograd.grad(y, [x, w], dy)]

    exact = derive(x.double(), w.double(), dy.double())
    direct = derive(x.clone(), w.clone(), dy)
    way = Winograd((side, side), kernel, (kernel // 2, kernel // 2))
    ours = [way.convolve(x, w), *way.gradients(dy, x, w)]
    for mine, theirs, value in zip(ours, direct, exact, strict=True):
        off, usual = ((each.double() - value).norm() / value.norm() for each in (mine, theirs))
        assert off < 1e-5
        assert off < 12 * usual


def test_where_fewer_multiplications_pay():
    def way(inputs: int, outputs: int, side: int, kernel: int = 3, samples: int = 50, **settings) -> type:
        convolution = Conv2d(inputs, outputs, kernel, padding=kernel // 2, **settings)
        return type(convolution._way(torch.empty(samples, inputs, side, side)))

    assert way(32, 64, 16, kernel=5) is way(64, 64, 8) is way(128, 128, 4) is Winograd
    assert way(3, 32, 32, kernel=5) is way(32, 32, 16) is type(None), "too few channels"
    assert way(64, 64, 8, samples=5) is type(None), "too few tiles"
    assert way(256, 256, 2) is way(256, 256, 1) is way(128, 128, 4, samples=5) is Taps, "small images"
    assert way(128, 128, 16, stride=2) is Taps
    assert (
        way(128, 128, 32, stride=2)
        is way(128, 128, 32, dilation=2)
        is way(128, 128, 32, groups=2)
        is type(None)
    )
    assert way(128, 128, 32, padding_mode="circular") is way(128, 128, 32, kernel=7) is type(None)
    half = Conv2d(64, 64, 3, padding=1).bfloat16()
    assert half._way(torch.empty(50, 64, 8, 8, dtype=torch.bfloat16)) is None, (
        "rounding would not stay rounding"
    )


def test_training_after_an_evaluation_that_came_first():
    """The small matrices are made once, here in inference mode, and then serve derivatives of any order."""
    transforms.cache_clear()
    quick, plain = Conv2d(64, 64, 3, padding=1).double(), nn.Conv2d(64, 64, 3, padding=1).double()
    plain.load_state_dict(quick.state_dict())
    x = images(50, 64, 8, 8)
    assert isinstance(quick._way(x), Winograd)
    with torch.inference_mode():
        quick(x)
    try:
        for ours, theirs in zip(derivatives(quick, x), derivatives(plain, x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    finally:
        transforms.cache_clear()
