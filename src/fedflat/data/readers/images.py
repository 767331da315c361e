"""Encoded images: from bytes, or folders with a class each, to arrays of one size."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import FedflatError, MissingExtra, explained, reason_of
from . import Split

ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""What may be in an encoded image, whatever its name: for some other formats Pillow starts other programs."""
LARGEST = 100_000_000
"""Pixels of an image, beyond which it is no sample: a few bytes can claim to be as large as the memory."""


def decode_images(
    sources: Iterable[tuple[str, bytes | Path]], count: int, size: tuple[int, int] | None, channels: int
) -> np.ndarray:
    """All images as bytes (count, height, width, channels); `size` resizes, None keeps the first image's."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra("Pillow", "data", "Reading images") from None
    result: np.ndarray | None = None
    for number, (name, source) in enumerate(sources):
        image = _decoded(name, source, size, count, channels)
        if size is not None and image.size != (size[1], size[0]):
            image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        if result is None:
            result = np.empty((count, image.height, image.width, channels), dtype=np.uint8)
        pixels = np.asarray(image, dtype=np.uint8).reshape(image.height, image.width, channels)
        if pixels.shape != result.shape[1:]:
            raise FedflatError(
                f"{name} is {image.width}x{image.height}, the first image "
                f"{result.shape[2]}x{result.shape[1]}; give a size to which all are resized (--image-size)."
            )
        result[number] = pixels
    if result is None:
        raise FedflatError("There are no images to read.")
    return result


def _decoded(name: str, source: bytes | Path, size: tuple[int, int] | None, count: int, channels: int) -> Any:
    """One image of many, in grey or in colour, with 8 bits; not resized yet."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # it is refused below
            warnings.filterwarnings("error", "Truncated File Read")
            file = io.BytesIO(source) if isinstance(source, bytes) else source
            with Image.open(file, formats=FORMATS) as opened:
                _check_size(name, opened.size, size, count, channels)
                return _eight_bits(opened).convert("L" if channels == 1 else "RGB")
    except FedflatError:
        raise
    except Image.DecompressionBombError:
        raise FedflatError(f"{name} has far too many pixels for a sample; shrink or remove it.") from None
    except Exception as problem:  # a damaged file can make a decoder stumble anywhere
        raise FedflatError(
            f"{name} is no readable image ({reason_of(problem)}); remove or replace it."
        ) from None


def _check_size(
    name: str, found: tuple[int, int], size: tuple[int, int] | None, count: int, channels: int
) -> None:
    """Whether an image, and as many of its size as are read, can be held in memory, before it is decoded."""
    width, height = found
    if width * height > LARGEST:
        raise FedflatError(
            f"{name} has {width:,} x {height:,} pixels, far too many for a sample; shrink or remove it."
        )
    rows, columns = size if size is not None else (height, width)
    needed = count * rows * columns * channels
    if needed > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        images = f"{count:,} image{'s' if count != 1 else ''} of {columns:,} x {rows:,} pixels"
        raise FedflatError(
            f"{name}: {images} take {needed / 1e9:,.0f} GB, more than this machine's memory; give a smaller size to "
            "which all are resized (--image-size)."
        )


def _eight_bits(image: Any) -> Any:
    """An image of 16 bits scaled from 0–65535 to 0–255, where Pillow would cut off all that is above 255."""
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are floats of an unknown range: save it with 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image
    pixels = np.asarray(image).astype(np.int64)
    if pixels.min() < 0 or pixels.max() > 65535:
        raise ValueError("its pixels are beyond 16 bits: save it with 8 or 16")
    return Image.fromarray(((pixels * 255 + 32767) // 65535).astype(np.uint8))


def noting_loss(
    sources: Iterable[tuple[str, bytes | Path]], lossy: set[str]
) -> Iterator[tuple[str, bytes | Path]]:
    """The same images; encodings that change pixels are added to `lossy`."""
    for name, source in sources:
        if (found := _lossy_encoding(source)) is not None:
            lossy.add(found)
        yield name, source


def _lossy_encoding(source: bytes | Path) -> str | None:
    """JPEG, or WebP of the kind that changes pixels, by how the file begins; None for any other."""
    if isinstance(source, Path):
        with explained(f"{source} cannot be read"), source.open("rb") as file:
            head = file.read(64)
    else:
        head = source[:64]
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    return "lossy WebP" if head[8:12] == b"WEBP" and b"VP8 " in head else None


def list_images(folder: Path) -> list[Path]:
    """The images directly in a folder or in its `images` subfolder, by name."""
    inner = folder / "images"
    places = [folder, inner] if inner.is_dir() else [folder]
    return sorted(p for place in places for p in place.iterdir() if p.suffix.lower() in ENDINGS)


def class_folders(folder: Path) -> list[str]:
    """The names of the subfolders that hold images, sorted: the classes."""
    if not folder.is_dir():
        return []
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and list_images(p))


def read_folder(folder: Path, classes: Sequence[str], size: tuple[int, int] | None, channels: int) -> Split:
    """A folder with one subfolder per class."""
    unknown = sorted(set(class_folders(folder)) - set(classes))
    if unknown:
        raise FedflatError(f"{folder} has the class '{unknown[0]}', which the training folder lacks.")
    found = [(path, label) for label, name in enumerate(classes) for path in _inside(folder / name)]
    if not found:
        raise FedflatError(f"{folder} has no images in subfolders named after classes.")
    lossy: set[str] = set()
    sources = noting_loss(((str(p), p) for p, _ in found), lossy)
    images = decode_images(sources, len(found), size, channels)
    labels = np.array([label for _, label in found], dtype=np.int64)
    return Split(images, labels, class_names=list(classes), lossy=", ".join(sorted(lossy)))


def _inside(folder: Path) -> list[Path]:
    return list_images(folder) if folder.is_dir() else []
