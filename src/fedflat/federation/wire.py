"""What travels, as Flower's records. Nothing received is ever unpickled, or read before it is checked."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from ..errors import FedflatError
from ..messages import Upload
from ..slots import memory

LAYOUT = "fedflat.little-endian"
"""How the bytes of an array are meant: one number after the other, nothing else."""

NUMBERS = (
    "client",
    "round",
    "samples",
    "steps",
    "forward",
    "backward",
    "spared_forward",
    "spared_backward",
)
"""Whole numbers of an upload."""

MOST = 2**53
"""No whole number of an upload is larger."""


class Malformed(FedflatError):
    """Something received that is not what was agreed on."""


def to_record(vectors: Mapping[str, Tensor]) -> ArrayRecord:
    """Vectors by name, as the bytes they are."""
    return ArrayRecord({name: to_array(vector) for name, vector in vectors.items()})


def to_array(vector: Tensor) -> Array:
    """One vector."""
    dtype = str(vector.dtype).removeprefix("torch.")
    return Array(dtype, tuple(vector.shape), LAYOUT, bytes(memory(vector)))


def from_record(record: Any, sizes: Mapping[str, int | None], dtype: torch.dtype) -> dict[str, Tensor]:
    """Vectors by name, if they are the ones agreed on: names, types, shapes and lengths are checked first.

    `sizes` has the length of every vector that must be there; None is "any length".
    """
    if not isinstance(record, ArrayRecord):
        raise Malformed(f"its vectors came as {type(record).__name__}, not as arrays.")
    missing = [name for name in sizes if name not in record]
    if missing:
        raise Malformed(f"'{missing[0]}' is missing.")
    unknown = [name for name in record if name not in sizes]
    if unknown:
        raise Malformed(f"{shown(unknown[0])} was not asked for.")
    return {name: from_array(name, record[name], size, dtype) for name, size in sizes.items()}


def from_array(name: str, array: Array, size: int | None, dtype: torch.dtype) -> Tensor:
    """One vector."""
    if array.stype != LAYOUT:
        raise Malformed(f"'{name}' came as {shown(array.stype)}, not as plain numbers.")
    if array.dtype != str(dtype).removeprefix("torch."):
        raise Malformed(f"'{name}' has type {shown(array.dtype)}, expected {dtype}.")
    shape = tuple(array.shape)
    if len(shape) != 1 or (size is not None and shape[0] != size):
        raise Malformed(f"'{name}' has shape {shown(shape)}, expected ({'any' if size is None else size},).")
    if len(array.data) != shape[0] * dtype.itemsize:
        raise Malformed(f"'{name}' has {len(array.data)} bytes, expected {shape[0] * dtype.itemsize}.")
    if not shape[0]:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype)


def from_upload(upload: Upload, receipt: tuple[int, int] | None) -> RecordDict:
    """A client's reply: its vectors, its numbers, what it measured, and which state it has kept."""
    vectors = {"update": upload.update, **upload.vectors}
    if upload.buffers is not None:
        vectors["buffers"] = upload.buffers
    whole = {name: int(getattr(upload, name)) for name in NUMBERS}
    content = RecordDict(
        {"vectors": to_record(vectors), "numbers": MetricRecord({**whole, "loss": float(upload.loss)})}
    )
    if upload.report:
        content["report"] = MetricRecord({name: float(value) for name, value in upload.report.items()})
    if receipt is not None:
        content["receipt"] = MetricRecord({"round": receipt[0], "checksum": receipt[1]})
    return content


def to_upload(
    content: RecordDict,
    client: int,
    round: int,
    sizes: Mapping[str, int],
    buffers: int | None,
    dtype: torch.dtype,
) -> tuple[Upload, tuple[int, int] | None]:
    """An upload and the receipt of the state that its client kept; what is not as agreed is an error."""
    refusal = content.get("refusal")
    if isinstance(refusal, ConfigRecord):
        raise Malformed(f"it refused: {shown(refusal.get('reason'), 1000)}")
    odd = [name for name in content if name not in ("vectors", "numbers", "report", "receipt")]
    if odd:
        raise Malformed(f"the reply holds {shown(odd[0])}, which was not asked for.")
    record = content.get("vectors")
    expected: dict[str, int | None] = dict(sizes)
    if buffers is not None:
        expected["buffers"] = buffers
    vectors = from_record(record, expected, dtype)
    numbers = _metrics(content, "numbers", (*NUMBERS, "loss"))
    whole: dict[str, Any] = {name: _whole(name, numbers[name]) for name in NUMBERS}
    if whole["client"] != client or whole["round"] != round:
        raise Malformed(f"it answered as client {whole['client']} for round {whole['round']}.")
    report: dict[str, float] = {}
    if "report" in content:
        report = _metrics(content, "report", ("accuracy", "loss", "samples"), optional=("accuracy",))
        if not all(math.isfinite(value) for value in report.values()):
            raise Malformed("its report holds NaN or infinite values.")
    receipt = None
    if "receipt" in content:
        kept = _metrics(content, "receipt", ("round", "checksum"))
        receipt = (_whole("round", kept["round"]), _whole("checksum", kept["checksum"]))
    update, held = vectors.pop("update"), vectors.pop("buffers", None)
    upload = Upload(
        **whole, loss=float(numbers["loss"]), update=update, vectors=vectors, buffers=held, report=report
    )
    return upload, receipt


def _metrics(
    content: RecordDict, part: str, names: Collection[str], optional: Collection[str] = ()
) -> dict[str, float]:
    record = content.get(part)
    if not isinstance(record, MetricRecord):
        raise Malformed(f"its {part} are missing.")
    if not set(names) - set(optional) <= set(record) <= set(names):
        raise Malformed(f"its {part} are {shown(sorted(record))}, expected {sorted(names)}.")
    found = {}
    for name, value in record.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Malformed(f"{name} is no number.")
        found[name] = value
    return found


def _whole(name: str, value: float) -> int:
    if not isinstance(value, int) or not 0 <= value <= MOST:
        raise Malformed(f"{name} is {shown(value)}: it must be a whole number, at least 0.")
    return value


def shown(thing: object, most: int = 80) -> str:
    """Something a stranger sent, safe in a log: one line, printable, not long."""
    text = re.sub(r"[^\x20-\x7e\u00a0-\uffff]", "?", str(thing))
    return text if len(text) <= most else f"{text[:most]}…"
