"""The papers' datasets: where each may lie, in which forms, and how it is prepared."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ..core.randomness import generator
from ..errors import FedflatError
from .augmentation import Images, Plain
from .cache import Stored
from .caveats import copy_caveats
from .dataset import Dataset
from .digits import DEVIATION, MEAN, load_digits
from .loading import Found, Source, store
from .preprocessing import of_images
from .readers import Split
from .readers.cifar import BATCHES, read_cifar
from .readers.idx import find_idx, read_idx
from .readers.images import class_folders, decode_images, list_images, read_folder
from .readers.parquet import find_parquet, read_image_split
from .readers.speeches import Speeches, read_leaf, read_speeches
from .readers.tables import read_news_csv, read_text_split
from .text import CHARACTERS, basic_english, encode_characters, encode_words, vocabulary

WINDOW = 80
"""Characters from which the next is predicted (LEAF's setting)."""

Finder = Callable[[Path], Found | None]


def _parquet_images(
    labels: list[str],
    size: tuple[int, int] | None,
    channels: int,
    groups: str | None = None,
    test: str = "test",
) -> Finder:
    """Find and read train and test Parquet files of images."""

    def find(folder: Path) -> Found | None:
        train = find_parquet(folder, "train")
        held = next((f for s in (test, "test", "validation", "valid") if (f := find_parquet(folder, s))), [])
        if not train or not held:
            return None

        def decode() -> Stored:
            splits = [read_image_split(files, labels, size, channels, groups) for files in (train, held)]
            return store(splits[0], splits[1])

        return Found([*train, *held], decode)

    return find


def _class_folders(train: str, test: list[str], size: tuple[int, int] | None) -> Finder:
    """Find and read image folders `train/CLASS` and `test/CLASS`."""

    def find(folder: Path) -> Found | None:
        classes = class_folders(folder / train)
        held = next((folder / name for name in test if class_folders(folder / name)), None)
        if not classes or held is None:
            return None
        return Found(
            [folder / train, held],
            lambda: store(read_folder(folder / train, classes, size, 3), read_folder(held, classes, size, 3)),
        )

    return find


def _first(*finders: Finder) -> Finder:
    """The first form that is there."""
    return lambda folder: next((found for find in finders if (found := find(folder)) is not None), None)


def _images(name: str, mean: tuple[float, ...], std: tuple[float, ...]) -> Callable[..., Dataset]:
    """Build an image dataset from stored arrays."""

    def build(stored: Stored) -> Dataset:
        arrays, texts = stored
        classes = int(arrays["train_labels"].max()) + 1
        groups, test_groups = arrays.get("train_groups"), arrays.get("test_groups")
        return Dataset(
            name,
            (arrays["train_inputs"], arrays["train_labels"]),
            (arrays["test_inputs"], arrays["test_labels"]),
            classes,
            Images(mean, std),
            "crop-flip" if len(mean) == 3 else "none",
            tuple(json.loads(texts["class_names"])),
            None if groups is None else groups.numpy(),
            tuple(json.loads(texts["group_names"])),
            None if test_groups is None else test_groups.numpy(),
            caveats=copy_caveats(
                name, len(arrays["train_labels"]), len(arrays["test_labels"]), classes, texts["lossy"]
            ),
        )

    return build


# -- CIFAR, Fashion-MNIST, CINIC-10 ----------------------------------------------------------------


def _cifar_batches(name: str, archive: str) -> Finder:
    def find(folder: Path) -> Found | None:
        train, test, meta = BATCHES[name]
        files = [folder / batch for batch in (*train, *test, meta)]
        if all(path.is_file() for path in files):
            return Found(files, lambda: store(*read_cifar(name, folder)))
        packed = folder / archive
        return Found([packed], lambda: store(*read_cifar(name, packed))) if packed.is_file() else None

    return find


def _decode_idx(files: list[Path]) -> Stored:
    return store(*read_idx(files))


def _idx(folder: Path) -> Found | None:
    for place in (folder, folder / "raw"):
        files = find_idx(place)
        if files is not None:
            return Found(files, partial(_decode_idx, files))
    return None


# -- Tiny-ImageNet and Office-Home -----------------------------------------------------------------


def _tiny_imagenet_folders(folder: Path) -> Found | None:
    """`train/WNID/images/*.JPEG` and `val/images` with `val_annotations.txt`, as distributed."""
    notes = folder / "val" / "val_annotations.txt"
    classes = class_folders(folder / "train")
    if not classes or not notes.is_file():
        return None

    def decode() -> Stored:
        rows = [line.split("\t")[:2] for line in notes.read_text().splitlines()]
        number = {name: label for label, name in enumerate(classes)}
        known = [(name, number[wnid]) for name, wnid in rows if wnid in number]
        paths = [folder / "val" / "images" / name for name, _ in known]
        images = decode_images(((str(p), p) for p in paths), len(paths), (64, 64), 3)
        held = Split(images, np.array([label for _, label in known], dtype=np.int64))
        return store(read_folder(folder / "train", classes, (64, 64), 3), held)

    return Found([folder / "train", notes, *(p for p in [folder / "val" / "images"] if p.is_dir())], decode)


OFFICE_DOMAINS = ("Art", "Clipart", "Product", "Real World")
OFFICE_SIZE = (224, 224)


def _hold_out(everything: Split, fraction: float = 0.1) -> tuple[Split, Split]:
    """Keep a fixed tenth of the samples for testing: the published data has no test split."""
    inputs, owners = np.asarray(everything.inputs), np.array(everything.groups)
    held = generator(0, "office-home test").random(len(everything.labels)) < fraction

    def part(chosen: np.ndarray) -> Split:
        return Split(
            inputs[chosen],
            everything.labels[chosen],
            owners[chosen].tolist(),
            everything.class_names,
            everything.lossy,
        )

    return part(~held), part(held)


def _office_folders(folder: Path) -> Found | None:
    """`Art/CLASS`, `Clipart/CLASS`, `Product/CLASS`, `Real World/CLASS`."""
    names = {
        domain: next((f for f in (domain, domain.replace(" ", "_")) if class_folders(folder / f)), None)
        for domain in OFFICE_DOMAINS
    }
    if any(place is None for place in names.values()):
        return None

    def decode() -> Stored:
        classes = sorted({c for place in names.values() for c in class_folders(folder / str(place))})
        paths, labels, owners = [], [], []
        for domain, place in names.items():
            for label, name in enumerate(classes):
                found = (
                    list_images(folder / str(place) / name) if (folder / str(place) / name).is_dir() else []
                )
                paths += found
                labels += [label] * len(found)
                owners += [domain] * len(found)
        images = decode_images(((str(p), p) for p in paths), len(paths), OFFICE_SIZE, 3)
        return store(*_hold_out(Split(images, np.array(labels, dtype=np.int64), owners, classes)))

    return Found([folder / str(place) for place in names.values()], decode)


def _office_parquet(folder: Path) -> Found | None:
    """One training split with a `domain` column."""
    files = find_parquet(folder, "train")
    if not files:
        return None
    return Found(
        files, lambda: store(*_hold_out(read_image_split(files, ["label"], OFFICE_SIZE, 3, "domain")))
    )


# -- AG News ---------------------------------------------------------------------------------------


def _news(folder: Path) -> Found | None:
    def both(train: Split, test: Split) -> Stored:
        words = [[basic_english(text) for text in split.inputs] for split in (train, test)]
        numbers = vocabulary(text for part in words for text in part)
        encoded = [encode_words(part, numbers) for part in words]
        splits = [Split(e, s.labels) for e, s in zip(encoded, (train, test), strict=True)]
        arrays, texts = store(splits[0], splits[1])
        return arrays, {**texts, "vocabulary": str(len(numbers) + 1)}

    train, test = find_parquet(folder, "train"), find_parquet(folder, "test")
    if train and test:
        files = [*train, *test]
        return Found(files, lambda: both(read_text_split(train, ["label"]), read_text_split(test, ["label"])))
    rows = [folder / "train.csv", folder / "test.csv"]
    if all(path.is_file() for path in rows):
        return Found(rows, lambda: both(read_news_csv(rows[0]), read_news_csv(rows[1])))
    return None


def _build_news(stored: Stored) -> Dataset:
    arrays, texts = stored
    classes = int(arrays["train_labels"].max()) + 1
    return Dataset(
        "ag-news",
        (arrays["train_inputs"], arrays["train_labels"]),
        (arrays["test_inputs"], arrays["test_labels"]),
        classes=classes,
        pipeline=Plain(tokens=True),
        class_names=("World", "Sports", "Business", "Sci/Tech"),
        vocabulary=int(texts["vocabulary"]),
        caveats=copy_caveats("ag-news", len(arrays["train_labels"]), len(arrays["test_labels"]), classes),
    )


# -- Shakespeare -----------------------------------------------------------------------------------


def _speeches(folder: Path) -> Found | None:
    def both(train: Speeches, test: Speeches) -> Stored:
        roles = sorted(role for role, text in train.items() if len(text) > WINDOW)
        if not roles or all(len(test.get(role, "")) <= WINDOW for role in roles):
            raise FedflatError(
                f"{folder}: no role says more than {WINDOW} characters in training and in testing."
            )
        arrays = {}
        for name, spoken in (("train", train), ("test", test)):
            texts = [encode_characters(spoken.get(role, "")) for role in roles]
            arrays[f"{name}_text"] = torch.from_numpy(np.concatenate(texts))
            arrays[f"{name}_lengths"] = torch.tensor([len(text) for text in texts])
        return arrays, {"roles": json.dumps(roles)}

    train, test = find_parquet(folder, "train"), find_parquet(folder, "test")
    if train and test:
        return Found([*train, *test], lambda: both(read_speeches(train), read_speeches(test)))
    leaf = [sorted((folder / "data" / split).glob("*.json")) for split in ("train", "test")]
    leaf = leaf if all(leaf) else [sorted((folder / split).glob("*.json")) for split in ("train", "test")]
    if all(leaf):
        return Found([*leaf[0], *leaf[1]], lambda: both(read_leaf(leaf[0]), read_leaf(leaf[1])))
    return None


def _build_speeches(stored: Stored) -> Dataset:
    """Every position is a sample: the 80 characters before it and the one there, windows that share one text."""
    arrays, texts = stored
    train, rows, owners = _windows(arrays["train_text"], arrays["train_lengths"], stride=1)
    test, held, speakers = _windows(arrays["test_text"], arrays["test_lengths"], stride=2 * WINDOW)
    chosen = torch.from_numpy(held)
    return Dataset(
        "shakespeare",
        train,
        (test[0][chosen], test[1][chosen]),
        classes=len(CHARACTERS) + 1,
        pipeline=Plain(tokens=True),
        groups=owners,
        group_names=tuple(json.loads(texts["roles"])),
        test_groups=speakers,
        rows=rows,
        vocabulary=len(CHARACTERS) + 1,
        preparation={"kind": "text", "shape": [WINDOW], "characters": CHARACTERS},
    )


def _windows(
    text: torch.Tensor, lengths: torch.Tensor, stride: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], np.ndarray, np.ndarray]:
    """Inputs as overlapping views of one text, the next characters, and which rows lie within one role."""
    ends = np.cumsum(lengths.numpy())
    starts = ends - lengths.numpy()
    rows = [np.arange(start, end - WINDOW, stride) for start, end in zip(starts, ends, strict=True)]
    owners = np.repeat(np.arange(len(rows)), [len(r) for r in rows])
    inputs = text[:-1].unfold(0, WINDOW, 1)
    return (inputs, text[WINDOW:].long()), np.concatenate(rows), owners


# -- the catalogue ---------------------------------------------------------------------------------

_PARQUET = "train and test Parquet files as on the Hugging Face hub"

SOURCES = {
    source.name: source
    for source in (
        Source(
            "cifar10",
            ("cifar10", "cifar-10", "CIFAR10", "cifar-10-batches-py", "."),
            f"{_PARQUET}, the folder cifar-10-batches-py or cifar-10-python.tar.gz",
            "uoft-cs/cifar10",
            _first(_parquet_images(["label"], None, 3), _cifar_batches("cifar10", "cifar-10-python.tar.gz")),
            _images("cifar10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
            "Its author distributes it at the University of Toronto.",
        ),
        Source(
            "cifar100",
            ("cifar100", "cifar-100", "CIFAR100", "cifar-100-python", "."),
            f"{_PARQUET}, the folder cifar-100-python or cifar-100-python.tar.gz",
            "uoft-cs/cifar100",
            _first(
                _parquet_images(["fine_label"], None, 3),
                _cifar_batches("cifar100", "cifar-100-python.tar.gz"),
            ),
            _images("cifar100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
            "Its author distributes it at the University of Toronto.",
        ),
        Source(
            "fashion-mnist",
            ("fashion_mnist", "fashion-mnist", "FashionMNIST", "FashionMNIST/raw"),
            f"{_PARQUET} or the four IDX files, plain or gzipped",
            "zalando-datasets/fashion_mnist",
            _first(_parquet_images(["label"], None, 1), _idx),
            _images("fashion-mnist", (0.2860,), (0.3530,)),
            "Zalando Research distributes it; Debian has it as the package dataset-fashion-mnist.",
        ),
        Source(
            "cinic10",
            ("cinic10", "cinic-10", "CINIC-10"),
            f"{_PARQUET} or the folders train and test with a folder per class",
            "flwrlabs/cinic10",
            _first(_parquet_images(["label"], (32, 32), 3), _class_folders("train", ["test"], (32, 32))),
            _images("cinic10", (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)),
            "The University of Edinburgh distributes it.",
        ),
        Source(
            "tiny-imagenet",
            ("tiny-imagenet-200", "tiny_imagenet", "tiny-imagenet", "tiny_imagenet_20"),
            f"{_PARQUET} or the folder tiny-imagenet-200 with train and val",
            "zh-plus/tiny-imagenet",
            _first(
                _parquet_images(["label"], (64, 64), 3, test="valid"),
                _tiny_imagenet_folders,
                _class_folders("train", ["val", "test"], (64, 64)),
            ),
            _images("tiny-imagenet", (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
            "Stanford's course CS231n distributes it.",
        ),
        Source(
            "office-home",
            ("office_home", "office-home", "OfficeHome", "OfficeHomeDataset_10072016"),
            "one training Parquet file with a domain column, or the folders Art, Clipart, Product and Real World",
            "flwrlabs/office-home",
            _first(_office_folders, _office_parquet),
            _images("office-home", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            "Its authors distribute it on the site of the hashing paper it came with.",
        ),
        Source(
            "ag-news",
            ("ag_news", "ag-news", "AG_NEWS", "ag_news_csv"),
            f"{_PARQUET} or train.csv and test.csv",
            "fancyzhx/ag_news",
            _news,
            _build_news,
            "It came with the paper on character-level convolutional networks of Zhang, Zhao and LeCun.",
        ),
        Source(
            "shakespeare",
            ("shakespeare",),
            "train and test Parquet files with the columns client_id and text, or LEAF's json files",
            "",
            _speeches,
            _build_speeches,
            "LEAF prepares it from the Project Gutenberg texts.",
        ),
    )
}


def digits() -> Dataset:
    """The packaged digits."""
    train, test = load_digits()
    return Dataset(
        "digits",
        train,
        test,
        classes=10,
        class_names=tuple("0123456789"),
        preparation=of_images((8, 8, 1), 1, (MEAN,), (DEVIATION,)),
    )
