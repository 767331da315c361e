"""What travels, as Flower's records. Nothing received is ever unpickled, or read before it is checked."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from google.protobuf.message import DecodeError
from torch import Tensor

from ...core.finite import is_finite
from ...core.messages import NUMBERS, Upload, unpack_upload
from ...core.vector_memory import memory
from ...errors import FedflatError
from .client_state import Receipt
from .reply import reply_of

LAYOUT = "fedflat.little-endian"
"""How the bytes of an array are meant: one number after the other, nothing else."""

MOST = 2**53
"""No whole number of an upload is larger."""
LARGEST_LOSS = float(torch.finfo(torch.float32).max)
"""No loss is larger: its square is still a number."""
PASSES = 100
"""No method makes more passes over a batch in a step."""
NAMES = 64
"""No part of a reply has more names."""

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, DecodeError)
"""What reading a stranger's message may raise, in Flower or here; not that the server cannot be reached."""


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
    _check_names("vectors", record)
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
    whole = len(shape) == 1 and isinstance(shape[0], int) and shape[0] >= 0
    if not whole or (size is not None and shape[0] != size):
        raise Malformed(f"'{name}' has shape {shown(shape)}, expected ({'any' if size is None else size},).")
    if len(array.data) != shape[0] * dtype.itemsize:
        raise Malformed(f"'{name}' has {len(array.data)} bytes, expected {shape[0] * dtype.itemsize}.")
    if not shape[0]:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype)


def from_upload(upload: Upload, receipt: Receipt | None) -> RecordDict:
    """A client's reply, as `reply_of` has it."""
    parts: Any = reply_of(upload, receipt)
    return RecordDict(
        {
            part: to_record(fields) if part == "vectors" else MetricRecord(fields)
            for part, fields in parts.items()
        }
    )


def to_upload(
    content: RecordDict,
    client: int,
    round: int,
    sizes: Mapping[str, int],
    buffers: int | None,
    dtype: torch.dtype,
) -> tuple[Upload, Receipt | None]:
    """An upload and the receipt of the state that its client kept; what is not as agreed is an error."""
    refusal = content.get("refusal")
    if isinstance(refusal, ConfigRecord):
        raise Malformed(f"it refused: {shown(refusal.get('reason'), 1000)}")
    _check_names("records", content)
    odd = [name for name in content if name not in ("vectors", "numbers", "report", "receipt")]
    if odd:
        raise Malformed(f"the reply holds {shown(odd[0])}, which was not asked for.")
    record = content.get("vectors")
    expected: dict[str, int | None] = dict(sizes)
    if buffers is not None:
        expected["buffers"] = buffers
    vectors = from_record(record, expected, dtype)
    for name, vector in vectors.items():
        _check_range(name, vector)
    numbers = _metrics(content, "numbers", (*NUMBERS, "loss"))
    whole: dict[str, Any] = {name: _whole(name, numbers[name]) for name in NUMBERS}
    if whole["client"] != client or whole["round"] != round:
        raise Malformed(f"it answered as client {whole['client']} for round {whole['round']}.")
    _check_counts(whole)
    notes: list[str] = []
    loss, report = numbers["loss"], {}
    if loss == loss and not abs(loss) <= LARGEST_LOSS:  # NaN: the method withholds it
        notes.append(f"its training loss of {shown(loss)} is left out.")
        loss = math.nan
    try:
        report = _report(content)
    except Malformed as problem:
        notes.append(f"its report is left out: {problem}")
    receipt = None
    if "receipt" in content:
        kept = _metrics(content, "receipt", ("round", "mark"))
        receipt = (_whole("round", kept["round"]), _whole("mark", kept["mark"]))
    parts = {"vectors": vectors, "numbers": {**whole, "loss": float(loss)}, "report": report}
    return unpack_upload(parts, notes=tuple(notes)), receipt


def _report(content: RecordDict) -> dict[str, float]:
    """What a client found of the model it received; it may have nothing to say."""
    if "report" not in content:
        return {}
    report = _metrics(content, "report", ("accuracy", "loss", "samples"), optional=("accuracy",))
    if not 0 < report["samples"] <= MOST:
        raise Malformed(f"it tested on {shown(report['samples'])} samples.")
    if not 0 <= report.get("accuracy", 0) <= 1:
        raise Malformed(f"an accuracy of {shown(report['accuracy'])}.")
    if not abs(report["loss"]) <= LARGEST_LOSS:
        raise Malformed(f"a loss of {shown(report['loss'])}.")
    return {name: float(value) for name, value in report.items()}


def _check_range(name: str, vector: Tensor) -> None:
    """No entry may be so large that sums and squares of a round overflow: one client could undo every round.

    That is the fourth root of what a float can be, 4e9 in single precision; of buffers, which are not squared and
    which may be whole numbers, what 64 bits hold. NaN and infinity the server refuses, but for a mask's.
    """
    finite = vector if is_finite(vector) else vector[torch.isfinite(vector)]
    largest = finite.abs().max().item() if len(finite) else 0.0
    most = 2.0**63 if name == "buffers" else torch.finfo(vector.dtype).max ** 0.25
    if largest > most:
        raise Malformed(f"'{name}' holds {largest:.2g}; no number of an upload may exceed {most:.2g}.")


def _check_counts(whole: Mapping[str, int]) -> None:
    """Passes must be possible for the steps, and none is spared that was not to be made."""
    if not whole["samples"] or not whole["steps"]:
        raise Malformed(f"{whole['samples']} samples and {whole['steps']} steps: both must be positive.")
    for kind in ("forward", "backward"):
        made, spared = whole[kind], whole[f"spared_{kind}"]
        if made > PASSES * whole["steps"] or spared > made:
            raise Malformed(
                f"{made} {kind} passes, {spared} of them spared, in {whole['steps']} steps: that cannot be."
            )


def _check_names(part: str, record: Any) -> None:
    if len(record) > NAMES:
        raise Malformed(f"its {part} have {len(record)} names.")


def _metrics(
    content: RecordDict, part: str, names: Collection[str], optional: Collection[str] = ()
) -> dict[str, float]:
    record = content.get(part)
    if not isinstance(record, MetricRecord):
        raise Malformed(f"its {part} are missing.")
    _check_names(part, record)
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
    try:
        text = str(thing)[: most + 1]
    except ValueError:  # a number of thousands of digits
        text = f"{'-' if isinstance(thing, int) and thing < 0 else ''}more than 4000 digits"
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= most else f"{text[:most]}…"
