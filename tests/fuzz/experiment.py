"""Experiment files and the texts of their parts: what is wrong is a sentence, what is right stays itself.

The first line of a case names what the rest is: yaml, toml, set, method or partition; without a name it is YAML.
"""

import atexit
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from fedflat.data.partitions import parse_partition
from fedflat.errors import FedflatError
from fedflat.experiments.changes import changed, parse_changes, split_values
from fedflat.experiments.files import load_experiment, make_experiment
from fedflat.experiments.parsing import parse_value
from fedflat.experiments.schema import Experiment, LocalSection, RaySection
from fedflat.methods.text import as_method

PLACE = Path(tempfile.mkdtemp(prefix="fedflat-fuzz-"))
atexit.register(shutil.rmtree, PLACE, ignore_errors=True)
LONGEST_MESSAGE = 20_000


SOUND = (
    b"""yaml
dataset: digits
partition: {name: dirichlet, alpha: 0.1}
clients: 8
model: mlp
method:
  - local-ascent: {rho: 0.05}
  - control-variates
local: {lr: 0.1, lr_decay: 0.99, momentum: 0.5, epochs: 1, batch_size: full, clip_norm: 10}
participation: bernoulli:0.5
rounds: 2
seed: [0, 1]
norm_bound: {update: 3.0}
measure: [distance, {sharpness: {every: 10, samples: 200}}]
state_memory: 2GiB
""",
    b"""yaml
clients: 3
rounds: 2
participation: [[0, 1], [2]]
engine: workers:2
partition: {name: longtail, imbalance: 2, then: {name: pathological, classes: 2, form: prior}}
checkpoint_every: 3
buffers: local
""",
    b"yaml\nlocal: &a {lr: 0.1, steps: 2}\nmethod: {fedsam: {rho: 1e-2}}\ndtype: float64\n",
    b"yaml\nengine: ray\nray: {actors: 2, cpus_per_actor: 0.5, deadline: 30, on_deadline: skip}\n",
    b"""toml
dataset = "digits"
rounds = 3
seed = [0, 1]
method = "fedsam(rho=0.1)"
[local]
lr = 0.05
steps = 3
[partition]
name = "longtail"
imbalance = 2
then = "iid"
""",
    b"set\nlocal.lr=0.01\nmethod.rho=0.1\nmethod=fedsam(rho=0.1)\npartition.alpha=1e-3\nseed=[1,2]\n",
    b"method\nlocal-ascent(rho=0.05) + control-variates",
    b"method\nfedsmoo(rho=0.1)",
    b"partition\nlongtail:2/dirichlet:0.1:chunked",
    b"partition\npathological:3:prior",
)
VALUES = (
    b"", b"null", b"true", b"0", b"-1", b"1e400", b".nan", b"-.inf", b"2001-13-45", b"0x" + b"f" * 300, b"9" * 30,
    b"!!int x", b"!!set {a}", b"[]", b"[[]]", b"{}", b"{a: 1}", b"*a", b"&a [*a]", b"'x'", b"meta", b"inf:1", b"\\0",
    b"\"\\ud800\"", b"full", b"everyone", b"workers:99999", b"fedsam(rho=1)", b"1:59:59", b"1_000", b"~", b"<<",
)  # fmt: skip


def seeds() -> Iterator[bytes]:
    """A sound case of every kind."""
    yield from SOUND


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Another key, or another value for one."""
    keys = [*Experiment.model_fields, *LocalSection.model_fields, *RaySection.model_fields]
    lines = data.split(b"\n")
    number = dice.randrange(len(lines))
    found = [match.span() for match in re.finditer(rb"[^\s:=,{}()\[\]]+", lines[number])]
    change = dice.randrange(4)
    if change == 0 and found:
        first, last = dice.choice(found)
        lines[number] = lines[number][:first] + dice.choice(VALUES) + lines[number][last:]
    elif change == 1 and found:
        first, last = dice.choice(found)
        lines[number] = lines[number][:first] + dice.choice(keys).encode() + lines[number][last:]
    elif change == 2:
        mark = b" = " if data.startswith(b"toml") else b"=" if data.startswith(b"set") else b": "
        lines.insert(number + 1, dice.choice(keys).encode() + mark + dice.choice(VALUES))
    elif number:
        del lines[number]
    return b"\n".join(lines)


def check(data: bytes) -> None:
    """Read a case; a refusal can be printed and is no longer than a page."""
    kind, _, rest = data.partition(b"\n")
    try:
        KINDS.get(kind, _yaml)(rest if kind in KINDS else data)
    except FedflatError as mistake:
        if len(str(mistake).encode()) > LONGEST_MESSAGE:
            raise AssertionError("a sentence of many pages") from mistake
        raise


def _yaml(data: bytes) -> None:
    _file("a.yaml", data)


def _toml(data: bytes) -> None:
    _file("a.toml", data)


def _file(name: str, data: bytes) -> None:
    (PLACE / name).write_bytes(data)
    _stays_itself(load_experiment(PLACE / name))


def _set(data: bytes) -> None:
    """Changes, one in a line, as `run` and as `sweep` read them."""
    given = parse_changes(data.decode(errors="replace").splitlines())
    for text in given.values():
        split_values(text)
    _stays_itself(make_experiment(changed({}, {key: parse_value(text) for key, text in given.items()})))


def _method(data: bytes) -> None:
    method = as_method(data.decode(errors="replace"))
    assert method.mechanisms or method.name
    method.cost  # noqa: B018 (computed)


def _partition(data: bytes) -> None:
    partition = parse_partition(data.decode(errors="replace"))
    assert str(parse_partition(str(partition))) == str(partition)


def _stays_itself(experiment: Experiment) -> None:
    """What was accepted can be written down and read again, and is the same then."""
    written = experiment.to_dict()
    (PLACE / "again.yaml").write_text(yaml.safe_dump(written, sort_keys=False), "utf-8")
    assert load_experiment(PLACE / "again.yaml").to_dict() == written


KINDS = {b"yaml": _yaml, b"toml": _toml, b"set": _set, b"method": _method, b"partition": _partition}
