"""The hook `deliver`: one vector is tested, measured and saved, whatever the next round starts from."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import fedflat as ff
from fedflat.methods.mechanism import Mechanism


class Averaged(Mechanism):
    """Delivers the mean of the server's models."""

    def server_state(self, w):
        return {"sum": torch.zeros_like(w), "rounds": 0.0}

    def finish(self, server):
        server.vector("sum").add_(server.w)
        server["rounds"] = server.scalar("rounds") + 1

    def deliver(self, server):
        return server.vector("sum") / server.scalar("rounds")


class Half(Mechanism):
    """Delivers half of the server's model."""

    def deliver(self, server):
        return server.w / 2


def train(method, **more) -> tuple[ff.Run, list[torch.Tensor]]:
    torch.manual_seed(0)
    clients = [(torch.randn(12, 4), torch.randint(3, (12,))) for _ in range(3)]
    models: list[torch.Tensor] = []
    run = ff.train(
        ff.Federation(clients, test=(torch.randn(20, 4), torch.randint(3, (20,)))),
        torch.nn.Linear(4, 3),
        method,
        ff.LocalSGD(lr=0.5, steps=3, batch_size=4),
        rounds=4,
        on_round=lambda record: models.append(record.server.w.clone()),
        **more,
    )
    return run, models


@pytest.mark.parametrize("engine", ["inprocess", "workers:2"])
def test_what_is_delivered_is_tested_and_saved(tmp_path: Path, engine):
    run, models = train([Averaged()], out=tmp_path, engine=engine)
    plain, same = train("fedavg")
    assert all(torch.equal(one, other) for one, other in zip(models, same, strict=True))
    mean = torch.stack(models).mean(0)
    saved = load_file(tmp_path / "model.safetensors")
    found = torch.cat([run.model.weight.flatten(), run.model.bias]).detach()
    torch.testing.assert_close(found, mean)
    torch.testing.assert_close(torch.cat([saved["weight"].flatten(), saved["bias"]]), mean)
    torch.manual_seed(0)
    for _ in range(3):
        torch.randn(12, 4), torch.randint(3, (12,))
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    loss = F.cross_entropy(x @ mean[:12].view(3, 4).T + mean[12:], y).item()
    assert run.history[-1]["loss"] == pytest.approx(loss, rel=1e-5)
    assert run.history[-1]["loss"] != pytest.approx(plain.history[-1]["loss"], rel=1e-3)


def test_flatness_is_that_of_what_is_delivered():
    run, _ = train([Half()], measure=[{"sharpness": {"every": 1}}])
    plain, _ = train("fedavg", measure=[{"sharpness": {"every": 1}}])
    torch.testing.assert_close(run.server.w, plain.server.w)
    assert run.history[-1]["measures"]["sharpness"] != plain.history[-1]["measures"]["sharpness"]


def test_two_cannot_deliver():
    with pytest.raises(ff.FedflatError, match=r"averaged and half both name the vector to deliver"):
        ff.Method("both", [Averaged(), Half()])


class Short(Mechanism):
    """Delivers something else."""

    def deliver(self, server):
        return server.w[:2]


def test_what_is_delivered_is_a_model():
    with pytest.raises(ff.FedflatError, match=r"short: deliver returns a tensor of shape \(2,\)"):
        train([Short()])
