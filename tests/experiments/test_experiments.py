"""Experiment files: what they say, what is wrong with them, and grids of them."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedflat as ff
from fedflat.experiments.changes import changed, split_values
from fedflat.experiments.files import load_experiment, make_experiment
from fedflat.experiments.run import is_done, run_experiment
from fedflat.experiments.schema import Experiment, LocalSection
from fedflat.experiments.sweep import Cell, grid, run_cells
from fedflat.storage.metrics_file import read_metrics

Fedflat = Callable[..., tuple[int, str, str]]


# -- what is wrong ---------------------------------------------------------------------------------


def exploding(form: str) -> str:
    """Anchors b to i, each of which stands for nine of the one before."""
    letters = pairwise("abcdefghi")
    return "".join(f"{one}: &{one} {form.format(', '.join([f'*{other}'] * 9))}\n" for other, one in letters)


BAD = {
    # the file as a whole
    "not a mapping": ("- rounds\n- seed\n", "an experiment is a list of `key: value` lines"),
    "one word": ("fedavg\n", "an experiment is a list of `key: value` lines"),
    "a bracket that does not close": (
        "seed: 1\nlocal: {lr: 0.1\nrounds: 3\n",
        "a.yaml, line 3: this is not YAML: expected ','",
    ),
    "a tab": ("local:\n\tlr: 3\n", "a.yaml, line 2: this is not YAML: found character '\\t'"),
    "two documents": ("rounds: 3\n---\nrounds: 4\n", "a.yaml, line 2: this is not YAML"),
    "code": (
        "seed: !!python/object/apply:os.getpid []\n",
        "a.yaml, line 1: this is not YAML: could not determine a constructor",
    ),
    "a NUL": ("rounds: 3 # \0\n", "this is not YAML: unacceptable character #x0000"),
    "an alias of itself": ("local: &a\n  lr: *a\n", "an alias in it stands for itself"),
    "aliases that explode": (
        "a: &a [x, x, x, x, x, x, x, x, x]\n" + exploding("[{}]"),
        "line 7: its aliases stand for more than 2,000,000 characters",
    ),
    "mappings that explode": (
        "a: &a {x: 1}\n" + exploding("{{<<: [{}]}}"),
        "its aliases stand for more than 2,000,000 characters",
    ),
    "brackets without end": (f"method: {'[' * 5000}\n", "a.yaml, line 1: it is nested more than 50 deep"),
    "lists in lists": (f"method:\n  {'- ' * 5000}x\n", "a.yaml, line 2: it is nested more than 50 deep"),
    "too long a file": (
        "rounds: 1\n" + "# \n" * 700_000,
        "cannot be read: it is longer than 2,000,000 characters",
    ),
    # values of other kinds
    "a date that is none": ("rounds: 2001-13-45\n", "rounds must be a whole number, not '2001-13-45'"),
    "a word for a tagged number": ("rounds: !!int x\n", "a.yaml, line 1: 'x' cannot be read as int"),
    "nothing for a tagged number": ("rounds: !!int ''\n", "a.yaml, line 1: '' cannot be read as int"),
    "a word for a tagged switch": (
        "seed: 1\ndownload: !!bool x\n",
        "a.yaml, line 2: 'x' cannot be read as bool",
    ),
    "a tagged date": ("dataset: !!timestamp x\n", "could not determine a constructor for the tag"),
    "thousands of digits": (f"seed: {'9' * 5000}\n", "a.yaml, line 1: a number has 5,000 digits"),
    "thousands of digits to base 16": (f"seed: 0x{'f' * 5000}\n", "a number has 5,002 digits"),
    "a huge seed": (f"seed: {10**30}\n", f"seed must be at most 18446744073709551615, not {10**30}"),
    "a huge count": (f"rounds: {10**30}\n", f"rounds must be at most 1000000000000, not {10**30}"),
    "a huge number": ("local: {lr: 1e400}\n", "lr must be a finite number, not inf"),
    "a huge parameter": (
        f"method: {{fedsam: {{rho: 1{'0' * 90}e300}}}}\n",
        "rho must be a finite number, not inf",
    ),
    "half a character": ('dataset: "\\ud800"\n', "line 1, dataset: its text is not valid Unicode"),
    "a NUL in a path": ('dataset: "a\\0.csv"\n', "'a\\x00.csv' is no name of a file"),
    "a path that is too long": (f"dataset: {'a' * 5000}.csv\n", "aa ... cannot be read: File name too long"),
    "a device without numbers": ("device: meta\n", "line 1, device: 'meta' cannot be used here"),
    "a number for a key in a list": (
        "measure: [{sharpness: {3: 1}}]\n",
        "measure.0.sharpness.3: there is no",
    ),
    "minus without end": (
        f"method: fedsam(rho={'-' * 9000}1)\n",
        "Cannot read the parameters of 'fedsam(rho=---",
    ),
    "tails without end": (f"partition: {'longtail:2/' * 3000}iid\n", "is too long for a partition"),
    # keys
    "a misspelt key": (
        "rounds: 3\ndatset: digits\n",
        "line 2, datset: there is no key of this name. Did you mean 'dataset'?",
    ),
    "an unknown key": (
        "zzzz: 3\n",
        "line 1, zzzz: there is no key of this name. Known: aggregate, augment, baseline, buffers,",
    ),
    "a misspelt key in a section": (
        "local:\n  lr: 0.1\n  epoch: 2\n",
        "line 3, local.epoch: there is no key of this name. Did you mean 'epochs'?",
    ),
    "an unknown key in a section": (
        "local:\n  zzzz: 0.1\n",
        "line 2, local.zzzz: there is no key of this name. Known: batch_size,",
    ),
    "a key twice": (
        "rounds: 3\nseed: 1\nrounds: 4\n",
        "line 3, rounds: it is there twice, first in line 1; keep one",
    ),
    "a key twice in a section": (
        "local:\n  lr: 3\n  lr: 2\n",
        "line 3, local.lr: it is there twice, first in line 2",
    ),
    "a key that is no text": ("on: 3\n", "line 1, on: there is no key of this name"),
    # types and ranges
    "text for a number": (
        "seed: 1\nrounds: many\n",
        "line 2, rounds: rounds must be a whole number, not 'many'",
    ),
    "a fraction for a whole number": ("clients: 2.5\n", "clients must be a whole number, not 2.5"),
    "a switch for a number": ("local:\n  lr: yes\n", "line 2, local.lr: lr must be a number, not True"),
    "a switch for a whole number": ("rounds: true\n", "rounds must be a whole number, not True"),
    "a list for a number": ("rounds: [1, 2]\n", "line 1, rounds: rounds must be a whole number, not [1, 2]"),
    "a list for a number in a section": (
        "local:\n  lr: [0.1, 0.2]\n",
        "line 2, local.lr: lr must be a number, not [0.1, 0.2]",
    ),
    "a number for text": ("dataset: 3\n", "line 1, dataset: dataset must be text, not 3"),
    "a number for a section": (
        "local: 3\n",
        "line 1, local: local must be a mapping of keys and values, not 3",
    ),
    "text for a list": ("trackers: wandb\n", "trackers must be a list, not 'wandb'"),
    "text for a switch": ("download: maybe\n", "download must be true or false, not 'maybe'"),
    "a negative number": ("rounds: -3\n", "line 1, rounds: rounds must be at least 1, not -3"),
    "a negative number in a section": (
        "local:\n  lr: -0.1\n",
        "line 2, local.lr: lr must be above 0, not -0.1",
    ),
    "too large a number": (
        "local: {momentum: 1.5}\n",
        "line 1, local.momentum: momentum must be below 1, not 1.5",
    ),
    "not a number": ("local: {lr: .nan}\n", "lr must be a finite number, not nan"),
    "no batch": ("local: {batch_size: 0}\n", "batch_size must be at least 1, not 0"),
    "a negative seed": ("seed: -1\n", "seed must be at least 0, not -1"),
    "no seed": ("seed: []\n", "line 1, seed: the list is empty; give at least one"),
    "a seed twice": ("seed: [1, 2, 1]\n", "line 1, seed: [1, 2, 1] has a seed twice; keep one"),
    # words
    "a misspelt word": ("weighting: sample\n", "weighting='sample' is not possible. Did you mean 'samples'?"),
    "a misspelt word in a section": (
        "local: {batch_size: ful}\n",
        "batch_size='ful' is not possible. Did you mean 'full'?",
    ),
    "a dataset": ("dataset: digit\n", "line 1, dataset: there is no dataset 'digit'. Did you mean 'digits'?"),
    "a file of data": ("dataset: nowhere/a.csv\n", "line 1, dataset: there is no file nowhere/a.csv"),
    "a model": ("model: mpl\n", "line 1, model: there is no model 'mpl'. Did you mean 'mlp'?"),
    "a method": (
        "seed: 3\nmethod: fedsm\n",
        "line 2, method: There is no method or mechanism 'fedsm'. Did you mean 'fedsam'?",
    ),
    "a method's parameter": (
        "method: {fedsam: {roh: 0.1}}\n",
        "fedsam has no parameter 'roh'. Did you mean 'rho'?",
    ),
    "a mechanism's parameter": (
        "method:\n  - local-ascent: {roh: 0.1}\n  - control-variates\n",
        "line 1, method: local-ascent has no parameter 'roh'. Did you mean 'rho'?",
    ),
    "a parameter's value": ("method: fedsam(rho=-1)\n", "rho must be at least 0, not -1"),
    "a parameter's type": ("method: {fedsam: {rho: much}}\n", "rho must be a number, not 'much'"),
    "mechanisms that do not go together": ("method: momentum-ascent\n", "Add look-ahead-momentum or"),
    "no method": ("method: []\n", "The method is empty; name one, such as fedavg"),
    "a partition": (
        "partition: dirchlet:0.1\n",
        "line 1, partition: There is no partition 'dirchlet'. Did you mean 'dirichlet'?",
    ),
    "a partition's text": ("partition: dirichlet\n", "write for example dirichlet:0.1"),
    "a partition's key": (
        "partition: {name: dirichlet, alhpa: 0.1}\n",
        "The partition dirichlet has no 'alhpa'. Did you mean 'alpha'?",
    ),
    "a partition's value": (
        "partition: {name: dirichlet, alpha: x}\n",
        "dirichlet: alpha must be at least 0, not x",
    ),
    "a partition without its number": (
        "partition: {name: dirichlet}\n",
        "The partition dirichlet needs a value for 'alpha'",
    ),
    "a partition without its name": (
        "partition: {alpha: 0.1}\n",
        "say which partition it is: {name: dirichlet, alpha: 0.1}",
    ),
    "a partition with a list for its name": ("partition: {name: [1]}\n", "say which partition it is"),
    "an augmentation": (
        "augment: crop\n",
        "line 1, augment: There is no augmentation 'crop'. Did you mean 'crop-flip'?",
    ),
    "an engine": ("engine: worker\n", "line 1, engine: There is no engine 'worker'. Did you mean 'workers'?"),
    "no workers": ("engine: workers:0\n", "write inprocess, workers or workers:3"),
    "a tracker": (
        "trackers: [wandbb]\n",
        "line 1, trackers: There is no tracker 'wandbb'. Did you mean 'wandb'?",
    ),
    "a size": (
        "state_memory: 2 gigs\n",
        "line 1, state_memory: '2 gigs' is not a size: write bytes, such as 1e9",
    ),
    "a device": (
        "device: gpu\n",
        "line 1, device: 'gpu' cannot be used here: write cpu, or cuda on a machine with a GPU",
    ),
    "a precision": ("dtype: float16\n", "dtype='float16' is not possible. Did you mean 'float64'?"),
    # what does not go together
    "epochs and steps": (
        "local:\n  epochs: 1\n  steps: 3\n",
        "line 3, local.steps: give epochs or steps, not both",
    ),
    "more participants than clients": (
        "clients: 5\nparticipation: 9\n",
        "line 2, participation: Uniform(9) cannot draw 9 of 5 clients a round; choose a number from",
    ),
    "a share of clients": (
        "participation: bernoulli:2\n",
        "line 1, participation: Bernoulli(2.0): give a probability in (0, 1]",
    ),
    "participation in words": (
        "participation: some\n",
        "write a number of clients, everyone, bernoulli:0.1 or a list of clients",
    ),
    "a schedule of clients that are not there": (
        "rounds: 1\nparticipation: [[0, 99]]\n",
        "name clients from 0 to 19",
    ),
    "too short a schedule": (
        "rounds: 2\nparticipation: [[0, 1]]\n",
        "The schedule has 1 rounds, 2 are asked for; extend it",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_one_sentence_and_exit_code_2(kind: str, fedflat: Fedflat, tmp_path: Path):
    text, says = BAD[kind]
    path = tmp_path / "a.yaml"
    path.write_text(text)
    for command in ("run",) if kind == "a seed twice" else ("run", "sweep"):
        code, output, told = fedflat(command, path, "--out", tmp_path / "out")
        assert (code, output) == (2, "")
        assert told.startswith(f"Error: {path}")
        assert says in told
        assert len(told.splitlines()) == 1
        assert "something else" not in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rounds = 3\nlocal = {\n", "this is not TOML: Invalid initial character for a key part (at line 2"),
        ("rounds = 3\nrounds = 4\n", "this is not TOML: Cannot overwrite a value (at line 2"),
        (f"rounds = {'9' * 5000}\n", "a number has thousands of digits"),
        (f"seed = 0x{'f' * 5000}\n", "line 1, seed: a number has more than 100 digits"),
        (f"method = {'[' * 5000}\n", "it is nested too deeply"),
        (f"{'a.' * 3000}b = 1\n", "a: it is nested more than 50 deep"),
        ("rounds = 2001-02-31\n", "this is not TOML: Invalid date or datetime"),
        (
            "rounds = 3\n\n[local]\nepoch = 2\n",
            "line 4, local.epoch: there is no key of this name. Did you mean 'epochs'?",
        ),
        ('seed = 1\nrounds = "many"\n', "line 2, rounds: rounds must be a whole number, not 'many'"),
        ("\ufeffrounds = -1\n", "line 1, rounds: rounds must be at least 1, not -1"),
        ("[local]\nepochs = 1\nsteps = 2\n", "line 3, local.steps: give epochs or steps, not both"),
    ],
)
def test_bad_toml(text: str, says: str, fedflat: Fedflat, tmp_path: Path):
    path = tmp_path / "a.toml"
    path.write_text(text, encoding="utf-8")
    code, _, told = fedflat("run", path, "--out", tmp_path / "out")
    assert code == 2
    assert told.startswith(f"Error: {path}") and says in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("nowhere.yaml", None, "cannot be read: No such file or directory"),
        ("folder.yaml", "folder", "cannot be read: Is a directory"),
        ("a.yaml", bytes(range(256)), "cannot be read: it is not text"),
        ("a.toml", bytes(range(128, 256)), "cannot be read: it is not text"),
        ("a.json", b"{}", "an experiment is a .yaml or a .toml file"),
        ("a", b"rounds: 3", "an experiment is a .yaml or a .toml file"),
    ],
)
def test_bad_paths(name: str, content: Any, says: str, fedflat: Fedflat, tmp_path: Path):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    for command in ("run", "sweep"):
        code, _, told = fedflat(command, path)
        assert code == 2
        assert told.startswith(f"Error: {path}") and says in told
        assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("rounds", "--set rounds: write key=value, such as local.lr=0.05"),
        ("=3", "--set =3: write key=value"),
        ("rounds=", "--set rounds=: write key=value"),
        ("round=3", "round: there is no key of this name. Did you mean 'rounds'?"),
        ("local.epoch=3", "local.epoch: there is no key of this name. Did you mean 'epochs'?"),
        ("rounds.x=3", "rounds.x: 'rounds' has no parts to set"),
        ("local.lr=fast", "local.lr: lr must be a number, not 'fast'"),
        ("local=3", "local: local must be a mapping"),
        ("method.rho=1", "fedavg has no parameter 'rho'"),
        ("partition.beta=1", "The partition iid has no 'beta'. It has no parameters"),
        ("rounds=[1", "rounds must be a whole number, not '[1'"),
        ("clients=0", "clients must be at least 1, not 0"),
        ("rounds=!!int x", "rounds must be a whole number, not '!!int x'"),
        ("rounds=2001-13-45", "rounds must be a whole number, not '2001-13-45'"),
        (f"seed={'9' * 5000}", "seed must be a whole number or a list, not '999"),
        ("local.lr=1e400", "lr must be a finite number, not inf"),
    ],
)
def test_bad_changes(given: str, says: str, fedflat: Fedflat, tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text("rounds: 2\nclients: 8\nmethod: fedavg\npartition: iid\nlocal:\n  lr: 0.1\n")
    for command in ("run", "sweep"):
        code, _, told = fedflat(command, path, "--set", given, "--out", tmp_path / "out")
        assert code == 2
        assert says in told
        assert ": line" not in told  # the file is not to blame
        assert len(told.splitlines()) == 1


@pytest.mark.parametrize("seeds", ["0", "-1", "a", "1,,2", "1.5", ",", "3-5"])
def test_bad_seeds(seeds: str, fedflat: Fedflat, tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text("rounds: 2\n")
    code, _, told = fedflat("sweep", path, "--seeds", seeds)
    assert code == 2
    assert f"--seeds {seeds}: write how many, such as 3, or which, such as 0,5,7." in told


def test_all_problems_come_at_once_in_the_order_of_lines(fedflat: Fedflat, tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text(
        "datset: digits\nrounds: -1\nmodel: mpl\nlocal:\n  lr: fast\n  epoch: 1\npartition: dirchlet:1\n"
        "method: {fedsam: {roh: 1}}\nengine: worker\n"
    )
    code, _, told = fedflat("run", path, "--set", "seed=-1", "--out", tmp_path / "out")
    assert code == 2
    lines = told.splitlines()
    assert lines[0] == f"Error: {path} has 9 problems:"
    assert "seed must be at least 0" in told
    places = [line.split(":")[0].strip() for line in lines[1:] if line.startswith("  line")]
    assert places == [
        "line 1, datset", "line 2, rounds", "line 3, model", "line 5, local.lr", "line 6, local.epoch",
        "line 7, partition", "line 8, method", "line 9, engine",
    ]  # fmt: skip


# -- what they say ---------------------------------------------------------------------------------

FULL = {
    "dataset": "digits",
    "partition": {"name": "dirichlet", "alpha": 0.3},
    "clients": 7,
    "model": "mlp",
    "method": [{"local-ascent": {"rho": 0.05}}, "control-variates"],
    "local": {"lr": 0.02, "lr_decay": 0.99, "weight_decay": 1e-4, "steps": 3, "batch_size": "full"},
    "participation": [[0, 1], [2, 3]],
    "rounds": 2,
    "seed": [3, 4],
    "engine": "workers:2",
    "state_memory": "1MiB",
    "trackers": ["tensorboard"],
}


def toml(content: dict[str, Any]) -> str:
    """JSON of plain values is TOML, but for mappings."""

    def value(item: Any) -> str:
        if isinstance(item, dict):
            return "{" + ", ".join(f"{key} = {value(part)}" for key, part in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ", ".join(map(value, item)) + "]"
        return json.dumps(item)

    local = content["local"]
    top = [f"{key} = {value(item)}" for key, item in content.items() if key != "local"]
    return "\n".join([*top, "[local]", *(f"{key} = {value(item)}" for key, item in local.items())])


def test_yaml_and_toml_say_the_same(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(FULL))
    (tmp_path / "a.yml").write_text(json.dumps(FULL))  # JSON is YAML, too
    (tmp_path / "a.toml").write_text(toml(FULL))
    first, second, third = (load_experiment(tmp_path / f"a.{suffix}") for suffix in ("yaml", "yml", "toml"))
    assert first == second == third == make_experiment(FULL)
    assert first.local.weight_decay == 1e-4
    assert first.seed == [3, 4]


def test_what_is_written_says_the_same(tmp_path: Path):
    for given in (Experiment(), make_experiment(FULL), Experiment(dataset="cifar10", state_memory=1e6)):
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(given.with_defaults().to_dict()))
        assert (
            load_experiment(tmp_path / "a.yaml")
            == given.with_defaults()
            == given.with_defaults().with_defaults()
        )


def test_numbers_as_people_write_them(tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text("local:\n  lr: 1e-3\n  weight_decay: 5E-04\nstate_memory: 1e9\nrounds: 1_000\n")
    experiment = load_experiment(path, {"local.clip_norm": 10})
    assert (experiment.local.lr, experiment.local.weight_decay) == (0.001, 0.0005)
    assert (experiment.state_memory, experiment.rounds, experiment.local.clip_norm) == (1e9, 1000, 10)


def test_a_file_that_says_nothing_is_the_default(tmp_path: Path):
    for text in ("", "# nothing\n", "{}\n"):
        (tmp_path / "a.yaml").write_text(text)
        assert load_experiment(tmp_path / "a.yaml") == Experiment()


def test_changes():
    content = {"method": "fedsam", "partition": "dirichlet:0.1:chunked", "local": {"lr": 0.1}}
    result = changed(
        content, {"method.rho": 0.2, "partition.alpha": 1, "local.lr": 0.3, "local.steps": 4, "seed": 2}
    )
    assert result == {
        "method": {"fedsam": {"rho": 0.2}},
        "partition": {"name": "dirichlet", "alpha": 1, "form": "chunked"},
        "local": {"lr": 0.3, "steps": 4},
        "seed": 2,
    }
    assert content["local"] == {"lr": 0.1}  # the original stays
    again = changed(result, {"method.rho": 0.3, "partition.form": "refill"})
    assert again["method"] == {"fedsam": {"rho": 0.3}}
    written = changed({"method": "fedgmt(alpha=0.95, beta=None)"}, {"method.alpha": 0.5})
    assert written["method"] == {"fedgmt": {"alpha": 0.5, "beta": None}}
    assert again["partition"] == {"name": "dirichlet", "alpha": 1, "form": "refill"}
    assert changed({}, {"method.tau": 5, "partition.alpha": 2}) == {
        "method": {"fedgmt": {"tau": 5}},
        "partition": {"name": "dirichlet", "alpha": 2, "form": "equal"},
    }
    with pytest.raises(
        ff.FedflatError, match=r"method.rho: the method is a composition; write .*local-ascent\(rho=1\)"
    ):
        changed({"method": "local-ascent + control-variates"}, {"method.rho": 1})


def test_values_of_a_grid():
    assert split_values("0.01,0.1,1") == [0.01, 0.1, 1]
    assert split_values("fedavg,fedsam(rho=0.1, mix=1),a + b") == [
        "fedavg",
        "fedsam(rho=0.1, mix=1)",
        "a + b",
    ]
    assert split_values("[0, 1],{a: 1, b: 2},true,1e-3") == [[0, 1], {"a": 1, "b": 2}, True, 0.001]


def test_the_schema_does_not_import_torch():
    code = (
        "import sys; sys.argv = ['fedflat', 'schema']\n"
        "from fedflat.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stderr.strip() == "False"
    schema = json.loads(result.stdout)
    assert schema["type"] == "object" and schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(Experiment.model_fields)
    local = schema["$defs"]["LocalSection"]
    assert set(local["properties"]) == set(LocalSection.model_fields)
    assert schema["properties"]["weighting"]["enum"] == ["samples", "uniform"]
    assert {"type": "integer", "minimum": 1, "maximum": 10**12} in schema["properties"]["rounds"]["anyOf"]
    assert local["properties"]["lr_decay"] == {
        "default": 1.0, "description": "factor on lr every round", "exclusiveMinimum": 0, "maximum": 1,
        "title": "Lr Decay", "type": "number",
    }  # fmt: skip


# -- running ---------------------------------------------------------------------------------------

SMALL = "clients: 6\nparticipation: 3\nrounds: 3\nmethod: fedgmt\nlocal:\n  epochs: 1\n"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path / "small.yaml"


def rows(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_metrics(out)]


def same(out: Path, other: Path) -> None:
    assert rows(out) == rows(other)
    assert (out / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def said(out: Path) -> dict[str, Any]:
    return yaml.safe_load((out / "experiment.yaml").read_text())


def test_options_change_a_file(small: Path, fedflat: Fedflat, tmp_path: Path):
    out = tmp_path / "out"
    code, output, errors = fedflat(
        "run", small, "--method", "fedsam", "--set", "method.rho=0.2", "--set", "local.lr=0.02", "--set",
        "partition.alpha=0.5", "--seed", 3, "--rounds", 2, "--out", out,
    )  # fmt: skip
    assert code == 0, errors
    assert f"Written to {out}" in output
    experiment = said(out)
    assert experiment["method"] == {"fedsam": {"rho": 0.2}}
    assert experiment["partition"] == {"name": "dirichlet", "alpha": 0.5, "form": "equal"}
    assert (experiment["local"]["lr"], experiment["local"]["epochs"]) == (0.02, 1)
    assert (experiment["seed"], experiment["rounds"], experiment["clients"]) == (3, 2, 6)
    about = json.loads((out / "run.json").read_text())
    assert about["mechanisms"] == "local-ascent(rho=0.2)"
    assert about["local"]["lr"] == 0.02
    assert about["started"] <= about["finished"]
    assert {"torch", "python", "cpu", "cores", "git"} <= about["environment"].keys()
    # what a run directory says of itself is the same run again
    assert fedflat("run", out / "experiment.yaml", "--out", tmp_path / "again")[0] == 0
    same(out, tmp_path / "again")
    assert said(tmp_path / "again") == experiment


def test_methods_and_partitions_in_other_words_are_the_same_run(tmp_path: Path):
    base = make_experiment({"clients": 6, "participation": 3, "rounds": 1, "local": {"epochs": 1}})
    first = run_experiment(base.model_copy(update={"method": "local-ascent(rho=0.1) + control-variates"}))
    words: list[dict[str, Any]] = [
        {"method": [{"local-ascent": {"rho": 0.1}}, {"control-variates": None}]},
        {"method": {"local-ascent": {"rho": 0.1}, "control-variates": {}}},
        {
            "method": ["local-ascent(rho=0.1)", "control-variates"],
            "partition": {"name": "dirichlet", "alpha": 0.1},
        },
    ]
    for word in words:
        again = run_experiment(make_experiment({**base.to_dict(), **word}))
        assert again.server.w.equal(first.server.w)


def test_one_run_for_every_seed_and_method(small: Path, fedflat: Fedflat, tmp_path: Path):
    out = tmp_path / "out"
    methods = ("-m", "fedavg", "-m", "fedsam(rho=0.1)", "-m", "fedsam(rho=0.2)")
    code, _, errors = fedflat("run", small, *methods, "--set", "seed=[0, 5]", "--rounds", 1, "--out", out)
    assert code == 0, errors
    names = [
        f"{method}-seed{seed}" for method in ("fedavg", "fedsam_rho=0.1", "fedsam_rho=0.2") for seed in (0, 5)
    ]
    assert sorted(path.name for path in out.iterdir()) == names
    assert [said(out / name)["seed"] for name in names] == [0, 5] * 3
    code, _, errors = fedflat("run", small, "-m", "fedavg", "-m", "fedavg", "--out", tmp_path / "other")
    assert code == 2
    assert "give every method and every seed once" in errors
    assert not (tmp_path / "other").exists()


def test_a_list_of_seeds_is_not_one_run(tmp_path: Path):
    with pytest.raises(ff.FedflatError, match=r"This is one run: choose one of the seeds \[1, 2\]"):
        run_experiment(Experiment(seed=[1, 2]))


def test_where_a_file_is_written_by_default(small: Path, fedflat: Fedflat, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fedflat("run", small, "--rounds", 1)[0] == 0
    assert is_done(tmp_path / "runs" / "small")
    code, _, errors = fedflat("run", small)
    assert code == 2
    assert "already holds a run. Resume it (`fedflat resume runs/small`)" in errors


# -- sweeps ----------------------------------------------------------------------------------------

GRID = ("--method", "fedavg,fedsam(rho=0.1)", "--set", "partition.alpha=0.1,1")
NAMES = [
    f"{method}/alpha={alpha}/seed-0" for method in ("fedavg", "fedsam_rho=0.1") for alpha in ("0.1", "1")
]


class Watcher:
    """Remembers, and may act."""

    def __init__(self, act: Callable[[Cell, int], object] = lambda cell, done: None) -> None:
        self.act, self.rounds, self.ended = act, list[tuple[str, int]](), dict[str, str | None]()

    def round(self, cell: Cell, done: int, accuracy: float | None) -> None:
        self.rounds.append((cell.name, done))
        self.act(cell, done)

    def finished(self, cell: Cell, problem: str | None) -> None:
        self.ended[cell.name] = problem


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """A grid, one run at a time."""
    place = tmp_path_factory.mktemp("swept")
    (place / "small.yaml").write_text(SMALL)
    content = yaml.safe_load(SMALL)
    settings = {"partition.alpha": [0.1, 1]}
    cells = grid(content, place / "out", ["fedavg", "fedsam(rho=0.1)"], settings)
    watcher = Watcher()
    assert run_cells(cells, 1, watcher) == {}
    assert watcher.rounds == [(name, done) for name in NAMES for done in (1, 2, 3)]
    assert watcher.ended == dict.fromkeys(NAMES)
    return place / "out"


def test_names_of_a_grid(tmp_path: Path):
    cells = grid(
        {}, tmp_path, ["fedavg", "fedsam(rho=0.1)"], {"partition.alpha": [0.1, 1], "rounds": [2]}, [0, 5]
    )
    names = [cell.name for cell in cells]
    assert names == [name.replace("seed-0", f"seed-{seed}") for name in NAMES for seed in (0, 5)]
    assert [cell.out for cell in cells] == [tmp_path / name for name in names]
    assert {cell.experiment.rounds for cell in cells} == {2}
    assert [cell.experiment.seed for cell in cells] == [0, 5] * 4
    assert [cell.experiment.partition["alpha"] for cell in cells] == [0.1, 0.1, 1, 1] * 2  # type: ignore[index]
    assert [cell.name for cell in grid({}, tmp_path)] == ["seed-0"]
    with pytest.raises(ff.FedflatError, match=r"two runs called rounds=2/seed-0; give every value once"):
        grid({}, tmp_path, settings={"rounds": [2, 2]})


def test_several_at_a_time_have_the_same_bits_and_what_is_done_is_skipped(
    swept: Path, fedflat: Fedflat, tmp_path: Path
):
    file, out = swept.parent / "small.yaml", tmp_path / "out"
    code, output, errors = fedflat("sweep", file, *GRID, "--jobs", 2, "--out", out)
    assert code == 0, errors
    assert f"4 of 4 runs are in {out}. Compare them with\n  fedflat compare {out}\n" in output
    for name in NAMES:
        same(out / name, swept / name)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    code, output, _ = fedflat("sweep", file, *GRID, "--jobs", 2, "--out", out)
    assert code == 0
    assert output.count("done") == 4
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    # what is there must be what is asked for
    code, output, _ = fedflat("sweep", file, *GRID, "--set", "local.lr=0.3", "--out", out)
    assert code == 1
    assert (
        output.count("holds a run with local.lr 0.05, not 0.3. Remove it, or choose another directory") == 8
    )
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


@pytest.mark.slow
def test_a_stopped_sweep_goes_on(swept: Path, tmp_path: Path):
    out = tmp_path / "out"
    cells = grid(yaml.safe_load(SMALL), out, ["fedavg", "fedsam(rho=0.1)"], {"partition.alpha": [0.1, 1]})
    asked: list[int] = []
    watcher = Watcher(lambda cell, done: asked.append(done))
    assert run_cells(cells, 2, watcher, stop=lambda: bool(asked)) == {}
    assert len(watcher.ended) <= 2
    assert set(watcher.ended.values()) <= {"stopped", None}
    assert not multiprocessing.active_children()
    done = {name: len(rows(out / name)) for name in watcher.ended}
    watcher = Watcher()
    assert run_cells(cells, 2, watcher) == {}
    assert watcher.ended == dict.fromkeys(NAMES)
    for name in NAMES:
        same(out / name, swept / name)
        assert min(seen for cell, seen in watcher.rounds if cell == name) in (done.get(name, 0) + 1, 3)


@pytest.mark.slow
def test_finished_runs_of_a_sweep_keep_what_explains_them(swept: Path, fedflat: Fedflat, tmp_path: Path):
    left = {path.name for path in (swept / NAMES[0]).iterdir()}
    assert {"model.safetensors", "metrics.jsonl", "run.json", "experiment.yaml", "log.txt"} <= left
    assert not left & {"checkpoints", "state"}
    before = {path: path.read_bytes() for path in (swept / NAMES[0]).iterdir()}
    code, _, errors = fedflat("resume", swept / NAMES[0], "--rounds", 5)
    assert code == 2
    assert "is finished, and what resuming it needs was removed" in errors
    assert {path: path.read_bytes() for path in before} == before
    # told to, it keeps everything
    file, out = swept.parent / "small.yaml", tmp_path / "out"
    some = ("--method", "scaffold", "--keep-states", "--out", out)
    assert fedflat("sweep", file, *some)[0] == 0
    assert fedflat("resume", out / "scaffold" / "seed-0", "--rounds", 5)[0] == 0
    assert fedflat("sweep", file, *some[:2], "--set", "rounds=5", "--out", tmp_path / "five")[0] == 0
    same(out / "scaffold" / "seed-0", tmp_path / "five" / "scaffold" / "seed-0")


def test_a_run_that_fails_does_not_stop_the_others(swept: Path, fedflat: Fedflat, tmp_path: Path):
    code, output, _ = fedflat(
        "sweep", swept.parent / "small.yaml", "--method", "fedavg", "--set", "clients=5000,6", "--set",
        "partition.alpha=0.1", "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 1
    assert "fedavg/clients=5000/seed-0: 1,397 samples are not enough for 5,000 clients; use fewer" in output
    assert "1 of 2 runs are in" in output
    same(tmp_path / "out" / "fedavg" / "clients=6" / "seed-0", swept / NAMES[0])


@pytest.mark.slow
def test_a_run_whose_process_dies_does_not_stop_the_others(swept: Path, tmp_path: Path):
    out = tmp_path / "out"
    cells = grid(yaml.safe_load(SMALL), out, ["fedavg", "fedsam(rho=0.1)"], {"partition.alpha": [0.1]})
    names = [NAMES[0].replace("/alpha=0.1", ""), NAMES[2].replace("/alpha=0.1", "")]

    def kill(cell: Cell, done: int) -> None:
        if cell.name == names[0]:
            for child in multiprocessing.active_children():
                os.kill(child.pid or 0, signal.SIGKILL)

    failed = run_cells(cells, 1, Watcher(kill))
    assert list(failed) == names[:1]
    assert "its process died" in failed[names[0]]
    assert run_cells(cells, 1, Watcher()) == {}
    for name, other in zip(names, (NAMES[0], NAMES[2]), strict=True):
        same(out / name, swept / other)


def test_seeds_of_a_sweep(fedflat: Fedflat, tmp_path: Path, monkeypatch):
    path = tmp_path / "a.yaml"
    path.write_text(SMALL + "seed: [3, 4]\n")
    seen: list[list[int]] = []

    def note(cells: list[Cell], *_: object) -> dict[str, str]:
        seen.append([int(cell.experiment.seed) for cell in cells])  # type: ignore[arg-type]
        assert [cell.name for cell in cells] == [f"seed-{seed}" for seed in seen[-1]]
        return {}

    monkeypatch.setattr("fedflat.experiments.sweep.run_cells", note)
    for given in ((), ("--seeds", "3"), ("--seeds", "0,5,7"), ("--set", "seed=8,9"), ("--set", "seed=6")):
        assert fedflat("sweep", path, *given, "--out", tmp_path / "out")[0] == 0
    assert seen == [[3, 4], [0, 1, 2], [0, 5, 7], [8, 9], [6]]


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def asleep(process: int) -> bool:
    state = subprocess.run(["ps", "-o", "state=", "-p", str(process)], capture_output=True, text=True).stdout
    return state.startswith(("S", "I"))


@pytest.mark.slow
def test_ctrl_c_in_a_sweep(swept: Path, tmp_path: Path):
    """Once ends it after the rounds under way, twice at once; nothing is left behind."""
    out = tmp_path / "out"
    file = tmp_path / "a.yaml"
    file.write_text(SMALL.replace("epochs: 1", "steps: 10000000"))
    process = subprocess.Popen(
        [sys.executable, "-m", "fedflat", "sweep", file, "--jobs", "2", "--seeds", "3", "--out", out],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    limit = time.monotonic() + 60
    while len(list(out.glob("*/metrics.jsonl"))) < 2:
        assert time.monotonic() < limit
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    told = process.stdout.readline()
    assert told == "Stopping after the rounds under way; press Ctrl-C again to stop at once.\n"
    while not asleep(process.pid):  # or it would be interrupted while saying so
        assert time.monotonic() < limit
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    told, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert told == "Interrupted; repeat the command to resume.\n"
    while group_lives(process.pid):  # the tracker of multiprocessing takes a moment
        assert time.monotonic() < limit
        time.sleep(0.01)
    shutil.rmtree(out)
