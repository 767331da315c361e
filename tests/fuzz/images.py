"""A folder of images: `fedflat.data.own.read_images`."""

from __future__ import annotations

import io
import random
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

SIZES = (0, 1, 2, 255, 257, 10_000, 2**16, 2**31 - 1, 2**32 - 1)


def seeds() -> Iterator[bytes]:
    """An image in every format and mode that is read."""
    from PIL import Image

    rng = random.Random(0)
    grey = bytes(rng.randrange(256) for _ in range(36))
    deep = Image.frombytes("I;16", (6, 3), grey)
    plain = Image.frombytes("L", (6, 6), grey)
    kinds = [("PNG", plain.convert(mode)) for mode in ("L", "RGB", "RGBA", "P", "1", "LA")]
    kinds += [("PNG", deep), ("TIFF", deep), ("TIFF", plain.convert("F")), ("PPM", plain.convert("RGB"))]
    kinds += [(name, plain.convert("RGB")) for name in ("JPEG", "WEBP", "BMP", "GIF")]
    for name, image in kinds:
        file = io.BytesIO()
        image.save(file, format=name)
        if image.mode != "F":  # which is refused
            yield file.getvalue()


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Other sizes and depths in a PNG with sound checksums; other bytes elsewhere."""
    if not data.startswith(b"\x89PNG") or len(data) < 33:
        at = dice.randrange(len(data) + 1)
        return data[:at] + struct.pack(dice.choice("<>") + "I", dice.choice(SIZES)) + data[at + 4 :]
    header = bytearray(data[16:29])
    if dice.random() < 0.5:
        at = dice.choice((0, 4))
        header[at : at + 4] = struct.pack(">I", dice.choice(SIZES))
    else:
        header[dice.randrange(8, 13)] = dice.choice((0, 1, 2, 3, 4, 6, 8, 16, 255))
    return data[:16] + bytes(header) + struct.pack(">I", zlib.crc32(b"IHDR" + header)) + data[33:]


def check(data: bytes) -> None:
    """Read beside sound images, in colour and in grey, resized and not."""
    from fedflat import FedflatError
    from fedflat.data.own import read_images

    refusals = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(3):
            (Path(folder) / "a").mkdir(exist_ok=True)
            (Path(folder) / "a" / f"{number}.png").write_bytes(data)
        for size, channels in ((4, 3), (None, 1)):
            try:
                dataset = read_images(folder, size=size, channels=channels, test=0.34)
            except FedflatError as refusal:
                told = str(refusal)
                assert told.strip() and "\n" not in told, "a refusal is one sentence"
                refusals.append(refusal)
                continue
            pixels = torch.cat([dataset.train[0], dataset.test[0]])
            assert pixels.dtype == torch.uint8
            assert len(pixels) == 3 and pixels.shape[3] == channels
            assert size is None or pixels.shape[1:3] == (size, size)
            assert (pixels == pixels[:1]).all(), "one file is two images"
    if len(refusals) == 2:
        raise refusals[0]
