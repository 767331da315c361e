"""Baselines against loops of their own: every client alone, and all data in one place."""

import json

import pytest
import torch
import torch.nn.functional as F

import fedflat as ff
from fedflat.client.batches import batches
from fedflat.core.evaluation import evaluate
from fedflat.errors import FedflatError
from fedflat.experiments.baselines import Alone, NoTraffic, Parts, pooled_steps
from fedflat.methods.method import Method
from fedflat.server.participation import Schedule, Uniform
from fedflat.storage.metrics_file import read_metrics

SIZES = [5, 40, 12, 30]
ROUNDS, SEED, LR = 3, 4, 0.1


def federation(owned: bool = False) -> ff.Federation:
    rng = torch.Generator().manual_seed(0)
    clients = [(torch.randn(n, 6, generator=rng), torch.randint(3, (n,), generator=rng)) for n in SIZES]
    result = ff.Federation(
        clients, (torch.randn(60, 6, generator=rng), torch.randint(3, (60,), generator=rng))
    )
    if owned:
        result.test_owners = torch.arange(60) % 7 % 4
    return result


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def descend(model: torch.nn.Module, shard, steps: int, round: int, client: int) -> None:
    """Plain SGD in PyTorch, on the batches of a client's round."""
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)
    for batch in batches(shard, 8, steps, SEED, round, client):
        optimiser.zero_grad()
        F.cross_entropy(model(batch.inputs), batch.targets).backward()
        optimiser.step()


def run_baseline(kind: str, data: ff.Federation, participation, out=None, **more) -> ff.Run:
    local = ff.LocalSGD(lr=LR, epochs=2, batch_size=8)
    settings = {"rounds": ROUNDS, "seed": SEED, "dtype": "float64"}
    parts = Parts(data, "fedavg", local, participation, "inprocess", settings).as_baseline(kind)
    return ff.train(
        parts.federation,
        network(),
        parts.method,
        parts.local,
        parts.participation,
        engine=parts.engine,
        out=out,
        callbacks=[NoTraffic()],
        **parts.settings,
        **more,
    )


def test_pooled_is_sgd_on_all_data_with_as_many_steps():
    data = federation()
    run = run_baseline("pooled", data, Uniform(2))
    active = [Uniform(2).choose(round, 4, SEED) for round in range(ROUNDS)]
    taken = sum(2 * -(-SIZES[client] // 8) for clients in active for client in clients)
    steps = round(taken / ROUNDS)
    assert [row["steps"] for row in run.history] == [steps] * ROUNDS
    model = network().double()
    everything = data.to(torch.float64).union()
    for index in range(ROUNDS):
        descend(model, everything, steps, index, client=0)
    assert torch.allclose(torch.nn.utils.parameters_to_vector(model.parameters()), run.server.w, atol=1e-12)
    inputs, targets = data.to(torch.float64).test.stored()
    assert run.accuracy == pytest.approx(float((model(inputs).argmax(1) == targets).double().mean()))
    assert run.total("bytes_up") == run.total("bytes_down") == 0
    # clients are judged in the mix of classes that each of them has, not in that of all together
    assert run.history[-1]["client_accuracy"]["std"] > 0


def train_alone(schedule: list[list[int]]) -> list[torch.nn.Module]:
    data = federation().to(torch.float64)
    models = [network().double() for _ in SIZES]
    for index, clients in enumerate(schedule):
        for client in clients:
            steps = 2 * -(-SIZES[client] // 8)
            descend(models[client], data.client(client), steps, index, client)
    return models


SCHEDULE = [[0, 1], [1, 2], [0, 2]]  # client 3 never takes part


def test_local_is_every_client_alone():
    run = run_baseline("local", federation(), Schedule(SCHEDULE))
    models = train_alone(SCHEDULE)
    for client in range(3):
        own = torch.nn.utils.parameters_to_vector(models[client].parameters())
        assert torch.allclose(run.clients.get(client)["model"], own, atol=1e-12)
    inputs, targets = federation().to(torch.float64).test.stored()
    right = [(model(inputs).argmax(1) == targets).double() for model in models]
    assert [row["accuracy"] is None for row in run.history] == [True, True, False]
    weighed = sum(float(hits.mean()) * size for hits, size in zip(right, SIZES, strict=True)) / sum(SIZES)
    assert run.accuracy == pytest.approx(weighed)
    each = []
    for client, hits in enumerate(right):
        labels = federation().client(client).targets
        each.append(sum(float((labels == c).double().mean() * hits[targets == c].mean()) for c in range(3)))
    spread = run.history[-1]["client_accuracy"]
    assert spread["mean"] == pytest.approx(sum(each) / 4, abs=1e-6)
    assert spread["worst_decile"] == pytest.approx(min(each), abs=1e-6)
    assert run.total("bytes_up") == 0


def test_test_samples_are_tested_by_the_model_of_their_owner():
    run = run_baseline("local", federation(owned=True), Schedule(SCHEDULE))
    models, data = train_alone(SCHEDULE), federation(owned=True).to(torch.float64)
    inputs, targets = data.test.stored()
    outputs = torch.stack(
        [models[owner](x) for x, owner in zip(inputs, data.test_owners.tolist(), strict=True)]
    )
    assert run.accuracy == pytest.approx(float((outputs.argmax(1) == targets).double().mean()))
    assert run.history[-1]["loss"] == pytest.approx(float(F.cross_entropy(outputs, targets)))
    assert all(row["accuracy"] is not None for row in run.history)


def test_local_is_resumed(tmp_path):
    whole = run_baseline("local", federation(owned=True), Schedule(SCHEDULE))
    stopped = run_baseline(
        "local", federation(owned=True), Schedule(SCHEDULE), tmp_path / "run", stop=lambda: True
    )
    assert len(stopped.history) == 1
    run = run_baseline("local", federation(owned=True), Schedule(SCHEDULE), tmp_path / "run", resume=True)
    assert [row["accuracy"] for row in run.history] == [row["accuracy"] for row in whole.history]
    assert run.clients.get(1)["model"].equal(whole.clients.get(1)["model"])


def test_statistics_of_batches_stay_with_a_client():
    def network() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))

    alone = Alone()
    data = federation()
    run = ff.train(
        data,
        network(),
        Method("local"),
        ff.LocalSGD(lr=LR, steps=3, batch_size=8),
        rounds=2,
        engine=alone,
        buffers="local",
    )
    model = ff.FlatModel(network()) if hasattr(ff, "FlatModel") else None
    kept = [run.clients.get(client)["buffers"] for client in range(4)]
    assert not kept[0].equal(kept[1])
    if model is not None:
        each = []
        for client in range(4):
            model.write_buffers(kept[client])
            each.append(
                evaluate(model, run.clients.get(client)["model"], data.test, F.cross_entropy)["accuracy"]
            )
        expected = sum(a * n for a, n in zip(each, SIZES, strict=True)) / sum(SIZES)
        assert run.accuracy == pytest.approx(expected)


def test_validation_samples_are_no_part_of_the_pool():
    data = federation()
    held = data.with_validation(0.2, 7)
    pooled = data.pooled().with_validation(0.2, 7)
    assert pooled.test.stored()[0].equal(held.test.stored()[0])
    assert pooled.union().stored()[0].equal(held.union().stored()[0])
    assert len(pooled) == 1 and pooled.test_owners.equal(held.test_owners)
    steps = pooled_steps(
        data, ff.LocalSGD(epochs=1, batch_size=1), Uniform(4), {"seed": 7, "rounds": 1, "validation": 0.2}
    )
    assert steps == held.samples
    with pytest.raises(FedflatError, match="baseline: local and validation"):
        Parts(data, "fedavg", ff.LocalSGD(), Uniform(4), "inprocess", {"validation": 0.1}).as_baseline(
            "local"
        )


def test_baselines_stand_beside_methods(tmp_path, fedflat):
    command = ("run", "--method", "fedavg", "--baseline", "local", "--baseline", "pooled", "--clients", 4)
    code, said, errors = fedflat(*command, "--participation", 2, "--rounds", 2, "--out", tmp_path / "runs")
    assert code == 0, errors
    names = [
        line.split()[0]
        for line in said.splitlines()
        if line.startswith((" FedAvg", "  FedAvg", " local", "  local", " pooled", "  pooled"))
    ]
    assert names == ["FedAvg", "local", "pooled"]
    runs = {name: read_metrics(tmp_path / "runs" / name) for name in ("fedavg", "local", "pooled")}
    assert sum(row["steps"] for row in runs["local"]) == sum(row["steps"] for row in runs["fedavg"])
    assert abs(sum(row["steps"] for row in runs["pooled"]) - sum(row["steps"] for row in runs["fedavg"])) <= 1
    code, said, errors = fedflat("compare", tmp_path / "runs", "--out", tmp_path / "table.csv")
    assert code == 0, errors
    rows = (tmp_path / "table.csv").read_text().splitlines()[1:]
    assert sorted(row.split(",")[0] for row in rows) == ["fedavg", "local", "pooled"]
    code, said, errors = fedflat("resume", tmp_path / "runs" / "local", "--rounds", 3)
    assert code == 0, errors
    assert len(read_metrics(tmp_path / "runs" / "local")) == 3
    assert json.loads((tmp_path / "runs" / "pooled" / "run.json").read_text())["method"] == "pooled"
    code, said, errors = fedflat("run", "--baseline", "nobody", "--rounds", 1)
    assert code != 0 and "baseline" in said + errors
