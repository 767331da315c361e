"""Learning rates over rounds and over steps, against closed forms."""

import math

import pytest
import torch
from torch import nn

import fedflat as ff
from fedflat.client.schedules import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    Stepwise,
    WarmUp,
    parse_schedule,
    parse_within,
)

FORMS = {
    "constant": lambda t: 1.0,
    "exponential:0.9": lambda t: 0.9**t,
    "step:4:0.5": lambda t: 0.5 ** (t // 4),
    "step:4": lambda t: 0.1 ** (t // 4),
    "cosine:10": lambda t: (1 + math.cos(math.pi * min(t, 10) / 10)) / 2,
    "cosine:10:0.2": lambda t: 0.2 + 0.8 * (1 + math.cos(math.pi * min(t, 10) / 10)) / 2,
    "warmup:5": lambda t: min((t + 1) / 5, 1.0),
    "warmup:5/cosine:10": lambda t: (
        (t + 1) / 5 if t < 5 else (1 + math.cos(math.pi * min(t - 5, 10) / 10)) / 2
    ),
    "warmup:2/step:3:0.5": lambda t: (t + 1) / 2 if t < 2 else 0.5 ** ((t - 2) // 3),
}


@pytest.mark.parametrize("text", FORMS)
def test_rates_over_rounds(text):
    schedule, local = parse_schedule(text), ff.LocalSGD(lr=0.4, lr_decay=0.99, schedule=text)
    for round in range(30):
        expected = FORMS[text](round)
        assert schedule.factor(round) == pytest.approx(expected, rel=1e-12, abs=1e-15)
        assert local.lr_in(round) == pytest.approx(0.4 * 0.99**round * expected, rel=1e-12, abs=1e-15)


def test_what_texts_mean():
    assert parse_schedule("constant") == Constant()
    assert parse_schedule("exponential:0.5") == Exponential(0.5)
    assert parse_schedule("step:10") == Stepwise(10, 0.1)
    assert parse_schedule(" cosine:500:0.01 ") == Cosine(500, 0.01)
    assert parse_schedule("warmup:3/cosine:9") == WarmUp(3, then=Cosine(9))
    assert parse_within("constant") is None
    assert parse_within("linear:0.25") == Linear(0.25)
    assert parse_within("linear") == Linear(0.1)


def test_a_schedule_is_lr_decay_in_other_words():
    rates = [ff.LocalSGD(lr=0.3, lr_decay=0.998).lr_in(t) for t in range(50)]
    assert [ff.LocalSGD(lr=0.3, schedule="exponential:0.998").lr_in(t) for t in range(50)] == rates


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("to", [0.1, 1.0])
def test_rates_within_a_round(steps, to):
    local = ff.LocalAdam(lr=0.2, within=f"linear:{to}")
    rates = local.rates(0.2, steps)
    assert rates == pytest.approx([0.2 - 0.2 * (1 - to) * k / steps for k in range(steps)])
    # an arithmetic series: the first and the last rate's mean, times their number
    assert local.rate_sum(0.2, steps) == pytest.approx(steps * (rates[0] + rates[-1]) / 2)


@pytest.mark.parametrize("schedule", ["cosine:6:0.1", "warmup:2/exponential:0.5"])
def test_a_run_trains_at_these_rates(schedule):
    """With a loss whose gradient is 1 everywhere, an update is minus the sum of the rates."""
    model = nn.Linear(2, 1, bias=False)
    rates: list[float] = []
    moves: list[float] = []

    def note(record) -> None:
        rates.append(record.lr)
        moves.append(record.server.step.mean().item())

    ff.train(
        ff.Federation([(torch.ones(4, 2), torch.zeros(4, dtype=torch.long))]),
        model,
        "fedavg",
        ff.LocalSGD(lr=0.5, steps=3, batch_size=None, schedule=schedule, within="linear:0.4"),
        rounds=5,
        loss=lambda outputs, targets: outputs.mean(),
        dtype=torch.float64,
        on_round=note,
    )
    assert rates == pytest.approx([0.5 * parse_schedule(schedule).factor(t) for t in range(5)])
    assert moves == pytest.approx([-rate * (1 + 0.8 + 0.6) for rate in rates])


REFUSED = {
    "cosin:5": "There is no schedule 'cosin'. Did you mean 'cosine'",
    "": "There is no schedule ''",
    "exponential": "schedule 'exponential' cannot be read: write exponential:DECAY",
    "exponential:0.9:2": "cannot be read: write exponential:DECAY",
    "exponential:fast": "cannot be read: write exponential:DECAY",
    "exponential:0": "schedule 'exponential:0': decay must be above 0 and at most 1, not 0",
    "exponential:1.5": "decay must be above 0 and at most 1, not 1.5",
    "step:2.5": "every must be a whole number, not 2.5",
    "step:0": "every must be at least 1, not 0",
    "step": "cannot be read: write step:EVERY:DECAY",
    "cosine:nan": "rounds must be at least 1, not nan",
    "cosine:inf": "rounds must be a whole number, not inf",
    "cosine:10:2": "floor must be at least 0 and at most 1, not 2",
    "constant:1": "schedule 'constant:1' cannot be read: write constant",
    "warmup": r"cannot be read: write warmup:ROUNDS\.",
    "warmup:10:3": r"cannot be read: write warmup:ROUNDS\.",
    "warmup:0": "rounds must be at least 1, not 0",
    "cosine:5/warmup:3": "only warmup is followed by another, as in warmup:10/cosine:500",
    "warmup:3/": "There is no schedule ''",
    "linear:0.1": "There is no schedule 'linear'",
}


@pytest.mark.parametrize("text", REFUSED)
def test_schedules_that_cannot_be(text: str):
    with pytest.raises(ff.FedflatError, match=REFUSED[text]) as refusal:
        ff.LocalSGD(schedule=text)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("linear:0", "schedule 'linear:0': to must be above 0 and at most 1, not 0"),
        ("linear:a", "cannot be read: write linear:TO"),
        ("linar", "There is no schedule 'linar'. Did you mean 'linear'"),
        ("warmup:3", "There is no schedule 'warmup'"),
    ],
)
def test_schedules_within_a_round_that_cannot_be(text, says):
    with pytest.raises(ff.FedflatError, match=says):
        ff.LocalAdamW(within=text)


def test_a_number_is_no_schedule():
    with pytest.raises(ff.FedflatError, match=r"There is no schedule '0\.5'"):
        ff.LocalSGD(schedule=0.5)
    with pytest.raises(ff.FedflatError, match=r"There is no schedule '0\.5'"):
        ff.LocalSGD(within=0.5)
