"""Kernels lie in the flat vector with their channels last: other memory, the same numbers as plain PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedflat as ff
from fedflat.core.flat import FlatModel
from fedflat.models.cnn import cnn, lenet
from fedflat.models.conv.conv2d import Conv2d
from fedflat.models.resnet import resnet
from fedflat.models.vgg import vgg11

PAPERS = {
    "cnn": lambda: cnn((3, 32, 32), 10),
    "lenet": lambda: lenet((3, 32, 32), 10),
    "resnet8": lambda: resnet((3, 32, 32), 10, depth=8),
    "resnet18": lambda: resnet((3, 32, 32), 10),
    "vgg11": lambda: vgg11((3, 32, 32), 10),
}


def plain(module: nn.Module) -> nn.Module:
    """The same module with PyTorch's own convolutions."""
    module = copy.deepcopy(module)
    for child in module.modules():
        if isinstance(child, Conv2d):
            child.__class__ = nn.Conv2d
    return module


@pytest.mark.parametrize("name", PAPERS)
def test_outputs_and_gradients_of_the_plain_module(name: str):
    torch.manual_seed(0)
    module = PAPERS[name]().double()
    reference = plain(module)
    model = FlatModel(module, torch.float64)
    x = torch.randn(5, 32, 32, 3, dtype=torch.float64).permute(0, 3, 1, 2)
    y = torch.randint(10, (5,))
    torch.testing.assert_close(model.module(x), reference(x), rtol=1e-9, atol=1e-10)
    F.cross_entropy(reference(x), y).backward()
    found = model.layout.named(model.gradient(lambda m: F.cross_entropy(m(x), y)))
    for parameter, value in reference.named_parameters():
        torch.testing.assert_close(found[parameter], value.grad, rtol=1e-8, atol=1e-10)
    kernels = [p for p in model.parameters if p.dim() == 4 and p.shape[1] > 1 and p.shape[2] > 1]
    assert kernels
    assert all(k.is_contiguous(memory_format=torch.channels_last) for k in kernels)


def test_a_released_module_is_an_ordinary_one():
    module = PAPERS["cnn"]()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = FlatModel(module)
    released = model.release()
    for name, value in released.state_dict().items():
        assert value.is_contiguous()
        assert torch.equal(value, before[name])
    nn.utils.parameters_to_vector(released.parameters())  # refuses other memory orders


def test_a_module_of_one_s_own_keeps_its_order_in_memory():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 6)).to(memory_format=torch.channels_last)
    module[1].weight.data = torch.randn(5, 6).T
    before = {name: value.clone() for name, value in module.named_parameters()}
    model = FlatModel(module)
    for name, view in model.layout.named(model.vector).items():
        assert torch.equal(view, before[name])
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert module[1].weight.stride() == (1, 6)
    assert torch.equal(model.vector[108 + 4 : 108 + 4 + 30], before["1.weight"].T.reshape(-1))


class Backwards(torch.autograd.Function):
    """The identity, whose gradient comes in another order in memory."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.T.contiguous().T


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ Backwards.apply(self.weight).T


@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.1)])
def test_gradients_in_another_order_move_the_right_weights(momentum: float, decay: float, mu: float):
    torch.manual_seed(0)
    model = Turned()
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
    run = ff.train(
        ff.Federation([(x, y)]),
        model,
        ff.fedprox(mu=mu) if mu else "fedavg",
        local=ff.LocalSGD(lr=0.1, momentum=momentum, weight_decay=decay, batch_size=None, epochs=4),
        rounds=1,
        dtype=torch.float64,
    )
    optimiser = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=momentum, weight_decay=decay, fused=False
    )
    start = model.weight.detach().clone()
    for _ in range(4):
        optimiser.zero_grad()
        near = mu / 2 * (model.weight - start).square().sum()
        (F.cross_entropy(x @ model.weight.T, y) + near).backward()
        optimiser.step()
    torch.testing.assert_close(run.model.weight, model.weight, rtol=1e-12, atol=1e-12)
