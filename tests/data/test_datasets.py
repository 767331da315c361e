"""Every form in which a dataset may lie on a disk gives back what was put in, once decoded stays decoded, and what is
wrong with a file is said in a sentence. The last part reads real datasets, if they lie beside the repository."""

import csv
import gzip
import io
import json
import multiprocessing
import os
import pickle
import re
import shutil
import struct
import sys
import tarfile
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import fedflat as ff
from fedflat.cli import main
from fedflat.data.cache import cache_directory
from fedflat.data.text import CHARACTERS, LENGTH, basic_english, encode_characters
from fedflat.errors import FedflatError, MissingExtra

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(autouse=True)
def own_world(tmp_path: Path, monkeypatch) -> None:
    """A home, a cache and a working directory of its own: no test sees this machine's datasets."""
    for name in ("FEDFLAT_DATA", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for place in ("home", "work", "data"):
        (tmp_path / place).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.setenv("FEDFLAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty directory for datasets."""
    return tmp_path / "data"


@pytest.fixture
def every_warning() -> Iterator[None]:
    """What torch warns of only once in a process, it warns of every time."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


# -- making datasets -------------------------------------------------------------------------------

Arrays = tuple[np.ndarray, np.ndarray]


def samples(count: int, shape: tuple[int, ...], classes: int, seed: int = 0) -> Arrays:
    """Random images (height, width, channels) and labels; every class occurs where there are enough samples."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, size=(count, *shape), dtype=np.uint8)
    return pixels, rng.permutation(np.arange(count) % classes)


def encoded(pixels: np.ndarray, form: str = "PNG") -> bytes:
    """One image as the bytes of a file."""
    file = io.BytesIO()
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    image.save(file, form, **({"lossless": True} if form == "WEBP" else {}))
    return file.getvalue()


def image_table(
    arrays: Arrays, image: str = "img", label: str = "label", names: Sequence[str] = (), form: str = "PNG"
) -> pa.Table:
    """Images in a table as the Hugging Face hub has them."""
    pixels, labels = arrays
    cells = [{"bytes": encoded(p, form), "path": f"{i}.{form.lower()}"} for i, p in enumerate(pixels)]
    table = pa.table({image: cells, label: pa.array(labels, pa.int64())})
    features = {label: {"names": list(names), "_type": "ClassLabel"}, image: {"_type": "Image"}}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def write_table(table: pa.Table, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def write_images(folder: Path, train: Arrays, test: Arrays, **options: Any) -> None:
    write_table(image_table(train, **options), folder / "train.parquet")
    write_table(image_table(test, **options), folder / "test.parquet")


def write_image(path: Path, pixels: np.ndarray, form: str = "PNG") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(pixels, form))
    return path


def idx(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    )


def write_idx(folder: Path, train: Arrays, test: Arrays, packed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, (pixels, labels) in (("train", train), ("t10k", test)):
        for name, array in ((f"{split}-images-idx3", pixels[..., 0]), (f"{split}-labels-idx1", labels)):
            path = folder / f"{name}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))


def write_news(folder: Path, train: Sequence[Sequence[Any]], test: Sequence[Sequence[Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", train), ("test", test)):
        with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)


class Python2Pickler(pickle._Pickler):
    """Writes text as Python 2 did, in whose pickles CIFAR is distributed: byte strings without an encoding."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_text(self, text: str | bytes) -> None:
        content = text.encode("latin1") if isinstance(text, str) else text
        short = len(content) < 256
        self.write(b"U" + bytes([len(content)]) if short else b"T" + struct.pack("<i", len(content)))
        self.write(content)
        self.memoize(text)

    dispatch[str] = dispatch[bytes] = save_text


def python2(content: Any) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(content)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def python3(content: Any) -> bytes:
    return pickle.dumps(content, protocol=2)


CIFAR = {
    "cifar10": ("cifar-10-batches-py", b"labels", b"label_names", "batches.meta"),
    "cifar100": ("cifar-100-python", b"fine_labels", b"fine_label_names", "meta"),
}


def cifar_batches(
    name: str, train: Arrays, test: Arrays, names: Sequence[str], dump: Callable[[Any], bytes]
) -> dict[str, bytes]:
    """The files of the author's folder, by name."""

    def batch(pixels: np.ndarray, labels: np.ndarray) -> bytes:
        flat = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
        return dump({b"batch_label": b"a batch", CIFAR[name][1]: labels.tolist(), b"data": flat})

    files = {CIFAR[name][3]: dump({CIFAR[name][2]: [n.encode() for n in names]})}
    if name == "cifar100":
        return {**files, "train": batch(*train), "test": batch(*test)}
    fifths = zip(np.split(train[0], 5), np.split(train[1], 5), strict=True)
    batches = {f"data_batch_{number}": batch(*fifth) for number, fifth in enumerate(fifths, start=1)}
    return {**files, **batches, "test_batch": batch(*test)}


def put_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def pack_files(archive: Path, inside: str, files: dict[str, bytes]) -> Path:
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{inside}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return archive


LETTERS = [f"class {letter}" for letter in "abcdefghij"]
SMALL = samples(20, (28, 28, 1), 10), samples(5, (28, 28, 1), 10, seed=1)
COLOUR = samples(20, (32, 32, 3), 10), samples(5, (32, 32, 3), 10, seed=1)


def assert_holds(dataset: ff.Dataset, train: Arrays, test: Arrays) -> None:
    """The stored samples are these, in this order."""
    for (inputs, labels), (pixels, numbers) in ((dataset.train, train), (dataset.test, test)):
        assert inputs.dtype == torch.uint8
        assert labels.dtype == torch.int64
        np.testing.assert_array_equal(inputs.numpy(), pixels)
        np.testing.assert_array_equal(labels.numpy(), numbers)


def sentence(action: Callable[[], Any], *says: str | Path) -> str:
    """The one sentence with which a mistake is told; it must contain all that is named."""
    with pytest.raises(FedflatError) as caught:
        action()
    told = str(caught.value)
    for part in says:
        assert str(part) in told
    assert "\n" not in told
    return told


# -- the forms of every dataset --------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dump", [python2, python3])
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "tar"])
@pytest.mark.parametrize("name", CIFAR)
def test_cifar_as_its_author_packs_it(name: str, packed: bool, dump, root: Path):
    classes = 10 if name == "cifar10" else 100
    train, test = samples(classes, (32, 32, 3), classes), samples(4, (32, 32, 3), classes, seed=1)
    names = [f"thing {number}" for number in range(classes)]
    files = cifar_batches(name, train, test, names, dump)
    folder = CIFAR[name][0]
    if packed:
        pack_files(root / f"{name.replace('cifar', 'cifar-')}-python.tar.gz", folder, files)
    else:
        put_files(root / folder, files)
    dataset = ff.load_dataset(name, root)
    assert_holds(dataset, train, test)
    assert dataset.classes == classes
    assert dataset.class_names == tuple(names)
    assert dataset.pipeline.shape(tuple(dataset.train[0].shape[1:])) == (3, 32, 32)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize("folder", ["fashion-mnist", "FashionMNIST", "FashionMNIST/raw"])
def test_fashion_mnist_as_idx_files(folder: str, packed: bool, root: Path, every_warning):
    write_idx(root / folder, *SMALL, packed=packed)
    dataset = ff.load_dataset("fashion-mnist", root)
    assert_holds(dataset, *SMALL)
    assert dataset.augmentation == "none"


@pytest.mark.parametrize(
    ("name", "shape", "image", "label", "form"),
    [
        ("cifar10", (32, 32, 3), "img", "label", "WEBP"),
        ("cifar100", (32, 32, 3), "img", "fine_label", "PNG"),
        ("fashion-mnist", (28, 28, 1), "image", "label", "PNG"),
        ("cinic10", (32, 32, 3), "image", "label", "PNG"),
        ("tiny-imagenet", (64, 64, 3), "image", "label", "BMP"),
    ],
)
def test_images_as_parquet(name: str, shape, image: str, label: str, form: str, root: Path):
    train, test = samples(20, shape, 10), samples(5, shape, 10, seed=1)
    folder = root / name.replace("-", "_")
    write_images(folder, train, test, image=image, label=label, names=LETTERS, form=form)
    dataset = ff.load_dataset(name, root)
    assert_holds(dataset, train, test)
    assert dataset.class_names == tuple(LETTERS)
    assert dataset.name == name


def test_parquet_without_the_hub_s_notes_and_with_bare_bytes(root: Path):
    for split, (pixels, labels) in zip(("train", "test"), COLOUR, strict=True):
        table = pa.table({"image": [encoded(p) for p in pixels], "label": pa.array(labels, pa.uint8())})
        write_table(table, root / "cifar10" / f"{split}.parquet")
    dataset = ff.load_dataset("cifar10", root)
    assert_holds(dataset, *COLOUR)
    assert dataset.class_names == ()


def write_shards(folder: Path, split: str, arrays: Arrays, count: int = 2, **options: Any) -> None:
    table = image_table(arrays, names=LETTERS, **options)
    ends = [len(table) * k // count for k in range(count + 1)]
    for number, (first, last) in enumerate(pairwise(ends)):
        write_table(table.slice(first, last - first), folder / f"{split}-{number:05}-of-{count:05}.parquet")


def test_sharded_parquet_in_a_subfolder(root: Path):
    train, test = samples(36, (32, 32, 3), 10), COLOUR[1]
    write_shards(root / "cifar10" / "plain_text", "train", train, count=12)  # 2 must come before 10
    write_shards(root / "cifar10" / "plain_text", "test", test)
    dataset = ff.load_dataset("cifar10", root)
    assert_holds(dataset, train, test)
    assert dataset.class_names == tuple(LETTERS)


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", None])
def test_the_hub_s_cache(variable: str | None, tmp_path: Path, root: Path, monkeypatch):
    """Snapshots of links into a folder of blobs, where the hub's own library leaves them."""
    home = tmp_path / "home" / ".cache" / "huggingface" if variable is None else root
    hub = home if variable == "HF_HUB_CACHE" else home / "hub"
    if variable:
        monkeypatch.setenv(variable, str(root))
    place = hub / "datasets--uoft-cs--cifar10"
    write_shards(place / "blobs", "train", COLOUR[0])
    write_shards(place / "blobs", "test", COLOUR[1], count=1)
    snapshot = place / "snapshots" / "0123abcd" / "plain_text"
    snapshot.mkdir(parents=True)
    for blob in (place / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(blob)
    assert_holds(ff.load_dataset("cifar10"), *COLOUR)


def test_tiny_imagenet_from_the_hub_is_tested_on_its_validation_split(root: Path):
    train, test = samples(6, (64, 64, 3), 3), samples(4, (64, 64, 3), 3, seed=1)
    snapshot = root / "datasets--zh-plus--tiny-imagenet" / "snapshots" / "0123" / "data"
    write_shards(snapshot, "train", train, count=1, image="image")
    write_shards(snapshot, "valid", test, count=1, image="image")
    dataset = ff.load_dataset("tiny-imagenet", root)
    assert_holds(dataset, train, test)
    part = "6 of 100,000 training samples, 4 of 10,000 test samples, 3 of 200 classes"
    assert dataset.caveats == (f"This copy of tiny-imagenet is a part: {part}.",)


@pytest.mark.parametrize("folder", ["cinic10", "CINIC-10"])
def test_cinic10_as_class_folders(folder: str, root: Path):
    """Classes are the sorted names of the training folders, images come in the order of their names."""
    pixels = COLOUR[0][0][:7]
    names = ["train/b/2", "train/b/10", "train/a/1", "test/a/1", "test/b/1", "test/b/2", "train/c/1"]
    for name, image in zip(names, pixels, strict=True):
        write_image(root / folder / f"{name}.png", image)
    (root / folder / "train" / "a" / "notes.txt").write_text("not an image")
    dataset = ff.load_dataset("cinic10", root)
    train = pixels[[2, 1, 0, 6]], np.array([0, 1, 1, 2])
    test = pixels[[3, 4, 5]], np.array([0, 1, 1])
    assert_holds(dataset, train, test)
    assert dataset.class_names == ("a", "b", "c")
    assert "3 of 10 classes" in dataset.caveats[0]


def opened(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def test_tiny_imagenet_as_distributed(root: Path):
    """JPEG files, some grey; the validation images lie in one folder and a file says what is on them."""
    folder = root / "tiny-imagenet-200"
    pixels = samples(8, (64, 64, 3), 1)[0]
    train, train_labels = [], []
    for label, wnid in enumerate(("n01443537", "n01784675")):
        for number in range(2):
            image = pixels[2 * label + number]
            image = image[..., :1] if number else image
            path = folder / "train" / wnid / "images" / f"{wnid}_{number}.JPEG"
            train.append(opened(write_image(path, image, "JPEG")))
            train_labels.append(label)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("not an image")
    classes = ["n01784675", "n01443537", "n09999999", "n01784675"]  # the third is not among those trained on
    paths = [
        write_image(folder / "val" / "images" / f"val_{n}.JPEG", pixels[4 + n], "JPEG") for n in range(4)
    ]
    rows = [f"{path.name}\t{wnid}\t0\t0\t63\t63" for path, wnid in zip(paths, classes, strict=True)]
    (folder / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")
    dataset = ff.load_dataset("tiny-imagenet", root)
    held = [opened(paths[number]) for number in (0, 1, 3)]
    assert_holds(dataset, (np.stack(train), np.array(train_labels)), (np.stack(held), np.array([1, 0, 1])))
    assert dataset.class_names == ("n01443537", "n01784675")


DOMAINS = ("Art", "Clipart", "Product", "Real World")


def office_colours(each: int = 10) -> Iterator[tuple[int, int, np.ndarray]]:
    """Domain, class and an image of one colour, which says which image it is."""
    for domain in range(4):
        for label in range(2):
            for number in range(each):
                yield domain, label, np.full((3, 5, 3), (50 * domain, 100 * label, number), dtype=np.uint8)


def write_office(folder: Path, real_world: str = "Real World") -> None:
    for domain, label, image in office_colours():
        name = (*DOMAINS[:3], real_world)[domain]
        write_image(folder / name / ("Alarm_Clock", "Bike")[label] / f"{int(image[0, 0, 2]):05}.png", image)


def office_split(dataset: ff.Dataset) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """The colours in training and test set; checks size, class and domain of every image on the way."""
    found = []
    for inputs, labels in (dataset.train, dataset.test):
        assert inputs.shape[1:] == (224, 224, 3)
        colours = inputs[:, 0, 0].long()
        assert inputs.long().eq(colours[:, None, None]).all()
        assert colours[:, 1].div(100).eq(labels).all()
        found.append({tuple(colour) for colour in colours.tolist()})
    assert dataset.groups is not None
    domains = dataset.train[0][:, 0, 0, 0].numpy() // 50
    assert [dataset.group_names[number] for number in dataset.groups] == [DOMAINS[d] for d in domains]
    domains = dataset.test[0][:, 0, 0, 0].numpy() // 50
    assert [dataset.group_names[number] for number in dataset.test_groups] == [DOMAINS[d] for d in domains]
    return found[0], found[1]


@pytest.mark.parametrize("real_world", ["Real World", "Real_World"])
def test_office_home_as_domain_folders(real_world: str, root: Path):
    write_office(root / "OfficeHomeDataset_10072016", real_world)
    dataset = ff.load_dataset("office-home", root)
    train, test = office_split(dataset)
    assert not train & test
    assert train | test == {tuple(image[0, 0].tolist()) for _, _, image in office_colours()}
    assert 2 <= len(test) <= 16  # of 80, a tenth drawn at random
    assert dataset.class_names == ("Alarm_Clock", "Bike")
    assert dataset.group_names == DOMAINS


def test_office_home_s_held_out_tenth_is_the_same_everywhere(root: Path):
    write_office(root / "here" / "office_home")
    cells = [(encoded(image), label, DOMAINS[domain]) for domain, label, image in office_colours()]
    images, labels, domains = zip(*cells, strict=True)
    table = pa.table({"image": images, "label": labels, "domain": domains})
    write_table(table, root / "there" / "office_home" / "train.parquet")
    one, other = (ff.load_dataset("office-home", root / place) for place in ("here", "there"))
    assert office_split(one) == office_split(other)
    federation = ff.federate(one, ff.ByDomain(), clients=None)
    assert federation.sizes == np.bincount(one.groups).tolist()


NEWS = [(3, "Oil up", 'Oil, "oil" and gas.'), (1, "Up", "")], [(3, "Gas!", "OIL; up")]


def check_news(dataset: ff.Dataset) -> None:
    """Frequent words have small numbers, over both splits; equally frequent ones are in alphabetical order."""
    words = [
        "",
        "oil",
        "up",
        "gas",
        "!",
        ",",
        ".",
        "and",
    ]  # oil occurs four times, up three, gas two, the rest once
    assert dataset.vocabulary == len(words)
    rows = torch.cat([dataset.train[0], dataset.test[0]])
    assert rows.shape == (3, LENGTH)
    texts = [" ".join(words[number] for number in row).rstrip() for row in rows]
    assert texts == ["oil up oil , oil and gas .", "up", "gas ! oil up"]
    assert dataset.train[1].tolist() == [2, 0]
    assert dataset.test[1].tolist() == [2]


def test_news_as_csv(root: Path):
    write_news(root / "ag_news_csv", *NEWS)
    dataset = ff.load_dataset("ag-news", root)
    check_news(dataset)
    assert dataset.class_names[2] == "Business"
    assert "2 of 120,000 training samples" in dataset.caveats[0]


def test_news_as_parquet(root: Path):
    for split, rows in zip(("train", "test"), NEWS, strict=True):
        texts = [f"{title} {text}".strip() for _, title, text in rows]
        table = pa.table({"text": texts, "label": [label - 1 for label, _, _ in rows]})
        write_table(table, root / "ag_news" / f"{split}.parquet")
    check_news(ff.load_dataset("ag_news", root))


def test_long_news_are_cut_and_unknown_characters_kept(root: Path):
    long = " ".join(f"w{number}" for number in range(LENGTH + 50))
    write_news(root / "ag_news", [(1, "Ünïcode", "naïve 東京"), (2, long, "never seen")], [(1, "東京", "")])
    dataset = ff.load_dataset("ag-news", root)
    assert (dataset.train[0][1] > 0).all()
    assert (dataset.train[0][0] > 0).sum() == 3
    assert dataset.test[0][0, 0] == dataset.train[0][0, 2]  # the one word that occurs twice


# -- Shakespeare -----------------------------------------------------------------------------------

RICHARD = "Now is the winter of our discontent\nMade glorious summer by this sun of York;\nAnd all the clouds"
ANNE = "Set down, set down your honourable load,\nIf honour may be shrouded in a hearse, Whilst I awhile obsequiously"
LATER = (
    "lament the untimely fall of virtuous Lancaster. Poor key-cold figure of a holy king! Pale ashes of the house of "
    "Lancaster! Thou bloodless remnant of that royal blood! Be it lawful that I invocate thy ghost, To hear the "
    "lamentations of poor Anne, Wife to thy Edward, to thy slaughtered son, Stabbed by the selfsame hand that made"
)


def spelled(row: torch.Tensor) -> str:
    """Characters from their numbers."""
    return "".join("\0" if number == 0 else CHARACTERS[number - 1] for number in row.tolist())


def windows(text: str) -> tuple[list[str], list[str]]:
    """LEAF's samples of a text: 80 characters and the one after."""
    places = range(len(text) - 80)
    return [text[p : p + 80] for p in places], [text[p + 80] for p in places]


def check_roles(dataset: ff.Dataset, spoken: dict[str, str], later: str) -> None:
    """Training has every window of every role and none that begins in one role and ends in another.

    The test windows are from one role; they are some of its windows, from the first on, and do not overlap.
    """
    assert dataset.group_names == tuple(sorted(spoken))
    federation = ff.federate(dataset, ff.ByUser(), clients=None)
    assert len(federation) == len(spoken)
    for number, role in enumerate(sorted(spoken)):
        inputs, targets = federation.client(number).stored()
        wanted, following = windows(spoken[role])
        assert [spelled(row) for row in inputs] == wanted
        assert spelled(targets) == "".join(following)
    held = [spelled(row) + spelled(target[None]) for row, target in zip(*dataset.test, strict=True)]
    places = [later.index(text) for text in held]
    assert places[0] == 0
    assert len(places) > 1
    assert all(len(text) == 81 for text in held)
    assert min(last - first for first, last in pairwise(places)) >= 80
    assert {dataset.group_names[number][-4:] for number in dataset.test_groups} == {"ANNE"}
    assert len(dataset.test_groups) == len(held)


def test_shakespeare_as_speeches(root: Path):
    """A role's speeches are one text; who says 80 characters or fewer has nothing to predict and is left out."""

    def table(rows: list[tuple[str, str]]) -> pa.Table:
        return pa.table({"client_id": [role for role, _ in rows], "text": [text for _, text in rows]})

    first, second = RICHARD.split("\n", 1)
    train = [("RICHARD", first), ("ANNE", ANNE), ("RICHARD", second), ("PAGE", "My lord?"), ("BOY", "x" * 80)]
    test = [("ANNE", LATER), ("RICHARD", "Stay"), ("PAGE", LATER)]
    write_table(table(train), root / "shakespeare" / "train.parquet")
    write_table(table(test), root / "shakespeare" / "test.parquet")
    check_roles(ff.load_dataset("shakespeare", root), {"RICHARD": RICHARD, "ANNE": ANNE}, LATER)


def leaf(texts: dict[str, str], shuffled: bool = False) -> bytes:
    """LEAF's file of all windows of some users; LEAF can also draw them at random."""
    data = {user: dict(zip("xy", windows(text), strict=True)) for user, text in texts.items()}
    if shuffled:
        data = {user: {name: values[::-1] for name, values in part.items()} for user, part in data.items()}
    counts = [len(part["y"]) for part in data.values()]
    return json.dumps({"users": list(texts), "num_samples": counts, "user_data": data}).encode()


@pytest.mark.parametrize("inside", ["", "data"])
def test_shakespeare_as_leaf_s_json(inside: str, root: Path):
    folder = root / "shakespeare" / inside
    some, others = leaf({"KING_RICHARD": RICHARD}), leaf({"LADY_ANNE": ANNE, "SILENT": ""})
    put_files(folder / "train", {"one.json": some, "two.json": others})
    put_files(folder / "test", {"all.json": leaf({"LADY_ANNE": LATER})})
    dataset = ff.load_dataset("shakespeare", root)
    check_roles(dataset, {"KING_RICHARD": RICHARD, "LADY_ANNE": ANNE}, LATER)


def test_characters_have_numbers_from_1_and_all_others_share_0():
    assert encode_characters(CHARACTERS).tolist() == list(range(1, len(CHARACTERS) + 1))
    assert encode_characters("a東~a").tolist() == [CHARACTERS.index("a") + 1, 0, 0, CHARACTERS.index("a") + 1]
    assert encode_characters("").tolist() == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, World!", ["hello", ",", "world", "!"]),
        ("It's", ["it", "'", "s"]),
        ('say "no"', ["say", "no"]),
        ('in"side', ["inside"]),
        ("one;two:three", ["one", "two", "three"]),
        ("(Reuters) - Oil?", ["(", "reuters", ")", "-", "oil", "?"]),
        ("3.5%", ["3", ".", "5%"]),
        ("a<br />b", ["a", "b"]),
        (" tab\tand\nline ", ["tab", "and", "line"]),
        ("wall#39;s $5 \\bn", ["wall#39", "s", "$5", "\\bn"]),
        ("", []),
    ],
)
def test_basic_english_by_hand(text: str, words: list[str]):
    assert basic_english(text) == words


# -- where datasets are looked for -----------------------------------------------------------------


@pytest.mark.parametrize("inside", ["", "cifar10", "plain_text"])
def test_the_given_directory_holds_the_dataset_or_is_it(inside: str, root: Path):
    write_images(root / inside, *COLOUR)
    assert_holds(ff.load_dataset("cifar10", root), *COLOUR)
    assert_holds(ff.load_dataset("cifar10", str(root)), *COLOUR)


def test_only_the_given_directory_is_looked_in(root: Path, monkeypatch):
    write_images(root / "full" / "cifar10", *COLOUR)
    (root / "empty").mkdir()
    monkeypatch.setenv("FEDFLAT_DATA", str(root / "full"))
    told = sentence(lambda: ff.load_dataset("cifar10", root / "empty"), root / "empty")
    assert str(root / "full") not in told


def test_several_directories_in_the_environment(root: Path, monkeypatch):
    """The first that has the dataset counts; names of directories that are not there are no mistake."""
    write_images(root / "a" / "cifar10", *COLOUR)
    write_idx(root / "b" / "fashion_mnist", *SMALL)
    write_images(root / "b" / "cifar10", COLOUR[1], COLOUR[1])
    places = [root / "nowhere", root / "a", root / "b"]
    monkeypatch.setenv("FEDFLAT_DATA", os.pathsep.join(map(str, places)))
    assert_holds(ff.load_dataset("cifar10"), *COLOUR)
    assert_holds(ff.load_dataset("fashion-mnist"), *SMALL)


@pytest.mark.parametrize("place", ["work/data", "home/data", "cache/datasets"])
def test_places_that_need_not_be_named(place: str, tmp_path: Path):
    write_idx(tmp_path / place / "fashion_mnist", *SMALL)
    assert_holds(ff.load_dataset("fashion-mnist"), *SMALL)


@pytest.mark.parametrize("named", [True, False], ids=["argument", "variable"])
@pytest.mark.parametrize(
    "name", ["cifar10", "cifar100", "cinic10", "tiny-imagenet", "office-home", "ag-news"]
)
def test_no_dataset_is_mistaken_for_another(name: str, named: bool, root: Path, monkeypatch):
    """A directory that has Fashion-MNIST in a folder of its own has only that."""
    write_images(root / "fashion_mnist", *SMALL, image="image")
    monkeypatch.setenv("FEDFLAT_DATA", "" if named else str(root))
    sentence(lambda: ff.load_dataset(name, root if named else None), f"There is no {name}", root)


def test_a_missing_dataset_says_where_it_was_looked_for_and_what_to_do(
    root: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("FEDFLAT_DATA", os.pathsep.join([str(root / "x"), str(root / "y")]))
    sentence(
        lambda: ff.load_dataset("fashion-mnist"),
        "fashion-mnist", root / "x", root / "y", "data", tmp_path / "home" / "data", tmp_path / "cache",
        "FashionMNIST/raw", "IDX", "Parquet", "Zalando", "--data DIR", "FEDFLAT_DATA", "--download",
    )  # fmt: skip


def test_what_the_hub_has_not_is_not_offered_for_download(root: Path):
    assert "--download" not in sentence(lambda: ff.load_dataset("shakespeare", root), "LEAF", "--data DIR")
    sentence(lambda: ff.load_dataset("shakespeare", root, download=True), "cannot be downloaded", "LEAF")


def test_an_unknown_name_suggests_the_nearest():
    sentence(lambda: ff.load_dataset("cifar-10"), "Did you mean 'cifar10'?")
    sentence(lambda: ff.load_dataset("fashionmnist"), "Did you mean 'fashion-mnist'?")


def test_download_without_the_library_names_the_extra(root: Path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r'pip install "fedflat\[download\]"'):
        ff.load_dataset("cifar10", root, download=True)
    monkeypatch.setattr(
        sys, "argv", ["fedflat", "run", "--dataset", "cifar10", "--data", str(root), "--download"]
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "cifar10" in told and 'pip install "fedflat[download]"' in told


class FakeHub(types.ModuleType):
    """Stands in for the library `datasets`."""

    def __init__(self, splits: dict[str, pa.Table], breaks: bool = False) -> None:
        super().__init__("datasets")
        self.splits, self.breaks, self.asked = splits, breaks, []

    def load_dataset(self, name: str) -> dict[str, Any]:
        self.asked.append(name)

        def writer(table: pa.Table) -> Callable[[str], None]:
            def to_parquet(path: str) -> None:
                write_table(table, Path(path))
                if self.breaks:
                    os.truncate(path, Path(path).stat().st_size // 2)
                    raise ConnectionError("the line went dead")

            return to_parquet

        return {
            split: types.SimpleNamespace(to_parquet=writer(table)) for split, table in self.splits.items()
        }


def test_a_download_is_kept(root: Path, monkeypatch):
    train, test = samples(6, (64, 64, 3), 3), samples(4, (64, 64, 3), 3, seed=1)
    hub = FakeHub({"train": image_table(train, "image"), "valid": image_table(test, "image")})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert_holds(ff.load_dataset("tiny-imagenet", download=True), train, test)
    assert_holds(ff.load_dataset("tiny-imagenet", download=True), train, test)
    assert_holds(ff.load_dataset("tiny-imagenet"), train, test)
    assert hub.asked == ["zh-plus/tiny-imagenet"]


@pytest.mark.slow
def test_sweep_and_reproduce_download_once(tmp_path: Path, root: Path, monkeypatch, capsys):
    """Before the first of several runs begins; the runs find it, also where --data names a directory without it."""
    grey = [samples(count, (28, 28, 1), 10) for count in (60, 20)]
    tables = [image_table((pixels[..., 0], labels), "image") for pixels, labels in grey]
    hub = FakeHub(dict(zip(("train", "test"), tables, strict=True)))
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "short.yaml"
    local = "{steps: 1, batch_size: 4}"
    file.write_text(f"dataset: fashion-mnist\nclients: 3\nparticipation: 1\nrounds: 1\nlocal: {local}\n")
    sweep = ["sweep", str(file), "--set", "partition=iid", "--seeds", "2", "--jobs", "2", "--data", str(root)]
    small = ["reproduce", "fedwmsam/table1", "--cells", "fashion-mnist/dirichlet-0.6", "--rows", "FedAvg"]
    small += ["--scale", "small", "--out", "small", "--set", "clients=2", "--set", "participation=1"]
    for command in (sweep, small):
        monkeypatch.setattr(sys, "argv", ["fedflat", *command, "--download"])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code in (0, None), capsys.readouterr()
        assert "60 of 60,000 training samples" in " ".join(capsys.readouterr().out.split())
    assert hub.asked == ["zalando-datasets/fashion_mnist"]


def test_a_broken_download_leaves_nothing_that_passes_for_the_dataset(monkeypatch):
    cells = {
        "image": [encoded(COLOUR[0][0][0])] * 20,
        "label": [0, 1] * 10,
        "domain": ["Art", "Clipart"] * 10,
    }
    monkeypatch.setitem(sys.modules, "datasets", FakeHub({"train": pa.table(cells)}, breaks=True))
    load = lambda download: ff.load_dataset("office-home", download=download)  # noqa: E731
    sentence(lambda: load(True), "office-home", "the line went dead", "--data DIR")
    sentence(lambda: load(False), "There is no office-home here")
    monkeypatch.setitem(sys.modules, "datasets", FakeHub({"train": pa.table(cells)}))
    assert len(load(True).train[1]) > 0


# -- the cache -------------------------------------------------------------------------------------


@pytest.fixture
def cifar(root: Path) -> Path:
    """A small CIFAR-10 as Parquet."""
    write_images(root / "cifar10", *COLOUR, names=LETTERS)
    return root


def the_cache_file() -> Path:
    (path,) = cache_directory().glob("*.safetensors")
    return path


def no_more_images(monkeypatch) -> None:
    """From now on every attempt to decode an image fails."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(Image, "open", refuse)


def test_what_was_decoded_once_is_not_decoded_again(cifar: Path, monkeypatch):
    first = ff.load_dataset("cifar10", cifar)
    no_more_images(monkeypatch)
    second = ff.load_dataset("cifar10", cifar)
    assert_holds(second, *COLOUR)
    assert second.class_names == first.class_names == tuple(LETTERS)
    shutil.rmtree(cache_directory())
    with pytest.raises(FedflatError, match="an image was decoded"):  # the poison works
        ff.load_dataset("cifar10", cifar)


def test_a_decoded_dataset_needs_neither_pillow_nor_pyarrow(cifar: Path, monkeypatch):
    ff.load_dataset("cifar10", cifar)
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert_holds(ff.load_dataset("cifar10", cifar), *COLOUR)


def test_a_changed_file_is_decoded_anew(cifar: Path):
    ff.load_dataset("cifar10", cifar)
    inverted = (255 - COLOUR[0][0], COLOUR[0][1]), COLOUR[1]
    path = cifar / "cifar10" / "train.parquet"
    before = path.stat().st_mtime_ns
    write_table(image_table(inverted[0], names=LETTERS), path)
    os.utime(path, ns=(before + 1, before + 1))
    assert_holds(ff.load_dataset("cifar10", cifar), *inverted)


def test_a_changed_folder_is_decoded_anew(root: Path):
    pixels = COLOUR[0][0]
    for split in ("train", "test"):
        write_image(root / "cinic10" / split / "cat" / "1.png", pixels[0])
    assert len(ff.load_dataset("cinic10", root).train[1]) == 1
    write_image(root / "cinic10" / "train" / "cat" / "2.png", pixels[1])
    assert len(ff.load_dataset("cinic10", root).train[1]) == 2
    (root / "cinic10" / "train" / "cat" / "1.png").unlink()
    write_image(root / "cinic10" / "train" / "dog" / "1.png", pixels[2])
    train = ff.load_dataset("cinic10", root).train
    np.testing.assert_array_equal(train[0].numpy(), pixels[[1, 2]])
    assert train[1].tolist() == [0, 1]


def test_a_changed_validation_image_is_decoded_anew(root: Path):
    folder, pixels = root / "tiny-imagenet-200", samples(3, (64, 64, 3), 1)[0]
    write_image(folder / "train" / "n01" / "images" / "n01_0.JPEG", pixels[0])
    image = write_image(folder / "val" / "images" / "val_0.JPEG", pixels[1])
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\t0\t0\t62\t62\n")
    np.testing.assert_array_equal(ff.load_dataset("tiny-imagenet", root).test[0][0].numpy(), pixels[1])
    write_image(folder / "new.JPEG", pixels[2]).replace(image)
    np.testing.assert_array_equal(ff.load_dataset("tiny-imagenet", root).test[0][0].numpy(), pixels[2])


def test_copies_in_two_places_are_kept_apart(root: Path):
    inverted = tuple((255 - pixels, labels) for pixels, labels in COLOUR)
    write_images(root / "a" / "cifar10", *COLOUR)
    write_images(root / "b" / "cifar10", *inverted)
    for _ in range(2):
        assert_holds(ff.load_dataset("cifar10", root / "a"), *COLOUR)
        assert_holds(ff.load_dataset("cifar10", root / "b"), *inverted)


def cut(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


def flip(place: Callable[[bytes], int]) -> Callable[[bytes], bytes]:
    """Flip the lowest bit of one byte."""

    def damage(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[place(content)] ^= 1
        return bytes(changed)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(cut, id="cut short"),
        pytest.param(lambda _: b"", id="empty"),
        pytest.param(lambda content: content[:20], id="cut in the header"),
        pytest.param(lambda content: content + b"x", id="too long"),
        pytest.param(flip(lambda content: 0), id="header length"),
        pytest.param(flip(lambda content: content.index(b'"dtype"') + 1), id="header"),
        pytest.param(flip(lambda content: content.index(b"class c")), id="class name"),
        pytest.param(flip(lambda content: len(content) // 2), id="images"),
        pytest.param(flip(lambda content: len(content) - 1), id="last byte"),
    ],
)
def test_a_damaged_cache_file_is_noticed_reported_and_made_anew(damage, cifar: Path, monkeypatch, capsys):
    ff.load_dataset("cifar10", cifar)
    path = the_cache_file()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    capsys.readouterr()
    dataset = ff.load_dataset("cifar10", cifar)
    assert_holds(dataset, *COLOUR)
    assert dataset.class_names == tuple(LETTERS)
    assert re.search(rf"{path.name}.*damaged", capsys.readouterr().err)
    assert sorted(the_cache_file().read_bytes()) == sorted(whole)
    no_more_images(monkeypatch)
    assert_holds(ff.load_dataset("cifar10", cifar), *COLOUR)
    assert "damaged" not in capsys.readouterr().err


def test_a_cache_directory_that_cannot_be_made_is_done_without(cifar: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FEDFLAT_CACHE", str(tmp_path / "file" / "cache"))
    assert_holds(ff.load_dataset("cifar10", cifar), *COLOUR)


def test_a_cache_directory_that_cannot_be_written_to_is_done_without(
    cifar: Path, tmp_path: Path, monkeypatch
):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    if os.access(locked, os.W_OK):  # the superuser may write everywhere but here
        locked = Path("/proc/self")
    monkeypatch.setenv("FEDFLAT_CACHE", str(locked))
    assert_holds(ff.load_dataset("cifar10", cifar), *COLOUR)


def test_a_full_disk_is_done_without(cifar: Path):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))  # bytes; half of what is to be kept
    try:
        dataset = ff.load_dataset("cifar10", cifar)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_holds(dataset, *COLOUR)
    assert not [path for path in cache_directory().iterdir() if path.suffix != ".lock"]
    assert_holds(ff.load_dataset("cifar10", cifar), *COLOUR)
    assert the_cache_file().stat().st_size > 40_000


def load_and_count(place: str, both: Any, answers: Any) -> None:
    """In a process of its own: load, and say how many images were decoded and what was loaded.

    Nobody decodes before both processes have come for the lock.
    """
    import fcntl

    decode, lock, count = Image.open, fcntl.flock, 0

    def locked(*arguments: Any) -> None:
        both.release()
        lock(*arguments)

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 1:
            assert both.acquire(timeout=60) and both.acquire(timeout=60)
        return decode(*arguments, **options)

    Image.open, fcntl.flock = counted, locked
    import fedflat

    dataset = fedflat.load_dataset("cifar10", place)
    arrays = [array.numpy().tobytes() for pair in (dataset.train, dataset.test) for array in pair]
    answers.put((count, arrays))


def test_of_two_processes_one_decodes_and_both_have_the_data(cifar: Path):
    spawn = multiprocessing.get_context("spawn")
    both, answers = spawn.Semaphore(0), spawn.Queue()
    arguments = (str(cifar), both, answers)
    workers = [spawn.Process(target=load_and_count, args=arguments, daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    counts, arrays = zip(*(answers.get(timeout=120) for _ in workers), strict=True)
    for worker in workers:
        worker.join(30)
    assert sorted(counts) == [0, 25]
    assert arrays[0] == arrays[1] == [array.tobytes() for pair in COLOUR for array in pair]
    assert not list(cache_directory().glob("*.part"))


def test_arrays_are_mapped_not_copied(cifar: Path):
    """Their addresses have the distances of their places in the file, and on Linux lie where it is mapped."""
    ff.load_dataset("cifar10", cifar)
    dataset = ff.load_dataset("cifar10", cifar)
    path = the_cache_file()
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    arrays = {
        "train_inputs": dataset.train[0],
        "train_labels": dataset.train[1],
        "test_inputs": dataset.test[0],
    }
    starts = {array.data_ptr() - header[name]["data_offsets"][0] for name, array in arrays.items()}
    assert len(starts) == 1
    if sys.platform == "linux":
        lines = [
            line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if path.name in line
        ]
        mapped = [tuple(int(end, 16) for end in line.split("-")) for line in lines]
        assert any(first <= dataset.train[0].data_ptr() < last for first, last in mapped)


def test_changing_a_loaded_array_does_not_change_the_cache(cifar: Path):
    ff.load_dataset("cifar10", cifar)
    ff.load_dataset("cifar10", cifar).train[0].zero_()
    assert_holds(ff.load_dataset("cifar10", cifar), *COLOUR)


# -- files that mean harm --------------------------------------------------------------------------


class Evil:
    """Unpickled carelessly, it calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "tar"])
@pytest.mark.parametrize("target", ["batches.meta", "data_batch_3", "test_batch"])
@pytest.mark.parametrize(
    "crime",
    [
        lambda path: Evil(os.system, f'echo > "{path}"'),
        lambda path: Evil(eval, f"open({str(path)!r}, 'w')"),
        lambda path: Evil(open, str(path), "w"),
        lambda path: Evil(np.savetxt, str(path), [1.0]),
        lambda path: Evil(np.ndarray.tofile, np.zeros(1), str(path)),
    ],
    ids=["system", "eval", "open", "numpy", "method"],
)
def test_a_pickle_that_runs_code_is_refused(crime, target: str, packed: bool, root: Path, tmp_path: Path):
    files = cifar_batches("cifar10", *COLOUR, LETTERS, python3)
    broken = tmp_path / "broken in"
    loot = {b"data": crime(broken), b"labels": [0], b"label_names": [b"a"]}
    files[target] = pickle.dumps(loot, protocol=4)
    pickle.loads(files[target])  # careless
    assert broken.exists()
    broken.unlink()
    if packed:
        pack_files(root / "cifar-10-python.tar.gz", "cifar-10-batches-py", files)
    else:
        put_files(root / "cifar-10-batches-py", files)
    sentence(lambda: ff.load_dataset("cifar10", root), root, target, "does not belong", "fetch it again")
    assert not broken.exists()


# -- files that are wrong --------------------------------------------------------------------------


def refused(name: str, place: Path, *says: str | Path) -> str:
    """Loading is refused with one sentence, and nothing wrong stays in the cache."""
    told = sentence(lambda: ff.load_dataset(name, place), *says)
    assert not list(cache_directory().glob("*.safetensors"))
    return told


@pytest.mark.parametrize(
    "damage", [cut, lambda _: b"", lambda _: b"PAR1 no more", flip(lambda c: len(c) - 20)]
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_corrupt_parquet(split: str, damage, cifar: Path):
    path = cifar / "cifar10" / f"{split}.parquet"
    path.write_bytes(damage(path.read_bytes()))
    refused("cifar10", cifar, path, "fetch it again")


def test_shards_that_do_not_belong_together(root: Path):
    folder = root / "cifar10"
    write_table(image_table(COLOUR[0]), folder / "train-00000-of-00002.parquet")
    write_table(image_table(COLOUR[0], label="fine_label"), folder / "train-00001-of-00002.parquet")
    write_table(image_table(COLOUR[1]), folder / "test-00000-of-00001.parquet")
    refused("cifar10", root, folder, "train-00001-of-00002.parquet")


def test_the_hub_s_notes_need_not_make_sense(root: Path):
    for split, arrays in zip(("train", "test"), COLOUR, strict=True):
        table = image_table(arrays).replace_schema_metadata({"huggingface": "{not json"})
        write_table(table, root / "cifar10" / f"{split}.parquet")
    assert_holds(ff.load_dataset("cifar10", root), *COLOUR)


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        ([0, -1, 2, 3], pa.int64()),
        ([0.0, 1.0, 2.0, 3.0], pa.float64()),
        ([0, None, 2, 3], pa.int64()),
        (["cat", "dog", "cat", "dog"], pa.string()),
    ],
    ids=["negative", "float", "missing", "words"],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_labels_that_are_no_class_numbers(split: str, labels: list[Any], kind, root: Path):
    good = image_table((COLOUR[0][0][:4], np.arange(4)))
    for name in ("train", "test"):
        table = good.set_column(1, "label", pa.array(labels, kind)) if name == split else good
        write_table(table, root / "cifar10" / f"{name}.parquet")
    refused("cifar10", root, root / "cifar10" / f"{split}.parquet", "'label'", "class numbers from 0")


def test_a_test_label_that_training_never_saw(root: Path):
    write_images(root / "cifar10", (COLOUR[0][0][:2], np.array([0, 1])), (COLOUR[1][0][:2], np.array([1, 7])))
    refused("cifar10", root, root / "cifar10" / "test.parquet", "label 7", "0 to 1")


def test_parquet_without_rows(root: Path):
    write_images(root / "cifar10", *COLOUR)
    path = root / "cifar10" / "test.parquet"
    write_table(image_table(COLOUR[1]).slice(0, 0), path)
    refused("cifar10", root, path)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("broken", ["text", "cut", "none"])
def test_a_broken_image_is_named_by_its_row(broken: str, split: str, cifar: Path):
    path = cifar / "cifar10" / f"{split}.parquet"
    table = image_table(COLOUR[0])
    cells = table["img"].to_pylist()
    content = {"text": b"no image", "cut": cells[3]["bytes"][:200], "none": None}[broken]
    cells[3] = {"bytes": content, "path": "3.png"}
    write_table(table.set_column(0, "img", pa.array(cells)), path)
    refused("cifar10", cifar, path, "row 3")


def test_images_of_several_sizes(root: Path):
    odd = image_table(samples(1, (31, 32, 3), 1))
    write_table(pa.concat_tables([image_table(COLOUR[0]), odd]), root / "cifar10" / "train.parquet")
    write_table(image_table(COLOUR[1]), root / "cifar10" / "test.parquet")
    refused("cifar10", root, root / "cifar10" / "train.parquet", "row 20", "32x31", "32x32")


@pytest.mark.parametrize(
    ("name", "table", "says"),
    [
        ("cifar10", image_table(COLOUR[0], image="imgs"), ["'img'", "Did you mean 'imgs'?"]),
        ("cifar10", image_table(COLOUR[0], label="labels"), ["'label'", "Did you mean 'labels'?"]),
        ("cifar100", image_table(COLOUR[0], label="label"), ["'fine_label'", "Did you mean 'label'?"]),
        ("ag-news", pa.table({"texts": ["a"], "label": [0]}), ["'text'", "Did you mean 'texts'?"]),
        (
            "shakespeare",
            pa.table({"client": ["a"], "text": [RICHARD]}),
            ["'client_id'", "Did you mean 'client'?"],
        ),
        (
            "office-home",
            pa.table({"image": [encoded(COLOUR[0][0][0])], "label": [0], "domains": ["Art"]}),
            ["'domain'", "Did you mean 'domains'?"],
        ),
    ],
    ids=["image", "label", "fine label", "text", "client", "domain"],
)
def test_a_missing_column_suggests_the_nearest(name: str, table: pa.Table, says: list[str], root: Path):
    for split in ("train", "test"):
        write_table(table, root / name.replace("-", "_") / f"{split}.parquet")
    refused(name, root, root / name.replace("-", "_") / "train.parquet", *says)


IMAGES = "t10k-images-idx3-ubyte"


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        (IMAGES, cut),
        (IMAGES, lambda content: content[:3]),
        (IMAGES, lambda content: b""),
        (IMAGES, lambda content: content + b"\0"),
        (IMAGES, lambda content: b"\0\0\x0d" + content[3:]),  # floats
        (IMAGES, lambda content: b"\x89PNG" + content[4:]),
        ("train-labels-idx1-ubyte", cut),
    ],
    ids=["cut", "header cut", "empty", "too long", "wrong type", "wrong magic", "labels cut"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])
def test_damaged_idx(file: str, damage, packed: bool, root: Path):
    folder = root / "fashion_mnist"
    write_idx(folder, *SMALL, packed=packed)
    path = folder / f"{file}{'.gz' if packed else ''}"
    content = path.read_bytes()
    path.write_bytes(gzip.compress(damage(gzip.decompress(content))) if packed else damage(content))
    refused("fashion-mnist", root, path, "fetch it again")


@pytest.mark.parametrize("damage", [cut, flip(lambda c: len(c) // 2), lambda c: b"not gzip"])
def test_damaged_gzip(damage, root: Path):
    write_idx(root / "fashion_mnist", *SMALL, packed=True)
    path = root / "fashion_mnist" / f"{IMAGES}.gz"
    path.write_bytes(damage(path.read_bytes()))
    refused("fashion-mnist", root, path, "fetch it again")


def test_idx_with_more_images_than_labels(root: Path):
    folder = root / "fashion_mnist"
    write_idx(folder, *SMALL)
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(SMALL[1][1][:-1]))
    refused("fashion-mnist", root, folder / IMAGES, "t10k-labels-idx1-ubyte", "5", "4")


@pytest.mark.parametrize("file", ["batches.meta", "data_batch_2"])
@pytest.mark.parametrize(
    "damage",
    [
        cut,
        lambda _: b"",
        lambda _: pickle.dumps([1]),
        lambda _: pickle.dumps({b"x": 1}),
        lambda c: c[1:],
        lambda _: b"0.",  # takes from an empty stack
        lambda _: b"(dr\xff\xff\xff\x3f.",  # a memo of a thousand million entries
        lambda _: b"cnumpy\ndtype\n(S'zz'\ntR.",
        lambda _: b"cnumpy\nndarray\n(tR}b.",
        lambda _: b"(" * 100_000 + b"t" * 100_000 + b".",
    ],
)
def test_damaged_cifar_batches(file: str, damage, root: Path):
    files = cifar_batches("cifar10", *COLOUR, LETTERS, python2)
    put_files(root / "cifar-10-batches-py", {**files, file: damage(files[file])})
    refused("cifar10", root, root / "cifar-10-batches-py", file, "cannot be read", "fetch it again")


@pytest.mark.parametrize(
    "change",
    [
        {b"data": None},
        {b"data": "words"},
        {b"data": np.zeros((4, 3072))},
        {b"data": np.full((4, 3072), 256)},
        {b"data": np.zeros((2, 6144), np.uint8)},
        {b"data": np.zeros((4, 3072), object)},
        {b"data": [[0] * 3072] * 3 + [[0]]},
        {b"data": Evil(np.ndarray, (1,), np.dtype("O"), bytes(8))},  # an object anywhere in memory
        {b"labels": None},
        {b"labels": 3},
        {b"labels": [0.5] * 4},
        {b"labels": [0, 1, 2, -1]},
        {b"labels": [0, 1, 2, 10]},
        {b"labels": [[0], [1], [2], [3]]},
        {b"labels": []},
    ],
    ids=lambda change: repr(change)[:24],
)
def test_cifar_batches_of_other_things(change: dict[bytes, Any], root: Path):
    batches: dict[str, Any] = cifar_batches("cifar10", *COLOUR, LETTERS, dump=lambda content: content)
    batches["data_batch_2"].update(change)
    put_files(root / "cifar-10-batches-py", {name: python3(batch) for name, batch in batches.items()})
    refused("cifar10", root, root / "cifar-10-batches-py", "data_batch_2", "cannot be read", "fetch it again")


@pytest.mark.parametrize("names", [[b"a"], None, 3, ["a"] * 10, [b"a"] * 10, [b"\xff", *LETTERS[1:]]])
def test_cifar_with_other_names_of_classes(names: Any, root: Path):
    files = cifar_batches("cifar10", *COLOUR, LETTERS, python3)
    put_files(root / "cifar-10-batches-py", {**files, "batches.meta": python3({b"label_names": names})})
    refused("cifar10", root, root / "cifar-10-batches-py", "batches.meta", "cannot be read", "10 classes")


def test_a_packed_batch_of_absurd_size_is_refused(root: Path):
    path = root / "cifar-10-python.tar.gz"
    with gzip.open(path, "wb") as file:
        member = tarfile.TarInfo("cifar-10-batches-py/batches.meta")
        member.size = 1 << 50
        file.write(member.tobuf())
    refused("cifar10", root, path, "batches.meta", "cannot be read")


@pytest.mark.parametrize(
    "damage", [cut, flip(lambda c: len(c) // 2), lambda c: b"not a tar file", lambda c: b""]
)
def test_damaged_cifar_archive(damage, root: Path):
    files = cifar_batches("cifar10", *COLOUR, LETTERS, python2)
    path = pack_files(root / "cifar-10-python.tar.gz", "cifar-10-batches-py", files)
    path.write_bytes(damage(path.read_bytes()))
    refused("cifar10", root, path, "fetch it again")


def test_cifar_with_more_images_than_labels(root: Path):
    batches: dict[str, Any] = cifar_batches("cifar10", *COLOUR, LETTERS, dump=lambda content: content)
    batches["data_batch_2"][b"labels"].pop()
    put_files(root / "cifar-10-batches-py", {name: python2(batch) for name, batch in batches.items()})
    refused("cifar10", root, root / "cifar-10-batches-py", "data_batch_2")


def test_cifar_archive_without_a_batch(root: Path):
    files = cifar_batches("cifar10", *COLOUR, LETTERS, python2)
    del files["data_batch_4"]
    path = pack_files(root / "cifar-10-python.tar.gz", "cifar-10-batches-py", files)
    refused("cifar10", root, path, "data_batch_4", "fetch it again")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ["empty"]),
        (b'"World","title","text"\n', ["line 1", "World", "class from 1"]),
        (b'"1","title","text"\n"0","title","text"\n', ["line 2", "'0'", "class from 1"]),
        (b'"1","title","text"\n"-2","title","text"\n', ["line 2", "'-2'"]),
        (b'"1.5","title","text"\n', ["line 1", "'1.5'"]),
        (b'"\xc2\xb2","title","text"\n', ["line 1", "'²'"]),
        (b'"1' + b"0" * 5000 + b'","title","text"\n', ["line 1"]),
        (b'"1"\n', ["line 1", "a title and a text"]),
        (b'"1","caf\xe9","text"\n', ["UTF-8"]),
    ],
    ids=["empty", "word", "zero", "negative", "fraction", "square", "huge", "class only", "latin 1"],
)
def test_bad_news(content: bytes, says: list[str], root: Path):
    write_news(root / "ag_news", *NEWS)
    path = root / "ag_news" / "train.csv"
    path.write_bytes(content)
    refused("ag-news", root, path, *says)


@pytest.mark.parametrize(
    "content", [b"", b"[1, 2]", b'{"users": []}', b'{"user_data": []}', b"\xff\xfe", b'{"user']
)
def test_bad_leaf_files(content: bytes, root: Path):
    put_files(root / "shakespeare" / "train", {"a.json": content})
    put_files(root / "shakespeare" / "test", {"b.json": content})
    refused("shakespeare", root, root / "shakespeare" / "train" / "a.json", "fetch it again")


@pytest.mark.parametrize(("name", "other"), [("ag-news", "label"), ("shakespeare", "client_id")])
def test_a_text_that_is_missing_is_not_the_word_none(name: str, other: str, root: Path):
    table = pa.table({"text": [RICHARD, ANNE, None, LATER], other: [0, 1, 2, 3]})
    for split in ("train", "test"):
        write_table(table, root / name.replace("-", "_") / f"{split}.parquet")
    refused(name, root, root / name.replace("-", "_") / "train.parquet", "'text'", "row 2")


@pytest.mark.parametrize("who", [None, " "])
def test_a_role_that_is_missing_is_no_client(who: str | None, root: Path):
    table = pa.table({"text": [RICHARD, ANNE, LATER], "client_id": ["R", who, "A"]})
    for split in ("train", "test"):
        write_table(table, root / "shakespeare" / f"{split}.parquet")
    refused("shakespeare", root, root / "shakespeare" / "train.parquet", "'client_id'", "row 1")


def test_leaf_windows_that_do_not_follow_each_other(root: Path):
    """They are no text; to take them for one would make up sentences."""
    put_files(root / "shakespeare" / "train", {"a.json": leaf({"ANNE": ANNE}, shuffled=True)})
    put_files(root / "shakespeare" / "test", {"b.json": leaf({"ANNE": LATER})})
    refused("shakespeare", root, root / "shakespeare" / "train" / "a.json", "ANNE")


@pytest.mark.parametrize("short", ["train", "test", "both"])
def test_shakespeare_without_a_single_window(short: str, root: Path):
    for split in ("train", "test"):
        text = "Stay" if short in (split, "both") else RICHARD
        write_table(pa.table({"client_id": ["R"], "text": [text]}), root / "shakespeare" / f"{split}.parquet")
    refused("shakespeare", root, "80 characters")


def test_a_bad_image_in_a_folder_is_named(root: Path):
    for split in ("train", "test"):
        write_image(root / "cinic10" / split / "cat" / "1.png", COLOUR[0][0][0])
    bad = root / "cinic10" / "test" / "cat" / "2.png"
    bad.write_bytes(b"no image")
    refused("cinic10", root, bad, "remove or replace it")


def test_a_class_folder_that_only_testing_has(root: Path):
    write_image(root / "cinic10" / "train" / "cat" / "1.png", COLOUR[0][0][0])
    write_image(root / "cinic10" / "test" / "dog" / "1.png", COLOUR[0][0][0])
    refused("cinic10", root, root / "cinic10" / "test", "'dog'")


def test_a_validation_image_that_is_not_there(root: Path):
    folder = root / "tiny-imagenet-200"
    write_image(folder / "train" / "n01" / "images" / "n01_0.JPEG", COLOUR[0][0][0])
    (folder / "val").mkdir()
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\t0\t0\t62\t62\n")
    refused("tiny-imagenet", root, folder / "val" / "images" / "val_0.JPEG")


@pytest.mark.parametrize(("module", "package"), [("PIL", "Pillow"), ("pyarrow", "pyarrow")])
def test_without_an_optional_package_its_extra_is_named(module: str, package: str, cifar: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra) as caught:
        ff.load_dataset("cifar10", cifar)
    assert package in str(caught.value)
    assert 'pip install "fedflat[data]"' in str(caught.value)


def test_without_pillow_a_folder_of_images_names_the_extra(root: Path, monkeypatch):
    for split in ("train", "test"):
        write_image(root / "cinic10" / split / "cat" / "1.png", COLOUR[0][0][0])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"Pillow.*fedflat\[data\]"):
        ff.load_dataset("cinic10", root)


# -- real data -------------------------------------------------------------------------------------

real = pytest.mark.skipif(
    not SHARED.is_dir(), reason="no folder shared/data with real datasets beside the repository"
)


@pytest.fixture(scope="session")
def real_cache(tmp_path_factory) -> Path:
    """One cache for all tests on real data, also those in other worker processes."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "real-cache"


@pytest.fixture
def load(real_cache: Path, monkeypatch) -> Callable[[str], ff.Dataset]:
    """Load a real dataset."""
    monkeypatch.setenv("FEDFLAT_CACHE", str(real_cache))
    return lambda name: ff.load_dataset(name, SHARED)


@pytest.mark.slow
@real
@pytest.mark.parametrize(
    ("name", "shape", "train", "test", "classes", "near"),
    [
        ("fashion-mnist", (28, 28, 1), 6000, 1000, 10, 0.02),
        ("cifar10", (32, 32, 3), 5000, 1000, 10, 0.02),
        (
            "tiny-imagenet",
            (64, 64, 3),
            200,
            50,
            20,
            0.15,
        ),  # a tenth of the classes, hence not quite normalised
    ],
)
def test_real_images(name: str, shape, train: int, test: int, classes: int, near: float, load):
    """Shapes, equally many of every class, and zero mean and unit deviation of every channel."""
    dataset = load(name)
    assert dataset.train[0].shape == (train * classes, *shape)
    assert dataset.test[0].shape == (test * classes, *shape)
    assert torch.bincount(dataset.train[1]).tolist() == [train] * classes
    assert torch.bincount(dataset.test[1]).tolist() == [test] * classes
    assert len(set(dataset.class_names)) == classes
    part = "a part: 4,000 of 100,000 training samples, 1,000 of 10,000 test samples, 20 of 200 classes"
    assert [part in sentence for sentence in dataset.caveats] == ([True] if name == "tiny-imagenet" else [])
    prepared = dataset.pipeline.test(dataset.train[0][::10]).double()
    mean, deviation = prepared.mean((0, 2, 3)), prepared.std((0, 2, 3))
    assert mean.abs().max() < near
    assert (deviation - 1).abs().max() < near


@pytest.mark.slow
@real
def test_real_images_are_the_files_images(load):
    dataset = load("cifar10")
    table = pq.read_table(SHARED / "cifar10" / "test.parquet")
    for row in (0, 1234, 9999):
        image = Image.open(io.BytesIO(table["img"][row]["bytes"].as_py()))
        np.testing.assert_array_equal(dataset.test[0][row].numpy(), np.asarray(image))
    assert dataset.test[1].tolist() == table["label"].to_pylist()
    assert dataset.class_names[:3] == ("airplane", "automobile", "bird")


TORCHTEXT = (
    ("'", " '  "), ('"', ""), (".", " . "), ("<br />", " "), (",", " , "), ("(", " ( "), (")", " ) "),
    ("!", " ! "), ("?", " ? "), (";", " "), (":", " "),
)  # fmt: skip


def torchtext_english(text: str) -> list[str]:
    """The basic English tokeniser as torchtext has it: one replacement after the other."""
    text = text.lower()
    for mark, replacement in TORCHTEXT:
        text = text.replace(mark, replacement)
    return text.split()


@pytest.mark.slow
@real
def test_real_news(load):
    """Every row is its text, tokenised and numbered as described, cut or padded to 200."""
    dataset = load("ag-news")
    assert torch.bincount(dataset.train[1]).tolist() == [12_800] * 4
    assert torch.bincount(dataset.test[1]).tolist() == [1_900] * 4
    texts = [
        pq.read_table(SHARED / "ag_news" / f"{split}.parquet")["text"].to_pylist()
        for split in ("train", "test")
    ]
    tokens = [[torchtext_english(text) for text in part] for part in texts]
    counts = Counter(word for part in tokens for words in part for word in words)
    assert dataset.vocabulary == len(counts) + 1
    words = ["", *sorted(counts, key=lambda word: (-counts[word], word))]
    for (rows, _), part in zip((dataset.train, dataset.test), tokens, strict=True):
        assert rows.shape == (len(part), LENGTH)
        lengths = [min(len(text), LENGTH) for text in part]
        assert (rows > 0).sum(1).tolist() == lengths
        longest = max(range(len(part)), key=lambda number: len(part[number]))
        for number in (0, 17, longest, len(part) - 1):
            assert [words[token] for token in rows[number, : lengths[number]]] == part[number][:LENGTH]
            assert not rows[number, lengths[number] :].any()


def real_texts(split: str) -> dict[str, str]:
    """Everything a role says, by role, read without the library."""
    table = pq.read_table(SHARED / "shakespeare" / f"{split}.parquet")
    spoken: dict[str, list[str]] = {}
    for role, text in zip(table["client_id"].to_pylist(), table["text"].to_pylist(), strict=True):
        spoken.setdefault(role, []).append(text)
    return {role: "\n".join(parts) for role, parts in sorted(spoken.items())}


@pytest.mark.slow
@real
def test_real_shakespeare(load):
    """Inputs spell each role's text, targets are the characters after, clients are the roles."""
    dataset = load("shakespeare")
    texts = {role: text for role, text in real_texts("train").items() if len(text) > 80}
    assert len(texts) > 900
    assert dataset.group_names == tuple(texts)
    federation = ff.federate(dataset, ff.ByUser(), clients=None)
    assert federation.sizes == [len(text) - 80 for text in texts.values()]
    numbers = {character: number for number, character in enumerate(CHARACTERS, start=1)}
    unknown = 0
    for client, text in enumerate(texts.values()):
        inputs, targets = federation.client(client).stored()
        wanted = torch.tensor([numbers.get(character, 0) for character in text])
        assert targets.equal(wanted[80:])
        assert inputs[0].long().equal(wanted[:80])
        assert inputs[:, -1].long().equal(wanted[79:-1])
        assert inputs[-1].long().equal(wanted[-81:-1])
        unknown += int((wanted == 0).sum())
    assert unknown < 0.001 * sum(map(len, texts.values()))
    chosen = ff.federate(dataset, ff.ByUser(), clients=7, seed=3)
    assert len(chosen) == 7 and set(chosen.sizes) <= set(federation.sizes)


@pytest.mark.slow
@real
def test_real_shakespeare_s_test_windows_are_what_a_role_says(load):
    inputs, targets = load("shakespeare").test
    assert len(targets) > 3000
    everything = "|".join(real_texts("test").values())
    spoken = "".join(character if character in CHARACTERS else "\0" for character in everything)
    for number in range(0, len(targets), 50):
        assert spelled(inputs[number]) + spelled(targets[number : number + 1]) in spoken


@pytest.mark.slow
@real
def test_real_images_train(load):
    federation = ff.federate(load("fashion-mnist"), ff.Dirichlet(0.5), clients=20)
    local = ff.LocalSGD(lr=0.1, steps=20, batch_size=50)
    run = ff.train(federation, "mlp", "fedsam", local, participation=5, rounds=4, eval_every=4)
    assert run.accuracy > 0.6


@pytest.mark.slow
@real
@pytest.mark.parametrize(("name", "model"), [("ag-news", "fasttext"), ("shakespeare", "char-lstm")])
def test_real_text_fits_its_model(name: str, model: str, load):
    """An untrained model guesses: its loss is the logarithm of the number of classes."""
    dataset = load(name)
    dataset = replace(dataset, test=(dataset.test[0][:50], dataset.test[1][:50]), test_groups=None)
    federation = ff.federate(dataset, ff.IID(), clients=1000)
    local = ff.LocalSGD(lr=1e-6, steps=1, batch_size=20)
    run = ff.train(federation, model, "fedavg", local, participation=1, rounds=1)
    assert run.history[0]["train_loss"] == pytest.approx(np.log(dataset.classes), rel=0.1)
    assert run.history[0]["loss"] == pytest.approx(np.log(dataset.classes), rel=0.1)
