"""Augmentation is what a slow loop over pixels does, follows the stated distributions, is keyed by seed, round and
client, and never reaches the test set."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import fedflat as ff
from fedflat.core.messages import Download, Upload
from fedflat.data.augmentation import AUGMENTATIONS, Plain
from fedflat.engines.inprocess import InProcess
from fedflat.errors import FedflatError

quick = settings(deadline=None, max_examples=60, database=None)
seeds = st.integers(0, 2**63)
chances = st.sampled_from([0.0, 0.3, 0.5, 1.0])


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def images(count: int, height: int, width: int, channels: int = 3, seed: int = 0) -> Tensor:
    """Random bytes, none of them black, so that padding is told from image."""
    pixels = random(seed).integers(1, 256, size=(count, height, width, channels), dtype=np.uint8)
    return torch.from_numpy(pixels)


# -- crops and flips -------------------------------------------------------------------------------


def slow(stored: Tensor, how: ff.Augmentation, rng: np.random.Generator) -> Tensor:
    """Pixel by pixel: the padded image, shifted by the drawn offset, mirrored where the coin says so."""
    count, height, width, channels = stored.shape
    draws = 1 if how.one_draw else count
    offsets, cropped = np.zeros((2, draws), dtype=int), np.zeros(draws, dtype=bool)
    if how.pad:
        offsets = rng.integers(0, 2 * how.pad + 1, size=(2, draws))
        cropped = rng.random(draws) < how.crop_probability
    flipped = rng.random(draws) < how.flip_probability
    result = torch.zeros_like(stored)
    for number in range(count):
        draw = 0 if how.one_draw else number
        down, right = (offsets[:, draw] - how.pad).tolist() if cropped[draw] else (0, 0)
        for row in range(height):
            for column in range(width):
                y = row + down
                x = (width - 1 - column if flipped[draw] else column) + right
                if 0 <= y < height and 0 <= x < width:
                    for channel in range(channels):
                        result[number, row, column, channel] = stored[number, y, x, channel]
    return result


@quick
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 3])),
    pad=st.integers(0, 7),
    crop=chances,
    flip=chances,
    one_draw=st.booleans(),
    seed=seeds,
)
def test_equals_a_loop_over_pixels(shape, pad: int, crop: float, flip: float, one_draw: bool, seed: int):
    how = ff.Augmentation(pad, crop, flip, one_draw)
    stored = images(*shape, seed=seed)
    before = stored.clone()
    result = how(stored, random(seed))
    assert result.equal(slow(before, how, random(seed)))
    assert result.dtype == torch.uint8
    assert result.shape == stored.shape
    assert stored.equal(before)


@quick
@given(count=st.integers(1, 5), seed=seeds)
def test_none_is_the_identity_and_draws_nothing(count: int, seed: int):
    stored, rng = images(count, 5, 4, seed=seed), random(seed)
    assert AUGMENTATIONS["none"](stored, rng).equal(stored)
    assert rng.bit_generator.state == random(seed).bit_generator.state
    assert not AUGMENTATIONS["none"].random


@quick
@given(pad=st.integers(1, 4), seed=seeds)
def test_certain_flips_mirror_and_impossible_crops_leave_in_place(pad: int, seed: int):
    stored = images(3, 4, 6, seed=seed)
    assert ff.Augmentation(flip_probability=1.0)(stored, random(seed)).equal(stored.flip(2))
    assert ff.Augmentation(pad, crop_probability=0.0)(stored, random(seed)).equal(stored)


COUNT, SIDE, CENTRE = 16_000, 17, 8


def moves(how: ff.Augmentation) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How far each of many images was moved down and to the left, and whether it was mirrored.

    All have a bright pixel in the centre and a dim one right of it. A mirrored image has the dim one on the left.
    """
    stored = torch.zeros(COUNT, SIDE, SIDE, 1, dtype=torch.uint8)
    stored[:, CENTRE, CENTRE], stored[:, CENTRE, CENTRE + 1] = 200, 100
    result = how(stored, random(5)).numpy()[..., 0]
    _, bright_rows, bright_columns = np.nonzero(result == 200)
    _, _, dim_columns = np.nonzero(result == 100)
    flipped = dim_columns < bright_columns
    assert (np.abs(dim_columns - bright_columns) == 1).all()
    across = np.where(flipped, SIDE - 1 - bright_columns, bright_columns)
    return CENTRE - bright_rows, CENTRE - across, flipped


def likely(count: int, of: int, probability: float) -> bool:
    """Within five standard deviations of what is expected."""
    return abs(count - of * probability) < 5 * np.sqrt(of * probability * (1 - probability))


@pytest.mark.parametrize("pad", [2, 4])
def test_all_offsets_and_both_sides_are_equally_likely(pad: int):
    down, across, flipped = moves(ff.Augmentation(pad, flip_probability=0.5))
    places = 2 * pad + 1
    counts = np.zeros((places, places), dtype=int)
    np.add.at(counts, (down + pad, across + pad), 1)
    expected = COUNT / places**2
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    free = places**2 - 1
    assert chi_squared < free + 5 * np.sqrt(2 * free)
    assert likely(int(flipped.sum()), COUNT, 0.5)
    moved = down > 0  # flips know nothing of crops
    assert likely(int(flipped[moved].sum()), int(moved.sum()), 0.5)


def test_fedwmsam_crops_every_second_image():
    down, across, flipped = moves(AUGMENTATIONS["fedwmsam"])
    stayed = (down == 0) & (across == 0)
    assert likely(int(stayed.sum()), COUNT, 0.5 + 0.5 / 81)
    assert likely(int(flipped.sum()), COUNT, 0.5)
    assert np.abs(down).max() == np.abs(across).max() == 4


@pytest.mark.parametrize(
    ("name", "pad", "flips"), [("crop-flip", 4, True), ("fedgmt-paper", 2, True), ("none", 0, False)]
)
def test_the_papers_variants(name: str, pad: int, flips: bool):
    down, across, flipped = moves(AUGMENTATIONS[name])
    assert np.abs(down).max() == np.abs(across).max() == pad
    assert flipped.any() == flips


def test_one_draw_moves_all_images_alike_and_differently_every_time():
    how = AUGMENTATIONS["fedgmt-code"]
    same = images(1, 12, 12).expand(6, -1, -1, -1)
    rng, seen = random(0), set()
    for _ in range(40):
        result = how(same, rng)
        assert all(image.equal(result[0]) for image in result)
        seen.add(result[0].numpy().tobytes())
    assert len(seen) > 20


def test_an_unknown_augmentation_suggests_the_nearest():
    dataset = ff.Dataset("d", (images(4, 4, 4), torch.arange(4)), (images(4, 4, 4), torch.arange(4)), 4)
    with pytest.raises(FedflatError, match=r"Did you mean 'crop-flip'\?"):
        ff.federate(dataset, clients=2, augment="cropflip")


def test_what_is_no_image_cannot_be_augmented():
    with pytest.raises(FedflatError, match=r"digits has no stored images.*leave out augment='crop-flip'"):
        ff.federate("digits", clients=2, augment="crop-flip")
    assert ff.federate("digits", clients=2, augment="none").pipeline == Plain()


# -- normalisation ---------------------------------------------------------------------------------

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@quick
@given(count=st.integers(1, 4), side=st.integers(1, 6), channels=st.sampled_from([1, 3]), seed=seeds)
def test_normalisation_is_the_formula(count: int, side: int, channels: int, seed: int):
    stored = images(count, side, side + 1, channels, seed=seed)
    mean, std = (torch.tensor(values[:channels], dtype=torch.float64) for values in (MEAN, STD))
    exact = ((stored.double() / 255 - mean) / std).permute(0, 3, 1, 2)
    for dtype, near in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        pipeline = ff.Images(MEAN[:channels], STD[:channels]).to(dtype)
        result = pipeline.test(stored)
        assert result.dtype == dtype
        assert result.shape == (count, *pipeline.shape(tuple(stored.shape[1:])))
        assert (result.double() - exact).abs().max() < near
        assert pipeline.train(stored, random(0)).equal(result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stored_images_are_left_as_they_are(dtype: torch.dtype):
    """Also where they are stored in the very type that comes out."""
    for stored in (images(3, 4, 4), images(3, 4, 4).to(dtype)):
        before = stored.clone()
        pipeline = ff.Images(MEAN, STD, dtype=dtype)
        first = pipeline.test(stored).clone()
        assert stored.equal(before)
        assert pipeline.test(stored).equal(first)
        assert pipeline.train(stored, random(0)).equal(first)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_images_come_out_channels_last(name: str):
    pipeline = ff.Images(MEAN, STD, AUGMENTATIONS[name])
    stored = images(5, 6, 8)
    for result in (
        pipeline.test(stored),
        pipeline.train(stored, random(0)),
        pipeline.train(stored, random(0))[2:4],
    ):
        assert result.shape[1:] == (3, 6, 8)
        assert result.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_training_images_are_augmented_then_normalised(name: str):
    how = AUGMENTATIONS[name]
    stored = images(6, 7, 5)
    result = ff.Images(MEAN, STD, how).train(stored, random(3))
    black = (torch.zeros(3) - torch.tensor(MEAN)) / torch.tensor(STD)
    assert result.equal(ff.Images(MEAN, STD).test(slow(stored, how, random(3))))
    if how.pad:
        padded = (result - black[None, :, None, None]).abs().amax(1) < 1e-6
        assert padded.any()


# -- in training -----------------------------------------------------------------------------------


class Watched(nn.Module):
    """A linear model that keeps what it is given, and whether for training."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)
        self.seen: list[tuple[bool, Tensor]] = []

    def __deepcopy__(self, memo: dict) -> "Watched":
        """Training copies its model; this one is to be watched itself."""
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append((self.training, inputs.clone(memory_format=torch.preserve_format)))
        return self.linear(inputs.flatten(1))


class Order(InProcess):
    """Runs the clients of a round in another order, but hands in their uploads as it should."""

    def __init__(self, sort: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self.sort = sort
        self.order: list[int] = []

    def uploads(self, clients: Sequence[int], download: Callable[[int], Download], state) -> Iterator[Upload]:
        chosen = self.sort(clients)
        self.order += chosen
        done = {upload.client: upload for upload in super().uploads(chosen, download, state)}
        yield from (done[client] for client in clients)


CLIENTS, EACH = 3, 10


def colour_dataset(augmentation: str = "crop-flip") -> ff.Dataset:
    stored = images(CLIENTS * EACH, 6, 6)
    labels = torch.arange(CLIENTS * EACH) % 2
    test = images(8, 6, 6, seed=1), torch.arange(8) % 2
    return ff.Dataset("colours", (stored, labels), test, 2, ff.Images(MEAN, STD), augmentation)


def batches_by_round_and_client(
    seed: int = 0,
    sort: Callable[[Sequence[int]], Sequence[int]] = list,
    augment: str | None = None,
    rounds: int = 2,
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[tuple[int, int], list[Tensor]], list[Tensor], ff.Run]:
    """What the model saw in training, by round and client, and in tests; two epochs of three batches each."""
    federation = ff.federate(colour_dataset(), ff.IID(), clients=CLIENTS, augment=augment)
    torch.manual_seed(0)
    model, engine = Watched(108, 2), Order(sort)
    run = ff.train(
        federation, model, local=ff.LocalSGD(lr=0.01, epochs=2, batch_size=4), rounds=rounds, seed=seed,
        engine=engine, dtype=dtype,
    )  # fmt: skip
    trained = [batch for training, batch in model.seen if training]
    tested = [batch for training, batch in model.seen if not training]
    assert len(trained) == 6 * CLIENTS * rounds
    places = [(number // CLIENTS, client) for number, client in enumerate(engine.order)]
    return {place: trained[6 * k : 6 * k + 6] for k, place in enumerate(places)}, tested, run


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(one, other, strict=True))


def test_batches_depend_on_seed_round_and_client_only():
    first, _, run = batches_by_round_and_client()
    again, _, same_run = batches_by_round_and_client()
    backwards, _, backwards_run = batches_by_round_and_client(sort=lambda clients: clients[::-1])
    assert list(backwards) != list(first)
    for place, seen in first.items():
        assert same(seen, again[place])
        assert same(seen, backwards[place])
    assert run.server.w.equal(same_run.server.w)
    assert run.server.w.equal(backwards_run.server.w)
    other, _, _ = batches_by_round_and_client(seed=1)
    assert not any(same(seen, other[place]) for place, seen in first.items())
    assert not same(first[0, 1], first[1, 1])


def test_every_client_and_every_epoch_draws_for_itself():
    """Give all clients the same images: only the draws can make a difference."""
    dataset = colour_dataset()
    federation = ff.Federation.from_indices(
        (dataset.train[0][:EACH], dataset.train[1][:EACH]), [range(EACH)] * 2, None, 2,
        pipeline=ff.Images(MEAN, STD, ff.Augmentation(pad=2)),
    )  # fmt: skip
    model = Watched(108, 2)
    ff.train(federation, model, local=ff.LocalSGD(epochs=2, batch_size=None), rounds=1)
    seen = [batch for training, batch in model.seen if training]
    assert len(seen) == 4  # full batches keep their order: two clients, two epochs
    assert not any(seen[a].equal(seen[b]) for a in range(4) for b in range(a))


def sorted_images(batches: list[Tensor]) -> list[bytes]:
    return sorted(image.contiguous().numpy().tobytes() for batch in batches for image in batch)


def test_training_sees_augmented_images_and_evaluation_plain_ones():
    """Every local epoch has every image once: as it is without augmentation, changed with it."""
    dataset = colour_dataset()
    plain = dataset.pipeline
    federation = ff.federate(dataset, ff.IID(), clients=CLIENTS)
    seen, tested, run = batches_by_round_and_client()
    unchanged, _, _ = batches_by_round_and_client(augment="none")
    for (number, client), batches in seen.items():
        own = sorted_images([plain.test(federation.client(client).stored()[0])])
        for epoch in (slice(0, 3), slice(3, 6)):
            assert sorted_images(unchanged[number, client][epoch]) == own
            augmented = sorted_images(batches[epoch])
            assert len(augmented) == len(own)
            assert (
                len(set(augmented) & set(own)) <= 1
            )  # it can happen that an image is neither moved nor mirrored
    assert len(tested) == 2
    assert all(batch.equal(plain.test(dataset.test[0])) for batch in tested)
    whole = torch.cat([inputs for inputs, _ in federation.union().batches(7)])
    assert sorted_images([whole]) == sorted_images([plain.test(dataset.train[0])])
    assert np.isfinite(ff.sharpness(run.model, federation.union()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_model_sees_the_run_s_floating_type_in_channels_last(dtype: torch.dtype):
    seen, tested, run = batches_by_round_and_client(dtype=dtype, rounds=1)
    for batch in [*tested, *(batch for batches in seen.values() for batch in batches)]:
        assert batch.dtype == dtype
        assert batch.is_contiguous(memory_format=torch.channels_last)
    assert run.server.w.dtype == dtype


def test_float64_augments_as_float32_does():
    """The draws are the same, so that a run in double precision checks one in single."""
    single, _, _ = batches_by_round_and_client(rounds=1)
    double, _, _ = batches_by_round_and_client(rounds=1, dtype=torch.float64)
    for place, seen in single.items():
        assert all((a - b).abs().max() < 1e-6 for a, b in zip(seen, double[place], strict=True))


def test_a_dataset_is_augmented_as_is_usual_for_it_unless_told_otherwise():
    dataset = colour_dataset("fedwmsam")
    assert ff.federate(dataset, clients=2).pipeline.augmentation == AUGMENTATIONS["fedwmsam"]
    assert ff.federate(dataset, clients=2, augment="none").pipeline.augmentation == AUGMENTATIONS["none"]
    assert not ff.federate(dataset, clients=2, augment="none").pipeline.random
    assert dataset.pipeline.augmentation == AUGMENTATIONS["none"]
