"""The quick convolution is PyTorch's, to rounding: outputs, gradients, second derivatives, names."""

import pytest
import torch
from torch import nn

from fedflat.models.fast import Conv2d
from fedflat.models.resnet import resnet


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


def test_a_whole_network_is_the_same(monkeypatch):
    model = resnet((3, 32, 32), 10, depth=18).double()
    x, y = torch.randn(4, 3, 32, 32, dtype=torch.float64), torch.randint(10, (4,))

    def gradients() -> list[torch.Tensor]:
        loss = nn.functional.cross_entropy(model(x), y)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    quick = gradients()
    monkeypatch.setattr(Conv2d, "forward", nn.Conv2d.forward)
    for ours, theirs in zip(quick, gradients(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_what_follows_may_change_the_output_in_place():
    quick = nn.Sequential(Conv2d(128, 128, 3, padding=1, bias=False), nn.ReLU(inplace=True)).double()
    x = torch.randn(2, 128, 2, 2, dtype=torch.float64, requires_grad=True)
    plain = nn.functional.conv2d(x, quick[0].weight, padding=1).relu()
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (quick(x), plain)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)
