"""Encoded images: from bytes, or folders with a class each, to arrays of one size."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import FedflatError, MissingExtra
from . import Split

ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}


def decode_images(
    sources: Iterable[tuple[str, bytes | Path]], count: int, size: tuple[int, int] | None, channels: int
) -> np.ndarray:
    """All images as bytes (count, height, width, channels); `size` resizes, None keeps the first image's."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise MissingExtra("Pillow", "data", "Reading images") from None
    result: np.ndarray | None = None
    for number, (name, source) in enumerate(sources):
        try:
            opened: Any = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
            image = opened.convert("L" if channels == 1 else "RGB")
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as problem:
            raise FedflatError(f"{name} is no readable image ({problem}); remove or replace it.") from None
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
    images = decode_images(((str(p), p) for p, _ in found), len(found), size, channels)
    labels = np.array([label for _, label in found], dtype=np.int64)
    return Split(images, labels, class_names=list(classes))


def _inside(folder: Path) -> list[Path]:
    return list_images(folder) if folder.is_dir() else []
