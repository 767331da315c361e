"""What a run is said to cost: held against a model that counts the samples which pass through it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedflat as ff
from fedflat.experiments.build import make_local
from fedflat.experiments.cost import PASSES, STEP_SECONDS, Passes, core_seconds, run_cost
from fedflat.experiments.presets import choose, find_preset
from fedflat.experiments.schema import Experiment
from fedflat.flatness import MEASURES

CLIENTS = 11  # 1,397 = 11 · 127: all clients have as many samples


class Counting(nn.Module):
    """A linear layer that counts its samples, forward and backward."""

    forwards, backwards = 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        nn.init.zeros_(self.layer.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        Counting.forwards += len(inputs)
        outputs: Tensor = torch.tanh(self.layer(inputs.flatten(1)))
        if outputs.requires_grad:
            outputs.register_hook(self._back)
        return outputs

    @staticmethod
    def _back(gradient: Tensor) -> None:
        Counting.backwards += len(gradient)


def counted(experiment: Experiment) -> Passes:
    """What really passes in a run of it."""
    Counting.forwards = Counting.backwards = 0
    torch.manual_seed(0)
    ff.train(
        ff.federate("digits", "iid", CLIENTS),
        Counting(),
        experiment.method,
        local=make_local(experiment.local),
        rounds=experiment.rounds or 1,
        eval_every=experiment.eval_every,
        measure=experiment.measure,
    )
    return Passes(Counting.forwards, Counting.backwards)


def experiment(**settings: Any) -> Experiment:
    usual = {"clients": CLIENTS, "participation": "everyone", "rounds": 3, "partition": "iid"}
    usual |= {"method": "fedavg", "local": {"epochs": 2, "batch_size": 40, "lr": 0.05}}
    return Experiment.model_validate(usual | settings).with_defaults()


@pytest.mark.parametrize("method", ["fedavg", "fedsam", "scaffold", "fedwmsam"])
@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 3}])
def test_training_and_testing_take_what_is_estimated(method: str, length: dict[str, int]):
    one = experiment(method=method, local={"batch_size": 40, "lr": 0.05, **length}, eval_every=2)
    assert run_cost(one).total == counted(one)
    assert run_cost(one).testing == Passes(forward=2 * 400)


@pytest.mark.parametrize("method", ["fedgmt", "fedgf"])
def test_what_a_method_spares_is_not_foreseen(method: str):
    """FedGMT's teacher answers once a round, FedGF's clients climb where c says so."""
    one = experiment(method=method)
    estimate, real = run_cost(one).total, counted(one)
    assert estimate.forward / 2 < real.forward < estimate.forward
    assert estimate.backward / 2 < real.backward <= estimate.backward


MEASURED = [
    *({name: {"every": 2}} for name in MEASURES if name != "eigenvalues"),
    {"sharpness": {"every": 3, "samples": 100}},
    {"sharpness": {"part": "test"}},
    {"discrepancy": {"every": 2, "clients": "all"}},
    {"low-pass": {"draws": 5}},
    {"trace": {"method": "hutchinson", "products": 12}},
    {"worst-case": {"steps": 2, "restarts": 1}},
]


@pytest.mark.parametrize("measure", MEASURED, ids=str)
def test_measuring_takes_what_is_estimated(measure: dict[str, Any]):
    one = experiment(measure=[measure], local={"steps": 1, "batch_size": 10, "lr": 0.05})
    assert run_cost(one).total == counted(one)


def test_eigenvalues_take_about_what_is_estimated():
    """How many products the iterations need depends on the model."""
    pytest.importorskip("scipy")
    one = experiment(
        measure=[{"eigenvalues": {"samples": 200}}], local={"steps": 1, "batch_size": 10, "lr": 0.05}
    )
    assert 0.5 < counted(one).forward / run_cost(one).total.forward < 2


def test_every_measure_has_an_estimate():
    assert set(PASSES) == set(MEASURES)


def test_core_hours_of_a_paper_count_its_tests():
    """FedGF tests 10,000 images after each of 10,000 rounds, in which 5 clients pass 500 images each: by hand."""
    cells = choose(find_preset("fedgf/table1").cells(), [], ["FedAvg"])
    first = next(cell for cell in cells if cell.content["participation"] == 5)
    assert (first.content["model"], first.content["rounds"]) == ("lenet", 10_000)
    per_pass = STEP_SECONDS["lenet"] / 50 / 3
    training, testing = 10_000 * 5 * 500 * 3 * per_pass, 10_000 * 10_000 * per_pass
    assert core_seconds(first.content) == pytest.approx(training + testing)
    assert testing > training


def test_core_hours_of_a_paper_count_its_measures():
    """FedGMT measures the sharpness on all training images in every tenth round."""
    content = next(iter(find_preset("fedgmt/figure2").cells())).content
    without = {key: value for key, value in content.items() if key != "measure"}
    often, passes = content["rounds"] / 10, 50_000 * (2 + 2 * 1)
    extra = often * passes * STEP_SECONDS[content["model"]] / 50 / 3
    assert core_seconds(content) - core_seconds(without) == pytest.approx(extra)
