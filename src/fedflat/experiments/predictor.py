"""A trained model in use: from raw rows or images to classes, probabilities or numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..data.preprocessing import METADATA, Images, Preprocessing, Table, Tensors
from ..data.readers.columns import read_columns
from ..data.readers.images import ENDINGS, decode_images
from ..errors import FedflatError, explained, reason_of
from ..models import MODELS, make_model
from ..models.conv.conv2d import PLAIN, set_column
from ..storage.run_files import LAST_FINITE, read_settings
from .load_run import load_trained
from .run import is_done

Sliced = TypeVar("Sliced", Tensor, list[Path])
BATCH = 256
"""Samples that go through the model at once."""


@dataclass(frozen=True, eq=False)
class Samples:
    """New samples as a module takes them, a batch at a time."""

    count: int
    batches: Iterator[Tensor]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """what is known of them by name: the columns of a table, or the `file` of every image"""

    @classmethod
    def of(cls, inputs: Tensor, columns: Mapping[str, Sequence[Any]] | None = None) -> Samples:
        """All inputs in one tensor."""
        if len(inputs) == 0:
            raise FedflatError("There are no samples to predict.")
        return cls(len(inputs), _parts(inputs), columns or {})


@dataclass(frozen=True, eq=False)
class Predictor:
    """The trained model of a run, with what was done to raw data before the model saw it."""

    module: nn.Module
    """on the CPU, in evaluation mode"""
    preprocessing: Preprocessing | None
    """None where the run knows of none: then only tensors can be predicted"""
    task: str
    """`"classification"` or `"regression"`"""
    classes: tuple[str, ...]
    """what the classes are called, in the order of probabilities; empty for regression"""
    input_shape: tuple[int, ...] | None
    """of one sample as the module takes it, where that is known"""
    vocabulary: int | None
    """different tokens, for text"""
    dtype: torch.dtype
    run: Path
    round: int
    """how many rounds the model was trained"""

    def predict(self, data: Any) -> np.ndarray:
        """The class of every sample by name, or its number for regression.

        Args:
            data: raw rows as a data frame, a dict of columns or a list of dicts; a csv or Parquet file, a folder of
                images, or an image; bytes of pixels (images, height, width, channels); or the module's own inputs, as
                a tensor or array of floats.
        """
        return self.decide(self.outputs(data))

    def predict_proba(self, data: Any) -> np.ndarray:
        """The probability of every class, a row for each sample."""
        return self.probabilities(self.outputs(data))

    def outputs(self, data: Any, progress: Callable[[int, int], None] | None = None) -> Tensor:
        """What the module says of every sample; `progress` is told how many are done of how many."""
        samples = data if isinstance(data, Samples) else self.prepare(data)
        outputs: list[Tensor] = []
        done = 0
        with torch.inference_mode():
            for batch in samples.batches:
                try:
                    outputs.append(self.module(batch))
                except (RuntimeError, IndexError) as problem:
                    raise FedflatError(
                        f"The model of {self.run} does not take inputs of shape {tuple(batch.shape[1:])}"
                        f"{'' if self.input_shape is None else f', only {self.input_shape}'} ({reason_of(problem)})."
                    ) from None
                if not bool(torch.isfinite(outputs[-1]).all()):
                    raise FedflatError(
                        f"The model of {self.run} gives numbers that are not finite, for some of the samples "
                        f"{done + 1} to {done + len(batch)}; are their values as large as those of training?"
                    )
                done += len(batch)
                if progress is not None:
                    progress(done, samples.count)
        return torch.cat(outputs).clone()

    def decide(self, outputs: Tensor) -> np.ndarray:
        """The class by name, or the number, from outputs of the module."""
        if self.task == "regression":
            return outputs.reshape(len(outputs), -1).squeeze(1).numpy()
        single = _is_single(outputs)
        guessed = (outputs.flatten() > 0).long() if single else outputs.argmax(dim=1)
        names = np.array(self.class_names(2 if single else outputs.shape[1]))
        return np.asarray(names[guessed.numpy()])

    def probabilities(self, outputs: Tensor) -> np.ndarray:
        """The probability of every class from outputs of the module: by softmax, or of a single logit's sigmoid."""
        if self.task == "regression":
            raise FedflatError(f"The model of {self.run} predicts a number, which has no probabilities.")
        if _is_single(outputs):
            one = outputs.reshape(-1, 1).sigmoid()
            return torch.cat([1 - one, one], dim=1).numpy()
        return outputs.softmax(dim=1).numpy()

    def class_names(self, classes: int) -> list[str]:
        """The names of this many classes; numbers where the run has no names for them."""
        fits = len(self.classes) == classes
        return list(self.classes) if fits else [str(number) for number in range(classes)]

    def prepare(self, data: Any) -> Samples:
        """Any data that `predict` takes, as the module takes it."""
        if isinstance(data, str | Path):
            return self._from_path(Path(data))
        if not isinstance(data, Tensor | np.ndarray):
            return Samples.of(self._need_preprocessing("The data").apply(data, self.dtype))
        if isinstance(data, np.ndarray) and data.dtype.kind not in "fiub":
            raise FedflatError(
                f"The array holds {data.dtype} values; give numbers, or raw rows with names of columns."
            )
        inputs = data if isinstance(data, Tensor) else torch.from_numpy(np.array(data))
        if inputs.dtype == torch.uint8 and isinstance(about := self.preprocessing, Images):
            return Samples(len(inputs), (about.apply(part, self.dtype) for part in _parts(inputs)))
        if inputs.ndim == 0 or self.input_shape not in (None, tuple(inputs.shape[1:])):
            raise FedflatError(
                f"The inputs have the shape {tuple(inputs.shape)}; the model of {self.run} takes (samples, "
                f"{', '.join(map(str, self.input_shape or ('...',)))}). Raw rows need names of columns: give a data "
                "frame or a dict."
            )
        return Samples.of(inputs.to(self.dtype) if inputs.is_floating_point() else inputs.long())

    def _from_path(self, path: Path) -> Samples:
        about = self._need_preprocessing(path)
        if isinstance(about, Table):
            if path.is_dir():
                raise FedflatError(f"{path} is a folder; this model takes a csv or Parquet file.")
            columns = read_columns(path)
            return Samples.of(about.apply(columns, self.dtype, path), columns)
        if not isinstance(about, Images):
            return Samples.of(about.apply(path, self.dtype, path))
        files = find_images(path)
        place = path if path.is_dir() else path.parent
        names = [str(one.relative_to(place)) for one in files]
        return Samples(
            len(files), (_decode(about, part, self.dtype) for part in _parts(files)), {"file": names}
        )

    def _need_preprocessing(self, where: object) -> Preprocessing:
        if self.preprocessing is None:
            raise FedflatError(
                f"{where}: {self.run} does not say how raw data became inputs of its model: it was trained on "
                "tensors, or on data of the clients' own nodes. Prepare the data likewise in Python, and give "
                f"tensors to ff.load({str(self.run)!r}).predict(), or say ff.load(..., preprocessing=...)."
            )
        return self.preprocessing


def _parts(samples: Sliced) -> Iterator[Sliced]:
    return (samples[first : first + BATCH] for first in range(0, len(samples), BATCH))


def _is_single(outputs: Tensor) -> bool:
    return outputs.ndim == 1 or outputs.shape[1:] == (1,)


def _decode(about: Images, files: Sequence[Path], dtype: torch.dtype) -> Tensor:
    pixels = decode_images(((str(file), file) for file in files), len(files), about.size, about.channels)
    return about.apply(pixels, dtype)


def find_images(path: Path) -> list[Path]:
    """An image, or all images in a folder and in the folders below it, by name."""
    inside = path.rglob("*") if path.is_dir() else [path]
    found = sorted(one for one in inside if one.suffix.lower() in ENDINGS and one.is_file())
    if not found:
        raise FedflatError(
            f"{path} is no image and no folder with images in it; this model takes files that end in "
            f"{', '.join(sorted(ENDINGS))}."
        )
    return found


# -- from a run directory ----------------------------------------------------------------------------


def load(
    run: str | Path, module: nn.Module | None = None, preprocessing: Preprocessing | None = None
) -> Predictor:
    """The model of a run, ready for new data.

    Args:
        run: the directory of a finished run; of one that is not, the model of its last checkpoint is taken, of one
            that diverged the last finite one, with a warning.
        module: for a run of a module of your own, one of that class, with any weights; it is copied.
        preprocessing: how raw data becomes inputs, where the run does not say it.
    """
    run = Path(run)
    _refuse_collection(run)
    settings = read_settings(run)
    facts = settings.get("federation") or {}
    about = preprocessing or read_preprocessing(run)
    shape = about.input_shape if about is not None else tuple(facts["shape"]) if "shape" in facts else None
    classes = about.classes if about is not None else facts.get("classes")
    vocabulary = about.vocabulary if isinstance(about, Tensors) else facts.get("vocabulary")
    name = str(settings.get("model")).partition(":")[0]  # not the weights that it started from
    what = name if shape is None else f"{name} for samples of shape {shape} and {classes} outputs"
    if module is not None:
        module = copy.deepcopy(module)
    elif "module" in settings or name not in MODELS:
        raise FedflatError(
            f"{run} was trained with a model of its own ({name}), whose code is not in the run: make one and give "
            f"it, ff.load({str(run)!r}, module={name}(...)), in Python; commands know the models of `fedflat models`."
        )
    elif shape is None or not isinstance(classes, int):
        raise FedflatError(
            f"{run} does not say of which shape its samples are, which the model {name} depends on: make the model "
            f"and give it, ff.load({str(run)!r}, module=...)."
        )
    else:
        module = make_model(name, shape, classes, vocabulary)
    dtype = torch.float64 if settings.get("dtype") == "float64" else torch.float32
    model, rounds = load_trained(run, module, dtype, what)
    if (run / LAST_FINITE).exists() and not is_done(run):
        warnings.warn(
            f"{run} diverged; this is its last finite model, after round {rounds}, which may be of little use.",
            stacklevel=2,
        )
    elif not is_done(run):
        planned = settings.get("rounds")
        warnings.warn(
            f"{run} is not finished: this is its model after round {rounds} of {planned}.", stacklevel=2
        )
    trained = model.release().eval()
    set_column(trained, PLAIN)  # one sample at a time as well as many
    task = about.task if about is not None else "classification"
    names = tuple(about.class_names) if about is not None else ()
    if task == "classification" and not names and isinstance(classes, int):
        names = tuple(str(number) for number in range(max(2, classes)))
    return Predictor(trained, about, task, names, shape, vocabulary, dtype, run, rounds)


def _refuse_collection(run: Path) -> None:
    """A directory that holds runs is none itself."""
    if not (run / "run.json").exists() and run.is_dir():
        inner = sorted(path.parent for path in run.glob("*/run.json"))
        if inner:
            raise FedflatError(f"{run} holds {len(inner)} runs: choose one, such as {inner[0]}.")


def read_preprocessing(run: Path) -> Preprocessing | None:
    """What travels with the weights of a finished run; else what its preprocessing.json says; None without both."""
    file = run / "model.safetensors"
    if file.exists() and is_done(run):
        try:
            with safe_open(file, "pt") as opened:
                stored = (opened.metadata() or {}).get(METADATA)
        except (SafetensorError, OSError) as problem:
            raise FedflatError(f"{file} cannot be read: {reason_of(problem)}") from None
        if stored is not None:
            return Preprocessing.from_json(stored, f"The preprocessing in {file}")
    file = run / "preprocessing.json"
    if not file.exists():
        return None
    with explained(f"{file} cannot be read"):
        return Preprocessing.from_json(file.read_bytes(), file)
