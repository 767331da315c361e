"""What an experiment file says. Importing this does not import torch.

Keys are the arguments of `fedflat.federate` and `fedflat.train`; what is left out is what is usual for the dataset.
Those of `TrainingSettings` and of the clients' optimisers come from the fields of these classes.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..client.optimisers import OPTIMISERS, OptimiserChoice
from ..data.protocols import protocol_for
from ..training.settings import TrainingSettings
from .fields import with_keys

Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**12, strict=True)]

NATURAL = ("by-user", "by-domain")
"""Partitions that know the number of clients themselves."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LocalSection(with_keys(_Section, OptimiserChoice, *OPTIMISERS.values())):  # type: ignore[misc]
    """The clients' optimiser."""


class RaySection(_Section):
    """Where the engine ray works, and how."""

    address: str | None = Field(
        default=None, description="of a running cluster, or auto; else one is started"
    )
    actors: Count | None = Field(default=None, description="by default as many as there is room for")
    cpus_per_actor: Positive = 1.0
    gpus_per_actor: NotNegative = Field(default=0.0, description="with 0.25, four actors share a GPU")
    deadline: Positive | None = Field(default=None, description="seconds that a client may take")
    on_deadline: Literal["wait", "skip", "stop"] = "wait"
    attempts: Count = Field(
        default=3, description="give up after a client has lost its actor this many times"
    )
    patience: Positive = Field(default=300.0, description="seconds to wait while there is no actor at all")
    ahead: Annotated[int, Field(ge=0, strict=True)] | None = Field(
        default=None, description="finished uploads that may wait for their turn"
    )
    data: Literal["sent", "nodes"] = Field(
        default="sent", description="sent to every node once, or loaded by the nodes from their own files"
    )


class _Problem(_Section):
    """Data, how it is partitioned, model, method, local training, and who takes part."""

    dataset: str = Field(
        default="digits",
        description="a name, a csv or Parquet file, a folder of images, or on-nodes, in a real federation",
    )
    data: str | None = Field(default=None, description="directory that holds the dataset")
    download: bool = Field(default=False, description="whether the dataset may be downloaded")
    target: str | None = Field(
        default=None, description="of a table: the column with the class, or the number"
    )
    client_column: str | None = Field(
        default=None, description="of a table: the column that says whose row it is"
    )
    features: list[str] | None = Field(
        default=None,
        description="of a table: the columns to learn from; by default all others that it can",
    )
    categorical: list[str] | None = Field(
        default=None, description="of a table: the columns that hold names; by default those with words"
    )
    numeric: Literal["standardise", "robust", "none"] | None = Field(
        default=None, description="of a table: how numbers are scaled; standardise by default"
    )
    missing: Literal["refuse", "median"] | Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        default=None,
        description="of a table: refuse missing values, which is the default, or fill them: median, or a number",
    )
    image_size: Count | None = Field(
        default=None, description="of a folder of images: the height and width that all are resized to"
    )
    client_folders: bool | None = Field(
        default=None,
        description="of a folder of images: whether it holds a folder per client, with one per class",
    )
    test_per_client: float | str | None = Field(
        default=None,
        description="of a table or a folder of images: the fraction of every client's samples to test on (0.2 by "
        "default), or of a table the column that is 1, true or test there",
    )
    test_samples: Count | None = Field(
        default=None, description="test on at most this many samples, evenly spaced"
    )
    stand_in: bool = Field(default=False, description="made-up data if the dataset is not on this machine")
    augment: str | None = Field(default=None, description="how training images are augmented")
    partition: str | dict[str, Any] = Field(
        default="dirichlet:0.1",
        description="such as dirichlet:0.1, or {name: dirichlet, alpha: 0.1}; by-user where data has owners",
    )
    clients: Count | None = None
    model: str | None = Field(
        default=None, description="a model's name, or name:file for weights to start from"
    )
    method: str | dict[str, Any] | list[Any] = Field(
        default="fedgmt",
        description="a name, a composition of mechanisms, or a list of {name: {parameter: value}}",
    )
    local: LocalSection = LocalSection()
    participation: Count | str | list[list[int]] | None = Field(
        default=None,
        description="clients per round, everyone, bernoulli:0.1, or a list of clients for every round",
    )


class Experiment(with_keys(_Problem, TrainingSettings, several="seed")):  # type: ignore[misc]
    """One experiment: data, how it is partitioned, model, method, local training, and the settings of training."""

    baseline: Literal["local", "pooled"] | None = Field(
        default=None,
        description="instead of the method: every client alone (local), or one client with all data (pooled), each "
        "with as many local steps",
    )
    engine: str | None = Field(default=None, description="inprocess, workers, workers:3 or ray")
    ray: RaySection | None = Field(default=None, description="of the engine ray")
    trackers: list[str] = Field(default=[], description="tensorboard, wandb, mlflow, trackio")

    def with_defaults(self, found: int | None = None) -> Experiment:
        """With what is usual for the dataset where nothing is said; `found` clients, where the data decides."""
        plan = protocol_for(self.dataset)
        local = self.local
        given_length = local.epochs is not None or local.steps is not None
        local = local.model_copy(
            update={
                "lr": plan.lr if local.lr is None else local.lr,
                "epochs": local.epochs if given_length else plan.epochs,
                "steps": local.steps if given_length else plan.steps,
                "batch_size": plan.batch_size if local.batch_size is None else local.batch_size,
            }
        )
        owned = self.client_column is not None or bool(self.client_folders)
        dealt = "by-user" if owned and "partition" not in self.model_fields_set else self.partition
        natural = (dealt.split("/")[-1] if isinstance(dealt, str) else dealt.get("name")) in NATURAL
        clients = self.clients if self.clients is not None or natural else plan.clients
        known = found if clients is None else clients
        per_round = plan.per_round if known is None else min(plan.per_round, known)
        filled: Experiment = self.model_copy(
            update={
                "local": local,
                "partition": dealt,
                "clients": clients,
                "model": self.model or plan.model,
                "participation": per_round if self.participation is None else self.participation,
                "rounds": self.rounds or plan.rounds,
            }
        )
        return filled

    def settings(self) -> dict[str, Any]:
        """The settings of training, as `train` takes them; what is not set is left out."""
        named = {field.name: getattr(self, field.name) for field in fields(TrainingSettings)}
        return {name: value for name, value in named.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """As plain values, without what is not set."""
        written: dict[str, Any] = self.model_dump(mode="json", exclude_none=True, exclude_defaults=False)
        return written
