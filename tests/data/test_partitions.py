"""Partitions keep their promises for any labels, follow the stated distributions, and say what is wrong."""

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from rich.console import Console

from fedflat.core.randomness import generator
from fedflat.data.federate import federate
from fedflat.data.partitions import (
    IID,
    ByDomain,
    ByUser,
    Dirichlet,
    LongTail,
    Partition,
    Pathological,
    Quantity,
    dirichlet as dirichlet_module,
    parse_partition,
)
from fedflat.data.partitions.dealing import deal, proportions, random_turns
from fedflat.data.split_picture import draw
from fedflat.data.split_report import describe
from fedflat.errors import FedflatError, MissingExtra

quick = settings(deadline=None, max_examples=40, database=None)
seeds = st.integers(0, 2**63)
alphas = st.sampled_from([5e-324, 0.001, 0.01, 0.1, 0.5, 1.0, 10.0, 1e300])


@st.composite
def problems(draw, least: int = 1) -> tuple[np.ndarray, int]:
    """Labels with gaps between the classes and any imbalance, and a number of clients that has enough."""
    counts = draw(st.lists(st.integers(least, 60), min_size=1, max_size=7))
    names = draw(st.lists(st.integers(0, 20), min_size=len(counts), max_size=len(counts), unique=True))
    labels = np.random.default_rng(draw(seeds)).permutation(np.repeat(names, counts))
    return labels, draw(st.integers(1, min(len(labels), 23)))


def balanced(samples: int, classes: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.arange(samples) % classes)


def sizes(parts: list[np.ndarray]) -> list[int]:
    return [len(part) for part in parts]


def kinds(labels: np.ndarray, parts: list[np.ndarray]) -> list[int]:
    return [len(np.unique(labels[part])) for part in parts]


def check(
    parts: list[np.ndarray], samples: int, clients: int, disjoint: bool = True, used: int | None = None
):
    """What every split promises; `used` is the number of samples dealt."""
    assert len(parts) == clients
    for part in parts:
        assert part.dtype == np.int64 and part.ndim == 1 and len(part) > 0
        assert part[0] >= 0 and part[-1] < samples
        assert (np.diff(part) > 0).all() if disjoint else (np.diff(part) >= 0).all()
    if disjoint:
        dealt = np.concatenate(parts)
        assert len(np.unique(dealt)) == len(dealt)
    if used is not None:
        assert sum(sizes(parts)) == used


def attempt(
    partition: Partition, labels: np.ndarray, clients: int, seed: int
) -> tuple[list[np.ndarray], str]:
    """The split, or what it says instead."""
    try:
        return partition.split(labels, clients, seed), ""
    except FedflatError as mistake:
        return [], str(mistake)


# ------------------------------------------------------------------------------------ promises, for any labels


@quick
@given(problems(), seeds)
def test_iid_uses_all_evenly(problem, seed):
    labels, clients = problem
    parts = IID().split(labels, clients, seed)
    check(parts, len(labels), clients, used=len(labels))
    assert np.ptp(sizes(parts)) <= 1


@quick
@given(problems(), alphas, seeds)
def test_quantity_uses_all_and_leaves_nobody_empty(problem, alpha, seed):
    labels, clients = problem
    check(Quantity(alpha).split(labels, clients, seed), len(labels), clients, used=len(labels))


@quick
@given(problems(), alphas, seeds, st.sampled_from(["equal", "hsu", "refill"]))
def test_dirichlet_gives_equal_sizes(problem, alpha, seed, form):
    labels, clients = problem
    size = len(labels) // clients
    parts = Dirichlet(alpha, form).split(labels, clients, seed)
    check(parts, len(labels), clients, disjoint=form != "refill", used=size * clients)
    assert set(sizes(parts)) == {size}


@quick
@given(problems(least=10), st.sampled_from([0.5, 1.0, 10.0]), seeds)
def test_chunked_uses_all_evenly_or_says_why_not(problem, alpha, seed):
    labels, clients = problem
    with mock.patch.object(dirichlet_module, "DRAWS", 640):
        parts, mistake = attempt(Dirichlet(alpha, "chunked"), labels, clients, seed)
    if mistake:
        assert "draws did not fill client" in mistake and "larger alpha" in mistake
    else:
        check(parts, len(labels), clients, used=len(labels))
        assert np.ptp(sizes(parts)) <= 1


@quick
@given(problems(), st.integers(1, 7), seeds)
def test_shards_keep_to_the_classes_and_use_all_dealt(problem, r, seed):
    labels, clients = problem
    classes = len(np.unique(labels))
    assume(r <= classes)
    parts, mistake = attempt(Pathological(r), labels, clients, seed)
    if mistake:
        assert "gets no sample" in mistake and "fewer clients" in mistake
        assert np.bincount(labels)[np.unique(labels)].min() < -(-r * clients // classes)
    else:
        check(parts, len(labels), clients)
        assert max(kinds(labels, parts)) <= r
        dealt = np.isin(
            labels, labels[np.concatenate(parts)]
        )  # every class that was dealt, was dealt entirely
        assert sum(sizes(parts)) == dealt.sum()
        assert classes <= r * clients or len(np.unique(labels[dealt])) == r * clients
        assert classes > r * clients or dealt.all()


@quick
@given(problems(), st.integers(1, 7), seeds)
def test_class_priors_give_equal_sizes(problem, r, seed):
    labels, clients = problem
    assume(r <= len(np.unique(labels)))
    size = len(labels) // clients
    parts = Pathological(r, "prior").split(labels, clients, seed)
    check(parts, len(labels), clients, used=size * clients)
    assert set(sizes(parts)) == {size}
    parts = Pathological(r, "refill").split(labels, clients, seed)
    check(parts, len(labels), clients, disjoint=False, used=size * clients)
    assert max(kinds(labels, parts)) <= r and set(sizes(parts)) == {size}


@quick
@given(problems(), seeds, st.sampled_from(["equal", "hsu", "refill", "chunked"]))
def test_dirichlet_zero_is_one_class_each(problem, seed, form):
    labels, clients = problem
    names = np.unique(labels)
    parts, mistake = attempt(Dirichlet(0, form), labels, clients, seed)
    if mistake:
        assert "gets no sample" in mistake
        assert np.bincount(labels)[names].min() < -(-clients // len(names))
    else:
        check(parts, len(labels), clients, used=int(np.isin(labels, names[:clients]).sum()))
        for client, part in enumerate(parts):
            assert set(labels[part]) == {names[client % len(names)]}


@quick
@given(problems(), st.sampled_from([1, 1.5, 2, 10]), seeds)
def test_long_tail_keeps_what_it_says_and_deals_that(problem, imbalance, seed):
    labels, clients = problem
    names, counts = np.unique(labels, return_counts=True)
    tail = len(labels) / len(names) * (1 / imbalance) ** np.linspace(0, 1, len(names))
    expected = np.minimum(counts, np.floor(tail + 1e-6)).astype(int)
    assume(tail.min() >= 1 and expected.sum() >= clients)
    parts = LongTail(imbalance).split(labels, clients, seed)
    check(parts, len(labels), clients, used=expected.sum())
    kept = labels[np.concatenate(parts)]
    assert [np.count_nonzero(kept == name) for name in names] == expected.tolist()


@quick
@given(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=80), seeds, st.data())
def test_users_are_clients(users, seed, data):
    groups, labels = np.array(users), np.zeros(len(users), int)
    names = sorted(set(users))
    for parts in (ByUser().split(labels, None, seed, groups), ByDomain().split(labels, None, seed, groups)):
        check(parts, len(users), len(names), used=len(users))
        assert [set(groups[part]) for part in parts] == [{name} for name in names]
    some = data.draw(st.integers(1, len(names)))
    parts = ByUser().split(labels, some, seed, groups)
    check(parts, len(users), some, used=int(np.isin(groups, [groups[part[0]] for part in parts]).sum()))


# -------------------------------------------------------------------------------------------------- randomness

BLIND = ["iid", "quantity:0.5"]
SKEWED = [
    "dirichlet:0",
    "dirichlet:0.3",
    "dirichlet:0.3:refill",
    "dirichlet:0.3:chunked",
    "hsu:3",
    "pathological:2",
    "pathological:2:prior",
    "pathological:2:refill",
    "longtail:3/iid",
    "longtail:3/dirichlet:0.3:chunked",
]
USERS = np.random.default_rng(5).integers(0, 50, 600)


@pytest.mark.parametrize("text", [*BLIND, *SKEWED, "by-user"])
def test_a_split_depends_on_its_seed_alone(text):
    labels, partition = balanced(600, 10), parse_partition(text)
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    first = partition.split(labels, 20, 7, USERS)
    assert (np.random.get_state()[1] == before).all()
    np.random.seed(2)
    again = parse_partition(text).split(labels.copy(), 20, 7, USERS)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    other = partition.split(labels, 20, 8, USERS)
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("text", [*BLIND, *SKEWED])
def test_labels_of_any_integer_type(text):
    labels, partition = balanced(600, 10), parse_partition(text)
    first = partition.split(labels, 20, 7)
    for other in (labels.astype(np.uint8), labels.astype(np.int32), labels.tolist()):
        assert all(np.array_equal(a, b) for a, b in zip(first, partition.split(other, 20, 7), strict=True))


@pytest.mark.parametrize("text", BLIND)
def test_label_blind_partitions_take_any_targets(text):
    check(parse_partition(text).split(np.linspace(0, 1, 50), 5, 0), 50, 5, used=50)


@pytest.mark.parametrize(("alpha", "form"), [(0.05, "equal"), (1.0, "equal"), (0.5, "hsu")])
def test_the_dealing_rule_word_for_word(alpha, form):
    """The definition, one sample at a time."""
    labels, clients, classes, seed = balanced(1003, 10), 12, 10, 4
    rng = generator(seed, "partition dirichlet")
    priors = rng.dirichlet(np.full(classes, alpha / classes if form == "hsu" else alpha), size=clients)
    pools = [list(rng.permutation(np.flatnonzero(labels == c))) for c in range(classes)]
    turns = np.repeat(np.arange(clients), len(labels) // clients)
    turns = turns if form == "hsu" else rng.permutation(turns)
    owned: list[list[int]] = [[] for _ in range(clients)]
    for client, chance in zip(turns, rng.random(len(turns)), strict=True):
        weights = np.array([q if pool else 0.0 for q, pool in zip(priors[client], pools, strict=True)])
        if weights.sum() < 1e-300:
            weights = np.array([float(len(pool)) for pool in pools])
        chosen = int(np.flatnonzero(np.cumsum(weights) > chance * np.cumsum(weights)[-1])[0])
        owned[client].append(pools[chosen].pop())
    parts = Dirichlet(alpha, form).split(labels, clients, seed)
    assert [part.tolist() for part in parts] == [sorted(rows) for rows in owned]


# ------------------------------------------------------------------------------------------------ distributions


def concentration(labels: np.ndarray, parts: list[np.ndarray]) -> tuple[float, float]:
    """An unbiased estimate of E[sum of squared proportions] over the clients, and its standard error."""
    counts = np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])
    size = counts.sum(axis=1)
    squares = (counts * (counts - 1)).sum(axis=1) / (size * (size - 1))
    return squares.mean(), squares.std() / np.sqrt(len(parts))


@pytest.mark.parametrize("alpha", [0.1, 0.6, 5.0])
def test_refill_has_exactly_the_stated_concentration(alpha):
    labels = balanced(60_000, 10)
    mean, error = concentration(labels, Dirichlet(alpha, "refill").split(labels, 1500, 1))
    assert abs(mean - (alpha + 1) / (10 * alpha + 1)) < 4 * error


@pytest.mark.parametrize("alpha", [0.1, 0.6, 5.0])
def test_equal_has_nearly_the_stated_concentration(alpha):
    """Exactly as long as no class is used up; towards the end they are, which mixes a little."""
    labels, expected = balanced(60_000, 10), (alpha + 1) / (10 * alpha + 1)
    mean, _ = concentration(labels, Dirichlet(alpha).split(labels, 1500, 1))
    assert 0.92 * expected < mean < 1.02 * expected
    rng, pools = generator(0, "test"), [np.flatnonzero(labels == c) for c in range(10)]
    half = deal(proportions(alpha, 10, 1500, rng), pools, random_turns(1500, 20, rng), rng)
    mean, error = concentration(labels, half)
    assert abs(mean - expected) < 4 * error


@pytest.mark.parametrize("total", [0.5, 5.0])
def test_hsu_has_the_stated_total_concentration(total):
    labels = balanced(60_000, 10)
    early = Dirichlet(total, "hsu").split(labels, 1500, 1)[:1000]  # no class is used up yet
    mean, error = concentration(labels, early)
    assert abs(mean - (total / 10 + 1) / (total + 1)) < 4 * error


def test_every_class_has_the_same_chance():
    """Chi-square over the classes of one sample per client: 9 degrees of freedom, 99.9 % quantile 27.9."""
    labels = balanced(60_000, 10)
    parts = Dirichlet(0.3, "refill").split(labels, 3000, 2)
    seen = np.bincount([labels[np.random.default_rng(k).choice(part)] for k, part in enumerate(parts)])
    assert ((seen - 300) ** 2 / 300).sum() < 27.9


def test_quantity_shares_are_dirichlet():
    alpha, clients = 0.5, 10
    parts = [Quantity(alpha).split(np.zeros(20_000), clients, seed) for seed in range(400)]
    squares = ((np.array([sizes(p) for p in parts]) / 20_000) ** 2).sum(axis=1)
    expected = (alpha + 1) / (clients * alpha + 1)
    assert abs(squares.mean() - expected) < 4 * squares.std() / 20 + 1e-3


def test_quantity_does_not_skew_labels():
    labels = balanced(50_000, 10)
    large = max(Quantity(0.5).split(labels, 10, 0), key=len)
    shares = np.bincount(labels[large]) / len(large)
    assert abs(shares - 0.1).max() < 5 * np.sqrt(0.09 / len(large))


def test_iid_mixes_labels():
    labels = balanced(50_000, 10)
    assert describe(labels, IID().split(labels, 10, 0), 10).distance.max() < 0.03


# ---------------------------------------------------------------------------------------- forms, as papers use


@pytest.mark.parametrize("r", [1, 2, 4, 10])
def test_shards_on_balanced_classes(r):
    labels = balanced(50_000, 10)
    parts = Pathological(r).split(labels, 100, 3)
    check(parts, 50_000, 100, used=50_000)
    assert set(sizes(parts)) == {500}
    counts = describe(labels, parts, 10).counts
    assert set(np.unique(counts % (500 // r))) == {0}  # whole shards
    assert (counts > 0).sum(axis=1).max() <= r
    if r == 2:  # repeats are possible: two equal labels with probability 19/199
        assert 1 <= ((counts > 0).sum(axis=1) == 1).sum() <= 25


def test_shards_where_the_classes_do_not_divide():
    labels = balanced(1400, 10)
    counts = describe(labels, Pathological(2).split(labels, 7, 0), 10).counts
    assert counts.sum() == 1400 and (counts > 0).sum(axis=1).max() <= 2
    assert sorted(set(counts[counts > 0])) in ([70, 140], [70])  # 14 shards: four classes are halved
    few = Pathological(2).split(labels, 3, 0)
    assert sum(sizes(few)) == 6 * 140  # six classes are dealt, four are not


def test_leftovers_go_to_single_shards():
    labels = np.repeat([0, 1], [23, 20])
    counts = describe(labels, Pathological(1).split(labels, 10, 0), 2).counts
    assert sorted(counts[counts > 0].tolist()) == [4] * 7 + [5] * 3


def test_class_priors_choose_different_classes_uniformly():
    labels = balanced(50_000, 10)
    counts = describe(labels, Pathological(3, "refill").split(labels, 100, 0), 10).counts
    assert set((counts > 0).sum(axis=1)) == {3}
    assert abs(counts[counts > 0] - 500 / 3).max() < 5 * np.sqrt(500 * 2 / 9)
    report = describe(labels, Pathological(3, "prior").split(labels, 100, 0), 10)
    assert report.repeated == 0 and np.median(report.effective) < 3.5


@pytest.mark.parametrize("partition", [Dirichlet(0.1, "refill"), Pathological(3, "refill")])
def test_refill_really_repeats_and_leaves_out(partition):
    labels = balanced(50_000, 10)
    report = describe(labels, partition.split(labels, 100, 0), 10)
    assert report.repeated == report.unused > 500
    # a class is used up before it starts again: no sample is more than one round ahead
    times = np.bincount(np.concatenate(partition.split(labels, 100, 0)), minlength=50_000)
    assert all(np.ptp(times[labels == c]) <= 1 for c in range(10))


@pytest.mark.parametrize("form", ["equal", "refill", "chunked", "hsu"])
def test_dirichlet_zero_on_cifar_sizes(form):
    labels = balanced(50_000, 100)
    parts = Dirichlet(0, form).split(labels, 100, 0)
    assert set(sizes(parts)) == {500} and [set(labels[p]) for p in parts] == [{c} for c in range(100)]


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0])
def test_chunks_of_ten_are_recut_into_equal_parts(alpha):
    labels = balanced(50_000, 10)
    parts = Dirichlet(alpha, "chunked").split(labels, 100, 0)
    check(parts, 50_000, 100, used=50_000)
    assert set(sizes(parts)) == {500}
    tens = [np.concatenate(parts[k : k + 10]) for k in range(0, 100, 10)]
    assert describe(labels, tens, 10).distance.max() < 0.04  # ten clients share a random chunk
    assert describe(labels, parts, 10).distance.mean() > {0.01: 0.75, 0.1: 0.55, 1.0: 0.25}[alpha]


@pytest.mark.parametrize("clients", [1, 3, 10, 25])
def test_chunked_for_any_number_of_clients(clients):
    labels = balanced(5003, 10)
    parts = Dirichlet(0.5, "chunked").split(labels, clients, 0)
    check(parts, 5003, clients, used=5003)
    assert np.ptp(sizes(parts)) <= 1


@pytest.mark.parametrize("alpha", [1e-8, 0.05, 1.0])
def test_a_chunk_is_drawn_by_its_rules(alpha):
    available = np.array([500, 430, 370, 310, 270, 230, 200, 190, 180, 170])
    counts = Dirichlet(alpha, "chunked")._draw_chunk(available, 0, 10, generator(0, "test"))
    share = available.sum() / 10
    assert (counts.sum(axis=1) == available).all() and (counts >= 0).all()
    assert counts.sum(axis=0).min() >= share / 2
    held = np.cumsum(counts, axis=0) - counts
    assert (counts[held >= share] == 0).all()  # who has an even share gets no more


def test_four_classes_for_ten_clients_as_on_ag_news():
    labels = balanced(12_000, 4)
    parts = LongTail(2, Dirichlet(0.1, "chunked")).split(labels, 10, 0)
    check(parts, 12_000, 10, used=8770)


@pytest.mark.parametrize(
    ("samples", "classes", "kept"),
    [(50_000, 10, 36_223), (50_000, 100, 36_029), (90_000, 10, 65_204), (120_000, 4, 87_709)],
)
def test_long_tail_counts_of_the_paper(samples, classes, kept):
    labels = balanced(samples, classes)
    rows = np.concatenate(LongTail(2).split(labels, 100, 0))
    counts = np.bincount(labels[rows])
    assert counts.sum() == kept
    assert counts[0] == samples // classes and counts[-1] == samples // classes // 2
    assert (np.diff(counts) < 0).all()


def test_long_tail_passes_users_on():
    labels, users = balanced(600, 10), USERS
    parts = LongTail(4, ByUser()).split(labels, None, 0, users)
    assert [set(users[part]) for part in parts] == [{user} for user in np.unique(users)]


def test_by_user_draws_users_at_random():
    drawn = [tuple(USERS[p[0]] for p in ByUser().split(USERS, 5, seed, USERS)) for seed in range(40)]
    assert len(set(drawn)) > 35 and len({user for users in drawn for user in users}) > 45
    assert all(list(users) == sorted(users) for users in drawn)


# ------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("text", [*BLIND, *SKEWED])
@pytest.mark.parametrize(
    ("clients", "says"),
    [
        (601, "fewer clients"),
        (0, "at least one client"),
        (-3, "at least one client"),
        (None, "how many clients"),
    ],
)
def test_numbers_of_clients_that_cannot_be(text, clients, says):
    with pytest.raises(FedflatError, match=says):
        parse_partition(text).split(balanced(600, 10), clients, 0)


@pytest.mark.parametrize("text", SKEWED)
@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (np.array([0.5, 1.0]), "must be whole numbers, not float64"),
        (np.array(["a", "b"]), "must be whole numbers"),
        (np.array([0, -1, 2]), "label -1"),
        (np.array([], int), "no samples"),
        (np.eye(3, dtype=int), "one number per sample"),
    ],
)
def test_labels_that_cannot_be(text, labels, says):
    with pytest.raises(FedflatError, match=says):
        parse_partition(text).split(labels, 2, 0)


@pytest.mark.parametrize("text", [*BLIND, "by-user", "by-domain"])
def test_nothing_to_deal(text):
    with pytest.raises(FedflatError, match="no samples"):
        parse_partition(text).split(np.array([]), 2, 0, np.array([]))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Dirichlet(-0.1), "alpha must be at least 0, not -0.1"),
        (lambda: Dirichlet(float("nan")), "alpha must be at least 0, not nan"),
        (lambda: Dirichlet(float("inf")), "alpha must be"),
        (lambda: Dirichlet("0.1"), "alpha must be"),
        (lambda: Dirichlet(1, "chunky"), "Did you mean 'chunked'"),
        (lambda: Quantity(0), "alpha must be above 0"),
        (lambda: Pathological(0), "whole number from 1, not 0"),
        (lambda: Pathological(1.5), "whole number from 1, not 1.5"),
        (lambda: Pathological(2, "priors"), "Did you mean 'prior'"),
        (lambda: LongTail(0.5), "imbalance must be at least 1"),
    ],
)
def test_parameters_that_cannot_be(make, says):
    with pytest.raises(FedflatError, match=says):
        make()


@pytest.mark.parametrize(
    ("partition", "clients", "groups", "says"),
    [
        (Pathological(11), 10, None, "only 10 classes"),
        (Pathological(11, "prior"), 10, None, "only 10 classes"),
        (LongTail(1000), 10, None, r"class \d of 10 would keep no sample; use a smaller imbalance"),
        (LongTail(20), 300, None, "fewer clients"),
        (ByUser(), None, None, "needs to know the user of every sample"),
        (ByDomain(), None, None, "needs to know the domain of every sample"),
        (LongTail(2, ByUser()), None, None, "needs to know the user"),
        (ByUser(), 51, USERS, "50 users, fewer than the 51 clients"),
        (ByUser(), 0, USERS, "at least one client"),
        (ByDomain(), 51, USERS, "50 domains, fewer than the 51 clients"),
        (ByDomain(), 3, USERS, "50 domains, more than the 3 clients asked for; ask for 50"),
        (ByUser(), 3, USERS[:-1], "each of 600 samples"),
        (LongTail(2, ByUser()), 3, USERS[:-1], "each of 600 samples"),
    ],
)
def test_what_does_not_fit_the_data(partition, clients, groups, says):
    with pytest.raises(FedflatError, match=says) as caught:
        partition.split(balanced(600, 10), clients, 0, groups)
    assert "\n" not in str(caught.value)


def test_a_client_that_cannot_be_filled_is_named():
    rare = np.repeat([0, 1], [98, 2])
    with pytest.raises(FedflatError, match=r"dirichlet:0: client 5 gets no sample.*use fewer clients"):
        Dirichlet(0).split(rare, 20, 0)
    with pytest.raises(FedflatError, match=r"pathological:1: client \d+ gets no sample.*use fewer clients"):
        Pathological(1).split(rare, 20, 0)
    with pytest.raises(FedflatError, match=r"chunked: 500,000 draws did not fill client \d.*larger alpha"):
        Dirichlet(0.01, "chunked").split(np.zeros(1000, int), 10, 0)


# --------------------------------------------------------------------------------------------------------- text

numbers = st.floats(0, 1e6, allow_nan=False) | st.integers(0, 100)
single: st.SearchStrategy[Partition] = st.one_of(
    st.sampled_from([IID(), ByUser(), ByDomain()]),
    st.builds(Quantity, st.floats(1e-6, 1e6)),
    st.builds(Dirichlet, numbers, st.sampled_from(["equal", "refill", "chunked", "hsu"])),
    st.builds(Pathological, st.integers(1, 1000), st.sampled_from(["shards", "prior", "refill"])),
)
partitions = single | st.builds(LongTail, st.floats(1, 1e6), single)


@settings(quick, max_examples=200)
@given(partitions)
def test_text_and_back(partition):
    assert parse_partition(str(partition)) == partition


@pytest.mark.parametrize(
    ("text", "partition", "written"),
    [
        ("iid", IID(), "iid"),
        ("dirichlet:0.1", Dirichlet(0.1), "dirichlet:0.1"),
        ("dirichlet:1:equal", Dirichlet(1), "dirichlet:1"),
        ("dirichlet:0.1:chunked", Dirichlet(0.1, "chunked"), "dirichlet:0.1:chunked"),
        ("hsu:0.5", Dirichlet(0.5, "hsu"), "dirichlet:0.5:hsu"),
        ("pathological:2", Pathological(2), "pathological:2"),
        ("pathological:3:prior", Pathological(3, "prior"), "pathological:3:prior"),
        ("quantity:0.5", Quantity(0.5), "quantity:0.5"),
        ("by-user", ByUser(), "by-user"),
        ("by-domain", ByDomain(), "by-domain"),
        ("longtail:2", LongTail(2), "longtail:2/iid"),
        (
            "longtail:2/dirichlet:0.1:chunked",
            LongTail(2, Dirichlet(0.1, "chunked")),
            "longtail:2/dirichlet:0.1:chunked",
        ),
        (" longtail:2 / iid ", LongTail(2, IID()), "longtail:2/iid"),
    ],
)
def test_grammar(text, partition, written):
    assert parse_partition(text) == partition
    assert str(partition) == written


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("diriclet:1", "Did you mean 'dirichlet'?"),
        ("by-users", "Did you mean 'by-user'?"),
        ("long-tail:2/iid", "Did you mean 'longtail'?"),
        ("", "Known: by-domain, by-user"),
        ("dirichlet", "for example dirichlet:0.1"),
        ("dirichlet:", "for example dirichlet:0.1"),
        ("dirichlet:x", "for example dirichlet:0.1"),
        ("dirichlet:1:hsu:2", "for example dirichlet:0.1"),
        ("dirichlet:1:chunk", "Did you mean 'chunked'?"),
        ("dirichlet:-1", "alpha must be"),
        ("pathological:2.5", "for example pathological:2"),
        ("hsu:1:equal", "for example hsu:0.5"),
        ("iid:3", "for example iid"),
        ("iid/dirichlet:1", "for example iid"),
        ("longtail/iid", "for example longtail:2/dirichlet:0.1"),
        ("longtail:2/dirichlet", "'dirichlet' is not a partition: write for example dirichlet:0.1"),
        ("longtail:2/", "There is no partition ''"),
    ],
)
def test_text_that_is_no_partition(text, says):
    with pytest.raises(FedflatError) as caught:
        parse_partition(text)
    assert says in str(caught.value) and "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------- report


def test_report_by_hand():
    labels = np.array([0, 0, 1, 1, 2, 2, 2, 2])
    report = describe(labels, [np.array([0, 1, 2, 3]), np.array([3, 4])], classes=4)
    assert report.counts.tolist() == [[2, 2, 0, 0], [0, 1, 1, 0]]
    assert report.samples.tolist() == [4, 2] and report.present.tolist() == [2, 2]
    assert report.effective == pytest.approx([2, 2])
    # all together (2, 3, 1)/6 against (1/2, 1/2, 0) and (0, 1/2, 1/2)
    assert report.distance == pytest.approx([1 / 6, 1 / 3])
    assert (report.unused, report.repeated) == (3, 1)
    assert report.summary()["samples"] == (2, 3, 3, 4)
    uneven = describe(labels, [np.arange(8)], 3)
    assert uneven.effective == pytest.approx([2**1.5]) and uneven.distance == pytest.approx([0])


def shown(report) -> list[str]:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(report)
    return capture.get().splitlines()


def test_table_shows_all_of_few_clients_and_the_extremes_of_many():
    labels = balanced(5000, 10)
    lines = shown(describe(labels, Pathological(2).split(labels, 20, 0), 10))
    clients = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert [row[0] for row in clients[1:21]] == [str(k) for k in range(20)]
    report = describe(labels, Quantity(0.5).split(labels, 60, 0), 10)
    text = "\n".join(shown(report))
    for words in (
        "60 clients",
        "median",
        "fewest samples",
        "most samples",
        "farthest from all",
        "none twice",
    ):
        assert words in text
    assert len(text.splitlines()) < 35
    alike = shown(describe(labels, Dirichlet(0).split(labels, 50, 0), 10))
    assert len(alike) < 35
    refilled = shown(describe(labels, Dirichlet(0.1, "refill").split(labels, 50, 0), 10))
    assert any("unused" in line and "repeated" in line for line in refilled)


@pytest.mark.parametrize(
    ("labels", "indices", "says"),
    [
        (np.array([0, 5]), [np.array([0, 1])], "from 0 to 2"),
        (np.array([0, 1]), [np.array([0]), np.array([], int)], "client 1 has no samples"),
        (np.array([0, 1]), [], "no clients"),
    ],
)
def test_report_of_what_is_no_split(labels, indices, says):
    with pytest.raises(FedflatError, match=says):
        describe(labels, indices, 3)


@pytest.mark.parametrize(
    ("partition", "clients", "classes"),
    [
        (Pathological(2), 10, 10),
        (Pathological(2), 100, 10),
        (Dirichlet(0.1), 20, 50),
        (IID(), 1, 1),
        (Dirichlet(1), 150, 2),
    ],
)
def test_pictures(partition, clients, classes, tmp_path: Path):
    pytest.importorskip("matplotlib")
    labels = balanced(2000, classes)
    indices = partition.split(labels, clients, 0)
    path = draw(labels, indices, classes, tmp_path / "new" / "split.png", "a split")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_pictures_that_cannot_be(tmp_path: Path, monkeypatch):
    pytest.importorskip("matplotlib")
    labels = balanced(20, 2)
    with pytest.raises(FedflatError, match="choose another file"):
        draw(labels, [np.arange(20)], 2, tmp_path / "split.nothing")
    with pytest.raises(FedflatError, match="choose another file"):
        draw(labels, [np.arange(20)], 2, "/proc/nowhere/split.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"Drawing a split needs matplotlib.*fedflat\[plot\]"):
        draw(labels, [np.arange(20)], 2, tmp_path / "split.png")


def test_what_is_no_partition_is_said():
    with pytest.raises(FedflatError, match=r"^partition must be such as Dirichlet\(0.1\) or .*, not 0.1\.$"):
        federate("digits", 0.1)
