"""A trained model as one file that needs no fedflat: TorchScript, PyTorch's exported program, ONNX."""

from __future__ import annotations

import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import FedflatError, nearest, reason_of, require
from ..storage.files import replace_file
from .predictions import check_new_file
from .predictor import Predictor

FORMATS = ("torchscript", "onnx", "pt2")


def export(predictor: Predictor, format: str, out: str | Path, overwrite: bool = False) -> list[Path]:
    """Write the model, for batches of any size, and beside it `OUT.json`: its inputs, outputs and preprocessing.

    Args:
        predictor: what `load` gave.
        format: `"torchscript"` for `torch.jit.load`, `"pt2"` for `torch.export.load`, `"onnx"` for ONNX Runtime
            and others; the input is called `input`, the output `output`.
        out: the file.
        overwrite: whether files that are there may be replaced.
    """
    out = Path(out)
    if format not in FORMATS:
        raise FedflatError(f"There is no format '{format}' to export to.{nearest(format, FORMATS)}")
    if format == "onnx":
        for package in ("onnx", "onnxscript"):
            require(package, package, "onnx", "Exporting to ONNX")
    if predictor.input_shape is None:
        raise FedflatError(
            f"{predictor.run} does not say of which shape its samples are, which an export needs."
        )
    about = out.with_name(f"{out.name}.json")
    for path in (out, about):
        check_new_file(path, overwrite)
    example = _example(predictor)
    try:
        with _quiet(), torch.inference_mode(False), torch.no_grad():
            content = _WRITERS[format](predictor.module, example)
            outputs = predictor.module(example)
    except Exception as problem:  # a compiler may stumble anywhere
        raise FedflatError(
            f"PyTorch cannot export the model of {predictor.run} to {format} ({reason_of(problem)}); try another "
            "format."
        ) from problem
    replace_file(out, content)
    known = predictor.preprocessing
    description = {
        "format": format,
        "run": predictor.run.name,
        "task": predictor.task,
        "input": {"name": "input", "shape": ["batch", *example.shape[1:]], "dtype": _name(example.dtype)},
        "output": {"name": "output", "shape": ["batch", *outputs.shape[1:]], "dtype": _name(outputs.dtype)},
        "classes": list(predictor.classes),
        "preprocessing": None
        if known is None
        else {k: v for k, v in known.to_dict().items() if k != "clients"},
    }
    replace_file(about, (json.dumps(description, indent=2) + "\n").encode())
    return [out, about]


def _example(predictor: Predictor) -> Tensor:
    """A batch of two: of one, a compiler may conclude that it is always one."""
    assert predictor.input_shape is not None
    dtype = predictor.dtype if predictor.vocabulary is None else torch.int64
    return torch.zeros(2, *predictor.input_shape, dtype=dtype)


def _torchscript(module: nn.Module, example: Tensor) -> bytes:
    sink = io.BytesIO()
    torch.jit.save(torch.jit.trace(module, example), sink)  # type: ignore[no-untyped-call]
    return sink.getvalue()


def _pt2(module: nn.Module, example: Tensor) -> bytes:
    sink = io.BytesIO()
    torch.export.save(torch.export.export(module, (example,), dynamic_shapes=({0: _any()},)), sink)
    return sink.getvalue()


def _onnx(module: nn.Module, example: Tensor) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        torch.onnx.export(
            module,
            (example,),
            file,
            dynamo=True,
            dynamic_shapes=({0: _any()},),
            input_names=["input"],
            output_names=["output"],
            external_data=False,
            verbose=False,
        )
        return file.read_bytes()


def _any() -> torch.export.Dim:
    return torch.export.Dim("batch", min=1)


_WRITERS: dict[str, Callable[[nn.Module, Tensor], bytes]] = {
    "torchscript": _torchscript,
    "onnx": _onnx,
    "pt2": _pt2,
}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what compilers say to their own developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
