"""How convolutions are computed is chosen by processor and shape, once, where a run begins, and noted."""

import contextlib
import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedflat as ff
from fedflat.cli import main
from fedflat.models import build_model
from fedflat.models.conv.conv2d import Conv2d, column_of
from fedflat.models.resnet import resnet


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this machine's processor another one."""
    return lambda name: monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: name)


def network() -> nn.Module:
    """Its second convolution is one of taps on AVX2 and PyTorch's elsewhere."""
    torch.manual_seed(1)
    first, second = Conv2d(1, 128, 3, padding=1), Conv2d(128, 128, 3, padding=1)
    return nn.Sequential(first, nn.MaxPool2d(4), nn.ReLU(), second, nn.Flatten(), nn.Linear(512, 10))


def plain(module: nn.Module) -> nn.Module:
    """The same with PyTorch's own layers, laid out channels last."""
    for layer in module.modules():
        if isinstance(layer, Conv2d):
            layer.__class__, layer.channels_last = nn.Conv2d, True
    return module


def train(model: str | nn.Module, size: int = 20, rounds: int = 1, **more: Any) -> ff.Run:
    federation = ff.federate("digits", ff.Dirichlet(100.0), clients=10, seed=0)
    local = ff.LocalSGD(lr=0.05, steps=2, batch_size=size)
    return ff.train(
        federation, model, "fedavg", local, participation=2, rounds=rounds, eval_every=rounds, **more
    )


def recorded(out: Path) -> dict[str, Any]:
    return json.loads((out / "run.json").read_text())


SHAPES = {
    "McMahan's CNN": (32, 64, 5, 1, 16, 50),
    "LeNet": (64, 64, 5, 1, 14, 50),
    "ResNet, first stage": (64, 64, 3, 1, 8, 50),
    "ResNet, first stage, CIFAR stem": (64, 64, 3, 1, 32, 50),
    "ResNet, second stage, CIFAR stem": (128, 128, 3, 1, 16, 50),
    "ResNet, third stage, CIFAR stem": (256, 256, 3, 1, 8, 50),
    "VGG, 4x4": (512, 512, 3, 1, 4, 100),
    "VGG, 4x4, few samples": (512, 512, 3, 1, 4, 50),
    "VGG, 4x4, fewer samples": (512, 512, 3, 1, 4, 20),
    "VGG, 2x2": (512, 512, 3, 1, 2, 50),
    "ResNet, fourth stage": (512, 512, 3, 1, 1, 10),
    "ResNet, between stages": (128, 256, 3, 2, 16, 50),
    "stem": (3, 64, 3, 1, 32, 50),
}
CHOICES = {
    "AVX2": "winograd winograd winograd winograd winograd winograd winograd winograd taps taps taps taps plain",
    "AVX512": "plain plain plain plain plain winograd winograd plain plain taps taps plain plain",
    "DEFAULT": " ".join(["plain"] * 13),
    "AVX10": " ".join(["plain"] * 13),
}


@pytest.mark.parametrize("capability", CHOICES)
def test_the_choice_is_that_of_processor_and_shape(capability: str, processor):
    processor(capability)
    for (name, shape), wanted in zip(SHAPES.items(), CHOICES[capability].split(), strict=True):
        inputs, outputs, kernel, stride, side, samples = shape
        padding = 0 if name == "LeNet" else kernel // 2
        layer = Conv2d(inputs, outputs, kernel, stride, padding=padding)
        way = layer._way(torch.empty(samples, inputs, side, side))
        assert (type(way).__name__.lower() if way else "plain") == wanted, name


def test_an_unknown_processor_has_pytorch_s_layers(processor):
    processor("SVE256")
    ours, theirs = network(), plain(network())
    assert train(ours).server.w.equal(train(theirs).server.w)


def test_without_speed_bits_are_those_of_pytorch_s_layers(processor):
    processor("AVX2")
    federation = ff.federate("digits", ff.Dirichlet(100.0), clients=10, seed=0)
    theirs = train(plain(build_model("cnn", federation, 0)), size=100).server.w
    assert train("cnn", size=100, fast=False).server.w.equal(theirs)
    assert train(build_model("cnn", federation, 0, fast=False), size=100).server.w.equal(theirs)
    assert train(build_model("cnn", federation, 0), size=100, fast=False).server.w.equal(theirs)
    quick = train("cnn", size=100).server.w
    assert not quick.equal(theirs)
    torch.testing.assert_close(quick, theirs, rtol=1e-3, atol=1e-5)


def test_copies_keep_the_choice(processor):
    processor("AVX2")
    module = network()
    bits = train(module).server.w
    processor("AVX512")
    flat = ff.FlatModel(copy.deepcopy(module))
    copies = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        pickle.loads(pickle.dumps(flat)).release(),
    ]
    for copied in copies:
        assert column_of(copied) == "AVX2"
        assert train(copied).server.w.equal(bits)
    assert not train(network()).server.w.equal(bits), "the choice makes no difference"


def test_a_run_notes_how_its_convolutions_are_computed(tmp_path: Path, processor):
    processor("AVX2")
    train("cnn", size=100, out=tmp_path / "cnn")
    assert recorded(tmp_path / "cnn")["convolutions"] == {
        "column": "AVX2",
        "samples": 100,
        "plain": 1,
        "taps": 0,
        "winograd": 1,
    }
    train("mlp", out=tmp_path / "mlp")
    assert recorded(tmp_path / "mlp")["convolutions"] is None
    train("cnn", size=None, fast=False, out=tmp_path / "plain")
    noted = recorded(tmp_path / "plain")
    assert noted["fast"] is False
    assert (noted["convolutions"]["column"], noted["convolutions"]["plain"]) == ("plain", 2)


def test_noting_it_changes_nothing(tmp_path: Path):
    module = resnet((1, 8, 8), 10, depth=8, norm="batch")
    runs = [train(module, out=out) for out in (None, tmp_path / "run")]
    states = [run.model.state_dict() for run in runs]
    assert all(states[0][name].equal(states[1][name]) for name in states[0])


def test_a_resumed_run_keeps_the_choice_on_another_processor(tmp_path: Path, processor):
    processor("AVX2")
    whole = train(network(), rounds=3).server.w
    done: list[int] = []
    out = tmp_path / "run"
    train(network(), rounds=3, out=out, on_round=lambda r: done.append(r.index), stop=lambda: len(done) == 1)
    processor("AVX512")
    with pytest.raises(ff.FedflatError, match="fast True, not False"):
        train(network(), rounds=3, out=out, resume=True, fast=False)
    assert train(network(), rounds=3, out=out, resume=True).server.w.equal(whole)
    assert recorded(out)["convolutions"]["column"] == "AVX2"


def test_a_run_from_before_there_was_a_choice_goes_on_as_it_began(tmp_path: Path, processor):
    processor("AVX2")
    whole = train(network(), rounds=3).server.w
    done: list[int] = []
    out = tmp_path / "run"
    train(network(), rounds=3, out=out, on_round=lambda r: done.append(r.index), stop=lambda: len(done) == 1)
    before = {key: value for key, value in recorded(out).items() if key not in ("fast", "convolutions")}
    (out / "run.json").write_text(json.dumps(before))
    processor("AVX512")
    assert train(network(), rounds=3, out=out, resume=True).server.w.equal(whole)


def test_the_command_line_without_speed(tmp_path: Path, processor, monkeypatch):
    processor("AVX2")
    out = tmp_path / "run"
    options = (
        "--method fedavg --model cnn --rounds 1 --clients 20 --participation 1 --no-fast --engine inprocess"
    )
    monkeypatch.setattr("sys.argv", ["fedflat", "run", *options.split(), "--out", str(out)])
    with contextlib.suppress(SystemExit):
        main()
    assert recorded(out)["fast"] is False
    assert recorded(out)["convolutions"]["column"] == "plain"
    assert "fast: false" in (out / "experiment.yaml").read_text()
    assert column_of(ff.load_run(out).model.module) == "plain"
