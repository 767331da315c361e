"""The model of a run, again, with the run's data: to measure it, to draw it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..core.flat import FlatModel
from ..core.tasks import LossFunction
from ..data.federation import Federation
from ..data.on_nodes import ON_NODES, no_data
from ..errors import FedflatError
from ..models import build_model
from ..models.conv.conv2d import set_recorded
from ..storage.checkpoint import read_checkpoint
from ..storage.metrics_file import read_metrics
from ..storage.run_files import LAST_FINITE, read_settings
from ..training.losses import make_loss
from .build import make_federation
from .run import experiment_of, is_done
from .schema import Experiment

DATA_KEYS = (
    *(
        "dataset",
        "data",
        "target",
        "client_column",
        "features",
        "categorical",
        "numeric",
        "missing",
        "task",
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
    run: Path
    """the directory"""

    @property
    def loss(self) -> LossFunction:
        """What was minimised, by its name; a function of one's own is not kept."""
        return make_loss(self.experiment.loss, self.experiment.task, self.federation)[0]


def load_run(run: str | Path, federation: Federation | None = None, data: str | None = None) -> TrainedModel:
    """The model of a finished run, the last finite one of a run that diverged, or the last checkpoint's; on the CPU.

    `federation` spares loading the data again, if it is that of the run's experiment; where that is on the clients'
    own nodes, it must be given. `data` is where the dataset is on this machine.
    """
    experiment = experiment_of(run)
    if experiment.dataset == ON_NODES and federation is None:
        raise no_data(run)
    if experiment.dataset == ON_NODES and experiment.model is None:
        raise FedflatError(
            f"{run}: its Flower app made the model, which has no name here. Make it once more and load the weights: "
            f"module.load_state_dict(safetensors.torch.load_file({str(Path(run) / 'model.safetensors')!r}))."
        )
    if data is not None:
        experiment = experiment.model_copy(update={"data": data})
    seed = experiment.seed
    assert isinstance(seed, int)  # a run has one
    dtype = getattr(torch, experiment.dtype)
    federation = (federation or make_federation(experiment, seed)).to(dtype, "cpu")
    name = (experiment.model or "mlp").partition(":")[0]  # not the weights that it started from
    module = build_model(name, federation, seed)
    what = f"{name} for samples of shape {federation.sample_shape} in {federation.classes} classes"
    model, rounds = load_trained(run, module, dtype, what)
    return TrainedModel(experiment, federation, model, rounds, Path(run))


def load_trained(run: str | Path, module: nn.Module, dtype: torch.dtype, what: str) -> tuple[FlatModel, int]:
    """The module with the weights that a run has come to, and after how many rounds; `what` describes the module."""
    settings = read_settings(run)
    set_recorded(module, settings)
    done = is_done(run)
    if done or (Path(run) / LAST_FINITE).exists():
        path = Path(run) / ("model.safetensors" if done else LAST_FINITE)
        try:
            module.to(dtype).load_state_dict(load_file(path))  # or weights in double precision are rounded
        except (SafetensorError, OSError) as problem:
            raise FedflatError(f"{path} cannot be read: {str(problem).splitlines()[0]}") from None
        except RuntimeError as problem:  # a head, then a line for everything that does not fit
            reason = str(problem).splitlines()[-1].strip()
            raise FedflatError(f"The weights in {path} do not fit the model {what}: {reason}") from None
        rounds = settings["rounds"] if done else len(read_metrics(run))
        return FlatModel(module.eval(), dtype), rounds
    checkpoints = sorted((Path(run) / "checkpoints").glob("round-*.safetensors"))
    if not checkpoints:
        raise FedflatError(
            f"{run} has no model and no checkpoint yet: let it run first (`fedflat resume {run}`)."
        )
    vectors, numbers = read_checkpoint(checkpoints[-1])
    model = FlatModel(module.eval(), dtype)
    if vectors["w"].shape != model.vector.shape:
        raise FedflatError(
            f"{checkpoints[-1]} has {vectors['w'].numel():,} parameters, the model {what} {model.size:,}."
        )
    model.vector.copy_(vectors["w"])
    model.write_buffers(vectors.get("buffers"))
    return model, numbers["rounds done"]


def same_data(one: Experiment, other: Experiment) -> bool:
    """Whether two experiments have the same federation, so that it need not be loaded twice."""
    return all(getattr(one, key) == getattr(other, key) for key in DATA_KEYS)
