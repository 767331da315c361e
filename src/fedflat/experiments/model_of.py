"""The model of a run, again, with the run's data: to measure it, to draw it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..checkpoint import read_checkpoint
from ..data.federation import Federation
from ..errors import FedflatError
from ..flat import FlatModel
from ..models import build_model
from .building import make_federation
from .experiment import Experiment
from .running import experiment_of, is_done

DATA_KEYS = (
    *(
        "dataset",
        "data",
        "target",
        "client_column",
        "features",
        "image_size",
        "client_folders",
        "test_samples",
        "stand_in",
    ),
    *("augment", "partition", "clients", "seed", "dtype"),
)
"""What of an experiment makes its federation."""


@dataclass(frozen=True)
class TrainedModel:
    """What a run directory holds: where the training is, and what it is trained on."""

    experiment: Experiment
    federation: Federation
    model: FlatModel
    round: int
    """how many rounds are behind it"""


def model_of(run: str | Path, federation: Federation | None = None, data: str | None = None) -> TrainedModel:
    """The model of a finished run, or of the last checkpoint of an unfinished one; on the CPU.

    `federation` spares loading the data again, if it is that of the run's experiment; `data` is where the dataset is
    on this machine.
    """
    experiment = experiment_of(run)
    if data is not None:
        experiment = experiment.model_copy(update={"data": data})
    seed = experiment.seed
    assert isinstance(seed, int)  # a run has one
    dtype = getattr(torch, experiment.dtype)
    federation = (federation or make_federation(experiment, seed)).to(dtype, "cpu")
    name = (experiment.model or "mlp").partition(":")[0]  # not the weights that it started from
    module = build_model(name, federation, seed)
    if is_done(run):
        path = Path(run) / "model.safetensors"
        try:
            module.load_state_dict(load_file(path))
        except (SafetensorError, RuntimeError, OSError) as problem:
            raise FedflatError(f"{path} cannot be read: {str(problem).splitlines()[0]}") from None
        return TrainedModel(experiment, federation, FlatModel(module.eval(), dtype), experiment.rounds or 0)
    checkpoints = sorted((Path(run) / "checkpoints").glob("round-*.safetensors"))
    if not checkpoints:
        raise FedflatError(
            f"{run} has no model and no checkpoint yet: let it run first (`fedflat resume {run}`)."
        )
    vectors, numbers = read_checkpoint(checkpoints[-1])
    model = FlatModel(module.eval(), dtype)
    model.vector.copy_(vectors["w"])
    model.write_buffers(vectors.get("buffers"))
    return TrainedModel(experiment, federation, model, numbers["rounds done"])


def same_data(one: Experiment, other: Experiment) -> bool:
    """Whether two experiments have the same federation, so that it need not be loaded twice."""
    return all(getattr(one, key) == getattr(other, key) for key in DATA_KEYS)
