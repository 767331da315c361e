"""The architectures: what the papers state, against computations of our own, and a real training step of each."""

import copy
import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call

import fedflat as ff
from fedflat.errors import FedflatError, MissingExtra
from fedflat.models import MODELS, build_model, describe_model, load_weights, model_names
from fedflat.models.fasttext import FastText
from fedflat.models.pretrained import _import
from fedflat.models.resnet import resnet
from fedflat.models.vit import Attention

PRETRAINED = ["vit-b16", "swin-s", "swin-b"]
OFFLINE = [name for name in model_names() if name not in PRETRAINED]
RESNETS = [name for name in OFFLINE if name.startswith("resnet")]
FAMILIES = [
    "mlp",
    "cnn",
    "lenet",
    "resnet8",
    "resnet8-cifar-bn",
    "vgg11",
    "vit-small",
    "fasttext",
    "char-lstm",
]

DATASETS: dict[str, dict[str, Any]] = {
    "fashion-mnist": {"shape": (1, 28, 28), "classes": 10},
    "cifar10": {"shape": (3, 32, 32), "classes": 10},
    "cifar100": {"shape": (3, 32, 32), "classes": 100},
    "tiny-imagenet": {"shape": (3, 64, 64), "classes": 200},
    "ag-news": {"shape": (200,), "classes": 4, "vocabulary": 98_635},
    "shakespeare": {"shape": (80,), "classes": 86, "vocabulary": 86},
}
OWN_DATASETS = {
    "mlp": ["fashion-mnist"],
    "mlp-200-100": ["fashion-mnist"],
    "cnn": ["cifar10", "fashion-mnist", "tiny-imagenet"],
    "lenet": ["cifar100", "fashion-mnist", "tiny-imagenet"],
    "resnet8": ["cifar100"],
    "resnet18": ["cifar10", "fashion-mnist", "tiny-imagenet"],
    "vgg11": ["cifar100", "tiny-imagenet"],
    "vit-small": ["cifar10", "fashion-mnist", "tiny-imagenet"],
    "fasttext": ["ag-news"],
    "char-lstm": ["shakespeare"],
}
PAIRS = [
    pytest.param(name, data, marks=pytest.mark.slow if re.search("resnet(34|50)", name) else ())
    for name in OFFLINE
    for data in OWN_DATASETS.get(name, ["cifar10"])
]


def build(name: str, data: str = "") -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name](**DATASETS[data or OWN_DATASETS.get(name, ["cifar10"])[0]])


def batch(data: str, size: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    about = DATASETS[data]
    shape = (size, *about["shape"])
    inputs = torch.randn(shape, generator=rng)
    if "vocabulary" in about:
        inputs = torch.randint(about["vocabulary"], shape, generator=rng)
    return inputs, torch.randint(about["classes"], (size,), generator=rng)


def federation(data: str, clients: int = 2, **changes: Any) -> ff.Federation:
    about = {**DATASETS[data], **changes}
    samples = [batch(data, seed=number) for number in range(clients)]
    result = ff.Federation(clients=samples, test=batch(data, size=1, seed=clients), classes=about["classes"])
    result.vocabulary = about.get("vocabulary")
    return result


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def sketch(name: str, data: str = "") -> nn.Module:
    """The model without memory for its weights: enough to look at its layers."""
    with torch.device("meta"):
        return build(name, data)


# -- every model works ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "data"), PAIRS)
def test_one_round_of_training(name: str, data: str):
    clients = federation(data)
    model = build_model(name, clients, seed=3)
    run = ff.train(clients, model, "fedavg", ff.LocalSGD(lr=0.01, batch_size=4), rounds=1)
    row = run.history[0]
    assert row["steps"] == 2 and not row["rejected"]
    assert math.isfinite(row["train_loss"]) and math.isfinite(row["loss"])
    start = model.state_dict()
    assert not any(torch.equal(value, start[key]) for key, value in run.model.state_dict().items())
    assert run.model(batch(data, size=1)[0]).shape == (1, DATASETS[data]["classes"])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_teacher_with_other_weights_and_second_derivatives(name: str):
    model = build(name)
    data = OWN_DATASETS.get(name, ["cifar10"])[0]
    inputs, targets = batch(data)
    other = {key: p.detach() * 0.9 for key, p in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        expected = copy.deepcopy(model)
        expected.load_state_dict(other, strict=False)
        torch.testing.assert_close(functional_call(model, other, (inputs,)), expected(inputs), rtol=0, atol=0)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(model(inputs), targets), parameters, create_graph=True)
    product = sum((g * p.detach()).sum() for g, p in zip(gradients, parameters, strict=True))
    curvature = [c.to_dense() for c in torch.autograd.grad(product, parameters, materialize_grads=True)]
    assert all(torch.isfinite(c).all() for c in curvature) and any(c.any() for c in curvature)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_seed_decides_the_weights(name: str):
    clients = federation(OWN_DATASETS.get(name, ["cifar10"])[0])
    before = torch.get_rng_state()
    one, same, other = (build_model(name, clients, seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    vectors = [nn.utils.parameters_to_vector(m.parameters()) for m in (one, same, other)]
    assert torch.equal(vectors[0], vectors[1]) and not torch.equal(vectors[0], vectors[2])


def test_names_and_descriptions():
    assert set(OWN_DATASETS) <= set(OFFLINE) and set(PRETRAINED) <= set(model_names())
    norms = ("", "-bn", "-nonorm", "-cifar", "-cifar-bn", "-cifar-nonorm")
    assert {f"resnet{depth}{n}" for depth in (8, 18, 34, 50) for n in norms} == set(RESNETS)
    lines = {name: describe_model(name) for name in model_names()}
    assert all(20 < len(line) < 120 for line in lines.values())
    assert len(set(lines.values())) == len(lines)
    for name, line in lines.items():
        if stated := re.search(r"([\d,]+) parameters on (\S+)", line):
            data = {"CIFAR-10": "cifar10", "AG": "ag-news"}[stated[2].rstrip(".")]
            assert size(sketch(name, data)) == int(stated[1].replace(",", ""))


# -- the numbers of parameters -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "count"),
    [
        ("mlp", "fashion-mnist", 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10),
        ("mlp-200-100", "fashion-mnist", 784 * 200 + 200 + 200 * 100 + 100 + 100 * 10 + 10),
        ("cnn", "cifar10", 2_156_490),
        ("cnn", "fashion-mnist", 25 * 32 + 32 + 25 * 32 * 64 + 64 + 49 * 64 * 512 + 512 + 5130),
        ("lenet", "cifar10", 797_962),
        ("lenet", "cifar100", 815_332),
        ("resnet8", "cifar100", 1_258_404),
        ("vit-small", "cifar10", 1_825_162),
        ("fasttext", "ag-news", 98_635 * 32 + 32 * 32 + 32 + 32 * 4 + 4),
        ("char-lstm", "shakespeare", 86 * 8 + 1024 * (8 + 256 + 2) + 1024 * (256 + 256 + 2) + 257 * 86),
    ],
)
def test_stated_number_of_parameters(name: str, data: str, count: int):
    assert size(sketch(name, data)) == count


@pytest.mark.parametrize(("data", "head"), [("cifar10", (100, 10)), ("cifar100", (256, 100))])
def test_vgg11_number_of_parameters(data: str, head: tuple[int, int]):
    channels = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    convolutions = sum(9 * i * o + o for i, o in pairwise(channels))
    hidden, classes = head
    assert size(sketch("vgg11", data)) == convolutions + 513 * hidden + (hidden + 1) * classes
    kinds = [m for m in sketch("vgg11", data) if not isinstance(m, nn.ReLU | nn.Flatten)]
    letters = {nn.Conv2d: "c", nn.MaxPool2d: "M", nn.Linear: "f"}
    order = "".join(next(letters[k] for k in letters if isinstance(m, k)) for m in kinds)
    assert order == "cMcMccMccMccMff"


def test_resnet18_number_of_parameters_from_its_layers():
    layers = [(3, 64, 7)] + [(64, 64, 3)] * 4
    for width in (128, 256, 512):
        layers += [
            (width // 2, width, 3),
            (width, width, 3),
            (width // 2, width, 1),
            (width, width, 3),
            (width, width, 3),
        ]
    convolutions = sum(i * o * k * k for i, o, k in layers)
    norms = sum(2 * o for _, o, _ in layers)
    head = 512 * 10 + 10
    assert (
        size(sketch("resnet18")) == size(sketch("resnet18-bn")) == convolutions + norms + head == 11_181_642
    )
    assert len(list(sketch("resnet18").parameters())) == 62
    assert size(sketch("resnet18-nonorm")) == convolutions + head
    assert size(sketch("resnet18-cifar")) == convolutions + norms + head - 64 * 3 * (49 - 9)


@pytest.mark.parametrize(("depth", "count"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)])
def test_resnets_have_the_known_numbers_of_parameters_on_imagenet(depth: int, count: int):
    with torch.device("meta"):
        assert size(MODELS[f"resnet{depth}"]((3, 224, 224), 1000)) == count


# -- layers against computations of our own --------------------------------------------------------------


@pytest.mark.parametrize("name", RESNETS)
def test_norms_are_those_of_the_name(name: str):
    modules = list(sketch(name).modules())
    groups = [m.num_groups for m in modules if isinstance(m, nn.GroupNorm)]
    batches = [m for m in modules if isinstance(m, nn.BatchNorm2d)]
    convolutions = [m for m in modules if isinstance(m, nn.Conv2d)]
    assert all(m.bias is None for m in convolutions)
    if name.endswith("-bn"):
        assert not groups and len(batches) == len(convolutions)
    elif name.endswith("-nonorm"):
        assert not groups and not batches
    else:
        assert not batches and groups == [2] * len(convolutions)


def test_the_stem_may_have_a_norm_of_its_own():
    model = resnet((3, 32, 32), 10, norm="batch", stem="cifar", stem_norm="group")
    assert [type(m) for m in model.modules() if "Norm" in type(m).__name__][:2] == [
        nn.GroupNorm,
        nn.BatchNorm2d,
    ]


def plain_resnet(model: nn.Module, x: Tensor, blocks: tuple[int, ...], stem: str, norm: bool) -> Tensor:
    """A residual network by functions only, ReLU before the max-pool, as the paper writes it."""
    w = model.state_dict()

    def normed(x: Tensor, key: str) -> Tensor:
        return F.group_norm(x, 2, w[f"{key}.weight"], w[f"{key}.bias"]) if norm else x

    x = F.conv2d(
        x,
        w["stem.conv.weight"],
        stride=2 if stem == "imagenet" else 1,
        padding=3 if stem == "imagenet" else 1,
    )
    x = F.relu(normed(x, "stem.norm"))
    if stem == "imagenet":
        x = F.max_pool2d(x, 3, stride=2, padding=1)
    for stage, count in enumerate(blocks, start=1):
        for number in range(count):
            key = f"stage{stage}.{number}"
            stride = 2 if stage > 1 and number == 0 else 1
            y = F.relu(
                normed(
                    F.conv2d(x, w[f"{key}.body.conv1.weight"], stride=stride, padding=1), f"{key}.body.norm1"
                )
            )
            y = normed(F.conv2d(y, w[f"{key}.body.conv2.weight"], padding=1), f"{key}.body.norm2")
            if stride == 2:
                x = normed(F.conv2d(x, w[f"{key}.shortcut.conv.weight"], stride=2), f"{key}.shortcut.norm")
            x = F.relu(x + y)
    return F.linear(x.mean(dim=(2, 3)), w["fc.weight"], w["fc.bias"])


@pytest.mark.parametrize(
    ("name", "blocks", "stem", "norm"),
    [
        ("resnet8", (1, 1, 1), "imagenet", True),
        ("resnet18", (2, 2, 2, 2), "imagenet", True),
        ("resnet8-cifar", (1, 1, 1), "cifar", True),
        ("resnet18-cifar-nonorm", (2, 2, 2, 2), "cifar", False),
    ],
)
def test_resnet_is_the_formula(name: str, blocks: tuple[int, ...], stem: str, norm: bool):
    model = build(name).double()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key:
                p.add_(torch.randn_like(p) / 4)
        x = batch("cifar10")[0].double()
        torch.testing.assert_close(model(x), plain_resnet(model, x, blocks, stem, norm))


def test_bottleneck_is_the_formula():
    model = build("resnet50").double()
    block, w = model.stage2[0], model.stage2[0].state_dict()
    x = torch.randn(2, 256, 6, 6, dtype=torch.float64)

    def normed(x: Tensor, key: str) -> Tensor:
        return F.group_norm(x, 2, w[f"{key}.weight"], w[f"{key}.bias"])

    y = F.relu(normed(F.conv2d(x, w["body.conv1.weight"]), "body.norm1"))
    y = F.relu(normed(F.conv2d(y, w["body.conv2.weight"], stride=2, padding=1), "body.norm2"))
    y = normed(F.conv2d(y, w["body.conv3.weight"]), "body.norm3")
    y = F.relu(y + normed(F.conv2d(x, w["shortcut.conv.weight"], stride=2), "shortcut.norm"))
    torch.testing.assert_close(block(x), y)


def plain_convolutions(x: Tensor, w: dict[str, Tensor], pooled: list[int], padding: int) -> Tensor:
    """Convolutions, each with ReLU and then perhaps max-pool, and linear layers with ReLU between them."""
    convolutions = sum(key.startswith("conv") for key in w) // 2
    for number in range(1, convolutions + 1):
        x = F.relu(F.conv2d(x, w[f"conv{number}.weight"], w[f"conv{number}.bias"], padding=padding))
        x = F.max_pool2d(x, 2) if number in pooled else x
    x = x.flatten(1)
    linear = sum(key.startswith("fc") for key in w) // 2
    for number in range(1, linear + 1):
        x = F.linear(x, w[f"fc{number}.weight"], w[f"fc{number}.bias"])
        x = F.relu(x) if number < linear else x
    return x


@pytest.mark.parametrize(
    ("name", "pooled", "padding"),
    [("mlp", [], 0), ("cnn", [1, 2], 2), ("lenet", [1, 2], 0), ("vgg11", [1, 2, 4, 6, 8], 1)],
)
def test_pooling_before_relu_changes_neither_values_nor_gradients(name: str, pooled: list[int], padding: int):
    model = build(name).double()
    inputs, targets = batch(OWN_DATASETS[name][0])
    outputs = model(inputs.double())
    w = dict(model.named_parameters())
    expected = plain_convolutions(inputs.double(), w, pooled, padding)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-14)
    gradients = [
        torch.autograd.grad(F.cross_entropy(y, targets), list(w.values())) for y in (outputs, expected)
    ]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-14)


def plain_attention(layer: nn.Module, x: Tensor, heads: int, scale: float) -> Tensor:
    """Head by head, sample by sample."""
    w = layer.state_dict()
    width = x.shape[-1]
    q, k, v = (
        x @ w["qkv.weight"][i : i + width].T + w["qkv.bias"][i : i + width]
        for i in range(0, 3 * width, width)
    )
    mixed = torch.empty_like(x)
    for sample in range(len(x)):
        for head in range(heads):
            part = slice(head * width // heads, (head + 1) * width // heads)
            scores = torch.exp(q[sample][:, part] @ k[sample][:, part].T / scale)
            mixed[sample][:, part] = scores / scores.sum(dim=1, keepdim=True) @ v[sample][:, part]
    return mixed @ w["out.weight"].T + w["out.bias"]


def test_attention_divides_by_the_root_of_the_whole_width():
    torch.manual_seed(0)
    layer = Attention(384, 8).double()
    x = torch.randn(2, 64, 384, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain_attention(layer, x, 8, math.sqrt(384)))
        assert not torch.allclose(layer(x), plain_attention(layer, x, 8, math.sqrt(384 / 8)))


def test_vision_transformer_is_the_formula():
    model = build("vit-small").double().eval()
    w = model.state_dict()
    images = batch("cifar10", size=2)[0].double()
    # channel by channel within a patch, patches row by row
    patches = F.unfold(images, kernel_size=4, stride=4).mT
    assert patches.shape == (2, 64, 48) and w["positions"].shape == (64, 384)
    assert 0.97 < w["positions"].std() < 1.03
    with torch.no_grad():
        x = patches @ w["embedding.weight"].T + w["embedding.bias"] + w["positions"]
        for number in range(2):
            encoder = model.encoders[number]
            key = f"encoders.{number}"
            y = F.layer_norm(x, (384,), w[f"{key}.norm1.weight"], w[f"{key}.norm1.bias"])
            x = x + plain_attention(encoder.attention, y, 8, math.sqrt(384))
            y = F.layer_norm(x, (384,), w[f"{key}.norm2.weight"], w[f"{key}.norm2.bias"])
            for layer in ("fc1", "fc2"):
                y = F.linear(y, w[f"{key}.mlp.{layer}.weight"], w[f"{key}.mlp.{layer}.bias"])
                y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
            x = x + y
        x = F.layer_norm(x.mean(dim=1), (384,), w["norm.weight"], w["norm.bias"])
        torch.testing.assert_close(model(images), x @ w["fc.weight"].T + w["fc.bias"])
    assert not any(isinstance(m, nn.Dropout) for m in model.modules())


def test_fasttext_is_linear_in_a_mean_that_counts_paddings():
    torch.manual_seed(0)
    model = FastText(vocabulary=50, classes=4).double()
    w = model.state_dict()
    assert not w["embedding.weight"][0].any()
    tokens = torch.tensor([[7, 9, 0, 0, 0]])
    mean = (w["embedding.weight"][7] + w["embedding.weight"][9]) / 5
    expected = w["fc2.weight"] @ (w["fc1.weight"] @ mean + w["fc1.bias"]) + w["fc2.bias"]
    torch.testing.assert_close(model(tokens)[0], expected)
    model(tokens).sum().backward()
    assert model.embedding.weight.grad is not None and not model.embedding.weight.grad[0].any()


def test_fasttext_gives_sparse_gradients_when_asked():
    tokens = torch.tensor([[7, 9, 7, 0, 0]])
    gradients = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = FastText(vocabulary=50, classes=4, sparse=sparse)
        (gradient,) = torch.autograd.grad(model(tokens).sum(), [model.embedding.weight])
        assert gradient.is_sparse == sparse
        gradients.append(gradient.to_dense())
    torch.testing.assert_close(gradients[0], gradients[1])


def test_lstm_is_the_formula():
    model = build("char-lstm").double()
    w = model.state_dict()
    characters = batch("shakespeare", size=2)[0][:, :7]
    steps = list(F.embedding(characters, w["embedding.weight"]).unbind(1))
    for layer in range(2):
        h = c = torch.zeros(2, 256, dtype=torch.float64)
        for position, x in enumerate(steps):
            gates = F.linear(x, w[f"lstm.weight_ih_l{layer}"], w[f"lstm.bias_ih_l{layer}"])
            gates = gates + F.linear(h, w[f"lstm.weight_hh_l{layer}"], w[f"lstm.bias_hh_l{layer}"])
            i, f, g, o = gates.chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            steps[position] = h
    torch.testing.assert_close(model(characters), F.linear(steps[-1], w["fc.weight"], w["fc.bias"]))


# -- mistakes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "vocabulary", "says"),
    [
        ("cnn", (200,), 98_635, "cnn needs images"),
        ("cnn", (28, 28), None, "(channels, height, width)"),
        ("cnn", (1, 3, 3), None, "at least 4x4 pixels"),
        ("lenet", (1, 8, 8), None, "at least 16x16 pixels"),
        ("vgg11", (1, 28, 28), None, "at least 32x32 pixels"),
        ("vit-small", (3, 30, 32), None, "multiples of 4"),
        ("resnet18-cifar-bn", (784,), None, "resnet18 needs images"),
        ("vit-b16", (1, 28, 28), None, "(3, height, width)"),
        ("mlp", (200,), 98_635, "quantities (for text: fasttext, char-lstm)"),
        ("fasttext", (3, 32, 32), None, "(tokens,)"),
        ("fasttext", (200,), None, "`vocabulary`"),
        ("char-lstm", (1, 28, 28), None, "(tokens,)"),
        ("char-lstm", (80,), 10, "10 characters"),
    ],
)
def test_samples_a_model_cannot_take(name: str, shape: tuple[int, ...], vocabulary: int | None, says: str):
    with pytest.raises(FedflatError) as refusal:
        MODELS[name](shape, 86, vocabulary)
    assert says in str(refusal.value) and name.partition("-")[0] in str(refusal.value)
    assert str(shape) in str(refusal.value) or "10 characters" in says


def test_smallest_images_work():
    for name, side in [
        ("cnn", 4),
        ("lenet", 16),
        ("vgg11", 32),
        ("vit-small", 4),
        ("resnet8", 1),
        ("resnet18-cifar", 1),
    ]:
        assert MODELS[name]((2, side, side), 3)(torch.randn(2, 2, side, side)).shape == (2, 3)


def test_text_is_refused_by_name_in_training():
    with pytest.raises(FedflatError, match=r"cnn needs images .* \(200,\)"):
        ff.train(federation("ag-news"), "cnn", rounds=1)
    with pytest.raises(FedflatError, match=r"fasttext needs .* \(3, 32, 32\)"):
        ff.train(federation("cifar10"), "fasttext", rounds=1)


@pytest.mark.parametrize(
    ("name", "meant"), [("resnet18-batch", "resnet18"), ("len", "lenet"), ("vit-smal", "vit-small")]
)
def test_unknown_names(name: str, meant: str):
    with pytest.raises(FedflatError, match=f"There is no model '{name}'. Did you mean '{meant}"):
        build_model(name, federation("cifar10"), 0)
    with pytest.raises(FedflatError, match="There is no model"):
        describe_model(name)


@pytest.mark.parametrize("given", [{"norm": "layer"}, {"stem": "imagnet"}, {"depth": 19}, {"stem_norm": "x"}])
def test_impossible_resnets(given: dict[str, Any]):
    with pytest.raises(FedflatError, match=f"resnet: {next(iter(given))}"):
        resnet((3, 32, 32), 10, **given)


# -- weights from files --------------------------------------------------------------------------------


def save(state: Any, file: Path) -> Path:
    save_file(state, file) if file.suffix == ".safetensors" else torch.save(state, file)
    return file


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
def test_weights_of_a_file_and_a_new_head(suffix: str, tmp_path: Path):
    source = build("lenet", "cifar100").state_dict()
    file = save(source, tmp_path / f"weights{suffix}")
    same = build_model(f"lenet:{file}", federation("cifar100"), seed=4).state_dict()
    assert all(torch.equal(same[key], source[key]) for key in source)
    other = build_model(f"lenet:{file}", federation("cifar10"), seed=4).state_dict()
    drawn = build_model("lenet", federation("cifar10"), seed=4).state_dict()
    for key in source:
        assert torch.equal(other[key], drawn[key] if key.startswith("fc3") else source[key])


@pytest.mark.parametrize("wrapper", ["model", "state_dict"])
def test_weights_inside_a_checkpoint_or_without_a_head(wrapper: str, tmp_path: Path):
    source = build("lenet", "cifar10").state_dict()
    model = build("lenet", "cifar100")
    body = {key: value.half() for key, value in source.items() if not key.startswith("fc3")}
    load_weights(model, save({wrapper: body, "epoch": 3}, tmp_path / "a.pth"))
    assert torch.equal(model.state_dict()["conv2.bias"], source["conv2.bias"].half().float())


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "classes"), [(18, 10), (34, 7), (50, 10)])
def test_weights_of_torchvision_s_residual_networks(depth: int, classes: int, tmp_path: Path):
    """The same outputs on the same images; a head for other classes is drawn."""
    torchvision = _import("torchvision")
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, f"resnet{depth}")(num_classes=10).train()
    x = torch.randn(2, 3, 64, 64)
    theirs(x)  # statistics that are not 0 and 1
    file = save(theirs.state_dict(), tmp_path / "weights.pth")
    ours = MODELS[f"resnet{depth}-bn"]((3, 64, 64), classes)
    load_weights(ours, file)
    theirs.fc, ours.fc = (nn.Identity(), nn.Identity()) if classes != 10 else (theirs.fc, ours.fc)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(FedflatError, match=r"not of this model: the file has without use .*running_mean"):
        load_weights(MODELS[f"resnet{depth}"]((3, 64, 64), classes), file)


def test_training_can_go_on_from_a_former_run(tmp_path: Path):
    run = ff.train(federation("cifar10"), "resnet8-bn", rounds=1, out=tmp_path / "run")
    model = build_model(f"resnet8-bn:{tmp_path / 'run' / 'model.safetensors'}", federation("cifar10"), 7)
    for key, value in run.model.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)


def test_entries_that_the_model_computes_itself_are_passed_over(tmp_path: Path):
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("table", torch.zeros(3), persistent=False)
    stored = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2), "table": torch.ones(3)}
    load_weights(model, save(stored, tmp_path / "a.pt"))
    assert model[0].weight.eq(1).all()
    with pytest.raises(FedflatError, match="has without use 1 \\(other\\)"):
        load_weights(model, save({**stored, "other": torch.ones(1)}, tmp_path / "b.pt"))


def broken(kind: str, folder: Path) -> Path:
    """A weights file for `lenet` with something wrong."""
    state = build("lenet", "cifar10").state_dict()
    match kind:
        case "missing":
            return folder / "nowhere.pth"
        case "suffix":
            return save(state, folder / "weights.bin")
        case "damaged":
            (folder / "weights.safetensors").write_bytes(b"\xff" * 64)
            return folder / "weights.safetensors"
        case "pickle":
            return save(build("lenet"), folder / "weights.pt")
        case "values":
            return save({**state, "epoch": 3}, folder / "weights.pt")
        case "list":
            return save([1, 2], folder / "weights.pt")
        case "keys":
            renamed = {key.replace("conv", "layer"): value for key, value in state.items()}
            return save(renamed, folder / "weights.safetensors")
        case "shape":
            return save(build("lenet", "fashion-mnist").state_dict(), folder / "weights.pth")
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "There is no file .*nowhere.pth"),
        ("suffix", ".safetensors, .pth or .pt, not '.bin'"),
        ("damaged", "weights.safetensors cannot be read as weights: "),
        ("pickle", "weights.pt cannot be read as weights: Weights only load failed"),
        ("values", "other things than tensors"),
        ("list", "cannot be read as weights"),
        ("keys", r"lacks 4 \(conv1.bias, conv1.weight, conv2.bias, ...\), has without use 4 \(layer1.bias"),
        ("shape", r"has in another shape 2 \(conv1.weight, fc1.weight\)"),
    ],
)
def test_files_that_do_not_fit(kind: str, says: str, tmp_path: Path):
    model = build("lenet", "cifar10")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FedflatError, match=says) as refusal:
        load_weights(model, broken(kind, tmp_path))
    assert len(str(refusal.value).splitlines()) == 1
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


# -- pretrained transformers ---------------------------------------------------------------------------


class StandIn(nn.Module):
    """Has a head as the large models have, and takes 224x224 pixels only."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 4, kernel_size=56, stride=56)
        self.head = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1:] == (3, 224, 224)
        return self.head(self.patches(x).mean(dim=(2, 3)))


@pytest.mark.parametrize("name", PRETRAINED)
def test_without_timm_the_extra_is_named(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(MissingExtra, match=rf"{name} needs timm.*fedflat\[vision\]"):
        build_model(name, federation("tiny-imagenet"), 0)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_pretrained_model_trains_on_smaller_images(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def create(name: str, **options: Any) -> nn.Module:
        asked.append(name)
        return StandIn(options["num_classes"])

    timm = SimpleNamespace(create_model=create) if library == "timm" else None
    models = SimpleNamespace(swin_s=lambda **options: create("swin_s", **options))
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=models))
    source = StandIn(21_841)
    file = save(source.state_dict(), tmp_path / "in22k.safetensors")
    clients = federation("tiny-imagenet")
    model = build_model(f"swin-s:{file}", clients, 0)
    assert asked == ["swin_small_patch4_window7_224" if library == "timm" else "swin_s"]
    assert torch.equal(model.patches.weight, source.patches.weight) and model.head.out_features == 200
    run = ff.train(clients, f"swin-s:{file}", rounds=1)
    assert run.model(batch("tiny-imagenet")[0]).shape == (4, 200)
    assert list(run.model.state_dict()) == list(source.state_dict())


def test_torchvision_for_another_machine_is_imported_all_the_same(tmp_path: Path):
    """Its import fails where its operators, built for a GPU, cannot be loaded; they are never needed."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "part.py").write_text("")
    (package / "__init__.py").write_text(
        "import torch\n"
        "from . import part\n"
        "if not hasattr(torch.ops.torchvision, 'nms'):\n"
        "    raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    code = "from fedflat.models.pretrained import _import as get\nprint(get('torchvision').part.__name__, get('xyz'))"
    places = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.split() == ["torchvision.part", "None"], done.stderr


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_an_installed_library_that_fails_says_so(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("timm", "torchvision"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, package)
    (tmp_path / f"{package}.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(FedflatError, match=f"{package} is installed but cannot be imported: No module named"):
        build_model("vit-b16", federation("tiny-imagenet"), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("vit-b16", 85_952_456), ("swin-s", 48_991_058), ("swin-b", 86_948_224)]
)
def test_the_real_transformers(name: str, count: int, tmp_path: Path):
    clients = federation("tiny-imagenet", classes=200)
    model = build_model(name, clients, 0)
    assert size(model) == count
    file = save(model.state_dict(), tmp_path / "weights.safetensors")
    again = build_model(f"{name}:{file}", federation("tiny-imagenet", classes=10_000), 1)
    body = list(model.state_dict())[:-2]
    assert all(torch.equal(model.state_dict()[key], again.state_dict()[key]) for key in body)
    with torch.no_grad():
        assert again(batch("tiny-imagenet", size=1)[0]).shape == (1, 10_000)
