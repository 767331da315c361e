"""One field of a settings class is a keyword, a key of files, an option with its help, and an entry of run.json."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import typer
import yaml
from pydantic import BaseModel, ValidationError
from typer.testing import CliRunner

import fedflat as ff
from fedflat.cli import options
from fedflat.cli.app import app
from fedflat.client.optimisers import OPTIMISERS
from fedflat.core.parameters import number
from fedflat.engines.base import Job
from fedflat.experiments.build import make_local
from fedflat.experiments.fields import with_keys
from fedflat.experiments.schema import Experiment, LocalSection

FIELDS = dataclasses.fields(ff.TrainingSettings)
LOCAL = {
    f"{name}: {field.name}": (kind, field)
    for name, kind in OPTIMISERS.items()
    for field in dataclasses.fields(kind)
}


def words(text: str) -> str:
    """A text without frames and line breaks."""
    return re.sub(r"[\s│]+", " ", text)


def help_of(application: typer.Typer, *command: str) -> str:
    return words(CliRunner().invoke(application, [*command, "--help"], env={"COLUMNS": "200"}).output)


@pytest.fixture(scope="module")
def shown() -> str:
    return help_of(app, "run")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Any]:
    """The run.json of a run in which nothing is said."""
    out = tmp_path_factory.mktemp("settings") / "run"
    tiny.train("fedavg", "inprocess", rounds=1, out=out)
    return json.loads((out / "run.json").read_text())


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_setting_is_everywhere(field: dataclasses.Field, shown: str, written: dict[str, Any]):
    name, said = field.name, field.metadata["help"]
    assert inspect.signature(ff.train).parameters[name].default == field.default
    assert f"{name}: {said}" in (ff.train.__doc__ or "")
    key = Experiment.model_json_schema()["properties"][name]
    assert key["description"].startswith(said)
    assert f"--{field.metadata.get('option') or name.replace('_', '-')} " in shown
    assert words(said)[1:] in shown
    place = written["how"] if name in ff.TrainingSettings.HOW else written
    others = {
        "rounds": 1,
        "measure": [],
        "metrics": [],
        "loss": {"name": "cross_entropy", "code": "00000000"},
    }
    assert place[name] == others.get(name, field.default)


@pytest.mark.parametrize("case", LOCAL)
def test_a_setting_of_the_optimiser_is_everywhere(case: str, shown: str, written: dict):
    kind, field = LOCAL[case]
    key = LocalSection.model_json_schema()["properties"][field.name]
    assert key["description"] == field.metadata["help"]
    assert f"--{field.name.replace('_', '-')} " in shown
    assert words(field.metadata["help"])[1:] in shown
    assert field.name in kind().to_dict()
    assert kind is not ff.LocalSGD or field.name in written["local"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Longer(ff.TrainingSettings):
    """With one more setting."""

    toys: int = number(default=3, at_least=2, below=9, whole=True, help="what children play with")


def test_one_more_field_is_one_more_setting(monkeypatch, tmp_path: Path):
    section = with_keys(BaseModel, Longer)
    assert section.model_json_schema()["properties"]["toys"] == {
        "default": 3, "description": "what children play with", "exclusiveMaximum": 9, "maximum": 10**12,
        "minimum": 2, "title": "Toys", "type": "integer",
    }  # fmt: skip
    for wrong in (1, 9, 2.5, "3", True):
        with pytest.raises(ValidationError, match="toys"):
            section(toys=wrong)
    monkeypatch.setattr(options, "TrainingSettings", Longer)
    given: list[Any] = []
    application = typer.Typer()

    @application.command()
    @options.with_settings
    def play(**settings: Any) -> None:
        given.append(options.changes_of(settings))

    assert "--toys INTEGER RANGE [x>=2] What children play with. (default: 3)" in help_of(application)
    assert CliRunner().invoke(application, ["--toys", "7", "--lr", "0.5"]).exit_code == 0
    assert {key: value for key, value in given[0].items() if value is not None} == {
        "toys": 7,
        "local.lr": 0.5,
    }
    monkeypatch.setattr("fedflat.training.train.TrainingSettings", Longer)
    tiny.train("fedavg", "inprocess", rounds=1, out=tmp_path, toys=5)
    assert json.loads((tmp_path / "run.json").read_text())["toys"] == 5
    with pytest.raises(ff.FedflatError, match=r"train\(\): toys must be at least 2 and below 9, not 9"):
        tiny.train("fedavg", "inprocess", toys=9)
    # what the numbers depend on must not change when a run is resumed
    with pytest.raises(ff.FedflatError, match="toys 5, not 6"):
        tiny.train("fedavg", "inprocess", rounds=2, out=tmp_path, resume=True, toys=6)


def test_options_arrive(tmp_path: Path):
    out = tmp_path / "run"
    given = (
        "--clients 4 --participation everyone --rounds 2 --epochs 1 --batch-size full --clip-norm 5 "
        "--clip-stage gradient --optimiser sgd --oracle autograd --dtype float64 --no-fast --buffers local "
        "--over-bound clip --max-share 0.5 --checkpoint-every 2 --state-memory 1MiB --measure drift "
        "--measure distance --metric auroc --metric top-5 --monitor auroc --task classification "
        "--loss focal(gamma=1.5)"
    )
    bound = ("--norm-bound", "{update: median:3}", "--measure", "{sharpness: {every: 2}}")
    command = [sys.executable, "-m", "fedflat", "run", "-m", "fedavg", *given.split(), *bound]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    about = json.loads((out / "run.json").read_text())
    assert about["local"]["batch_size"] is None and about["local"]["clip_stage"] == "gradient"
    assert (about["oracle"], about["dtype"], about["fast"]) == ("autograd", "float64", False)
    assert (about["buffers"], about["over_bound"], about["max_share"]) == ("local", "clip", 0.5)
    assert about["norm_bound"] == {"update": "median:3"}
    assert about["measure"] == ["drift", "distance", {"sharpness": {"every": 2}}]
    assert (about["metrics"], about["monitor"], about["task"]) == (
        ["auroc", "top-5"],
        "auroc",
        "classification",
    )
    assert about["monitored"] == {"name": "auroc", "larger_is_better": True, "share": False}
    assert about["loss"]["name"] == "Focal" and "AUROC" in done.stdout and "top-5" in done.stdout
    assert about["how"] == {
        "engine": "inprocess", "device": "cpu", "threads": 1, "state_memory": "1MiB", "checkpoint_every": 2,
    }  # fmt: skip
    said = yaml.safe_load((out / "experiment.yaml").read_text())
    assert said["local"]["batch_size"] == "full" and said["participation"] == "everyone"
    assert said["norm_bound"] == {"update": "median:3"} and said["fast"] is False


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"weigthing": "samples"}, r"train\(\) has no setting 'weigthing'. Did you mean 'weighting'\?"),
        ({"oracle": "autgrad"}, "oracle must be 'auto' or 'autograd', not 'autgrad'"),
        ({"dtype": torch.float16}, "dtype must be 'float32' or 'float64', not 'float16'"),
        ({"fast": "yes"}, "fast must be True or False, not 'yes'"),
        ({"measure": "drift"}, "measure must be a list, not 'drift'"),
        ({"norm_bound": {"update": -1}}, "norm_bound must be above 0, not -1"),
        ({"eval_every": True}, "eval_every must be a number, not True"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_mistakes(settings: dict[str, Any], says: str):
    with pytest.raises(ff.FedflatError, match=says):
        tiny.train("fedavg", "inprocess", **settings)


def test_what_libraries_call_a_number_is_one():
    settings = ff.TrainingSettings(
        rounds=np.int64(3), seed=np.uint8(4), dtype=torch.float64, device=torch.device("cpu")
    )
    assert (settings.rounds, settings.seed) == (3, 4)
    assert type(settings.rounds) is int
    assert (settings.dtype, settings.device) == ("float64", "cpu")


class Opened(ff.InProcess):
    def open(self, job: Job) -> None:
        self.job = job
        super().open(job)


@pytest.mark.parametrize("oracle", ["auto", "autograd"])
def test_the_oracle_reaches_the_engine(oracle: str):
    engine = Opened()
    tiny.train("fedavg", engine, rounds=1, oracle=oracle)
    assert engine.job.oracle == oracle


# -- the clients' optimiser in files -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Adam:
    """As another optimiser may be: with a field of its own, one less, and another default."""

    lr: float = number(default=0.001, above=0, help="learning rate")
    beta: float = number(default=0.9, at_least=0, below=1, help="of the first moment")
    weight_decay: float = number(default=0.01, at_least=0, help="factor on the weights")
    batch_size: int | None = number(
        default=50, at_least=1, optional="full", whole=True, help="samples of a step"
    )


def test_files_name_an_optimiser_and_its_own_settings(monkeypatch):
    monkeypatch.setitem(OPTIMISERS, "adam", Adam)

    @dataclasses.dataclass(frozen=True)
    class Which:
        optimiser: str = ff.choice(*OPTIMISERS, default="sgd", help="which")

    section = with_keys(BaseModel, Which, *OPTIMISERS.values())
    assert make_local(section(lr=0.2, epochs=1, batch_size="full")) == ff.LocalSGD(
        lr=0.2, epochs=1, batch_size=None
    )
    made = make_local(section(optimiser="adam", beta=0.8, batch_size=7))
    assert made == Adam(beta=0.8, batch_size=7)  # what is left out is the optimiser's own
    for other in ({"momentum": 0.5}, {"clip_stage": "gradient"}, {"steps": 3}):
        with pytest.raises(ff.FedflatError, match=f"{next(iter(other))} is no setting of the optimiser adam"):
            make_local(section(optimiser="adam", **other))
    with pytest.raises(ValidationError, match="optimiser"):
        section(optimiser="adagrad")


def test_importing_settings_does_not_import_torch():
    code = (
        "import sys\n"
        "import fedflat.training.settings, fedflat.client.optimisers, fedflat.experiments.schema\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
