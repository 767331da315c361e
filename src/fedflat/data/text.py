"""Text as numbers: words for classification, characters for prediction."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

_SPACED = re.compile(r"([.,()!?'])")
_DROPPED = re.compile(r'["]')
_BLANK = re.compile(r"<br\s*/>|[;:]|\s+")

LENGTH = 200
"""Words per news text; longer ones are cut, shorter ones padded with 0 (FedGMT's protocol)."""

CHARACTERS = "\n !\"&'(),-.0123456789:;<>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]_abcdefghijklmnopqrstuvwxyz|}"
"""What Shakespeare is written in; 0 stands for anything else."""


def basic_english(text: str) -> list[str]:
    """Lower-case words; stops, commas, brackets, apostrophes, ! and ? are words of their own, other marks vanish."""
    text = _SPACED.sub(r" \1 ", text.lower())
    return _BLANK.sub(" ", _DROPPED.sub("", text)).split()


def vocabulary(texts: Iterable[list[str]]) -> dict[str, int]:
    """Every word's number, the frequent first; 0 is both padding and the unknown word."""
    counts = Counter(word for words in texts for word in words)
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(ordered, start=1)}


def encode_words(texts: Sequence[list[str]], numbers: dict[str, int], length: int = LENGTH) -> np.ndarray:
    """Texts as rows of `length` word numbers."""
    rows = np.zeros((len(texts), length), dtype=np.int32)
    for row, words in zip(rows, texts, strict=True):
        known = [numbers.get(word, 0) for word in words[:length]]
        row[: len(known)] = known
    return rows


def encode_characters(text: str) -> np.ndarray:
    """A text as character numbers from 1; 0 is any other character."""
    table = np.zeros(0x110000, dtype=np.uint8)
    for number, character in enumerate(CHARACTERS, start=1):
        table[ord(character)] = number
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    return table[points]
