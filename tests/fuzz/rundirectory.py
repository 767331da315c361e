"""Run directories: whatever reads one, and what going on with one reads before it trains.

A case is the name of a file in a run, a line feed, and what stands in that file; the rest of the run is sound.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

SETTINGS: dict[str, Any] = {
    "dataset": "digits", "method": "scaffold", "clients": 4, "participation": 2, "rounds": 3, "seed": 1,
    "local": {"lr": 0.1, "steps": 1, "batch_size": 8}, "checkpoint_every": 1,
}  # fmt: skip
VALUES = (
    None, True, 0, -1, 1.5, 10**30, 1e308, -1e308, "", "x", [], {}, [1], {"a": 1}, [None], "NaN", [[1]], "../..",
)  # fmt: skip


@cache
def run() -> Path:
    """A tiny run that was stopped after two of three rounds, with what can be measured of it."""
    from synthetic_runs import write_flatness, write_landscape

    from fedflat.experiments.files import make_experiment
    from fedflat.experiments.run import run_experiment

    place = Path(tempfile.mkdtemp()) / "run"
    rounds: list[int] = []
    run_experiment(
        make_experiment(SETTINGS),
        place,
        on_round=lambda round: rounds.append(round.index),
        stop=lambda: len(rounds) == 2,
    )
    write_flatness(place, 3, 0.1, 1)
    write_landscape(place, 3, 1.0)
    return place


def files() -> list[str]:
    """Their names, without locks and logs, which nothing is read from."""
    found = (path for path in sorted(run().rglob("*")) if path.is_file())
    return [str(path.relative_to(run())) for path in found if path.name not in ("lock", "log.txt")]


def seeds() -> Iterator[bytes]:
    """Every file as it is."""
    for name in files():
        yield name.encode() + b"\n" + (run() / name).read_bytes()


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Other values in JSON, other lines, other places of bytes."""
    name, _, content = data.partition(b"\n")
    if name.endswith((b".json", b".jsonl")):
        lines = content.split(b"\n") if name.endswith(b".jsonl") else [content]
        number = dice.randrange(len(lines))
        change = dice.randrange(4)
        if change == 0:
            lines.insert(dice.randrange(len(lines) + 1), lines[number])
        elif change == 1 and len(lines) > 1:
            del lines[number]
        else:
            lines[number] = _changed(lines[number], dice)
        content = b"\n".join(lines)
    elif content:
        at = dice.randrange(len(content))
        content = content[:at] + bytes([content[at] ^ (1 << dice.randrange(8))]) + content[at + 1 :]
    return name + b"\n" + content


def _changed(text: bytes, dice: random.Random) -> bytes:
    """JSON with another value somewhere, or without it."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return text
    place, holders = whole, []
    while isinstance(place, dict | list) and place:
        key = dice.choice(list(place) if isinstance(place, dict) else range(len(place)))
        holders.append((place, key))
        place = place[key]
    if not holders:
        return json.dumps(dice.choice(VALUES)).encode()
    holder, key = dice.choice(holders)
    if dice.random() < 0.2:
        del holder[key]
    else:
        holder[key] = dice.choice(VALUES)
    return json.dumps(whole).encode()


def check(data: bytes) -> None:
    """Read the run in every way; numbers under a checksum are those that were written, or are refused."""
    name, _, content = data.partition(b"\n")
    text = name.decode(errors="replace")
    if text not in files():  # a damaged name stands for some file, so that every case is read
        text = files()[crc32(name) % len(files())]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        shutil.copytree(run(), place)
        (place / text).write_bytes(content)
        problems = [problem for way in _readers(text) if (problem := _refusal(way, place)) is not None]
    if problems:
        raise problems[0]


def _refusal(way: Callable[[Path], object], place: Path) -> Exception | None:
    from fedflat import FedflatError

    try:
        way(place)
    except FedflatError as problem:
        return problem
    return None


# -- the ways to read a run ------------------------------------------------------------------------


def _metrics(place: Path) -> None:
    from fedflat.storage.metrics_file import read_metrics

    for number, row in enumerate(read_metrics(place)):
        assert row["index"] == number
        assert row.get("accuracy") is None or 0 <= row["accuracy"] <= 1


def _settings(place: Path) -> None:
    from fedflat.storage.run_files import read_settings

    read_settings(place)


def _experiment(place: Path) -> None:
    from fedflat.experiments.run import experiment_of, is_done

    experiment_of(place)
    assert not is_done(place)  # it never was


def _compared(place: Path) -> None:
    from fedflat.experiments.compare import as_latex, compare, find_runs, table

    groups = compare([place], 2, 0.1)  # before whatever else may catch
    assert len(compare(find_runs([place]), 2, 0.1)) == len(groups)
    as_latex(*table(groups, 2, 0.1))


def _reported(place: Path) -> None:
    from fedflat.report.content import Content
    from fedflat.report.reading import read_run

    read_run(place)
    json.dumps(Content([place], splits=False).page())


def _flatness(place: Path) -> None:
    from fedflat.experiments.measure_run import read_flatness, read_landscape

    read_flatness(place)
    read_landscape(place)


def _gone_on_with(place: Path) -> None:
    """As far as the first round: the server and the clients are where a sound checkpoint left them."""
    from fedflat import FlatModel, as_method
    from fedflat.experiments.run import experiment_of
    from fedflat.models import build_model
    from fedflat.server.server import Server
    from fedflat.storage.run_files import read_settings

    settings = read_settings(place, to_resume=True)
    experiment = experiment_of(place, to_run=True).with_defaults()
    flat = FlatModel(build_model("mlp", _data(), 1), torch.float32, "cpu")
    server = Server(flat.vector.clone(), as_method("scaffold"), 4, "samples", flat.read_buffers(), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # nothing here has to outlast a power cut
        patch.setattr("fedflat.storage.run_directory.environment", _environment)  # asks git, every time
        _open_state(place, settings, experiment.to_dict(), server)


def _open_state(place: Path, settings: dict[str, Any], experiment: dict[str, Any], server: Any) -> None:
    from fedflat.storage.run_directory import RunDirectory

    directory = RunDirectory(place, settings, resume=True, experiment=experiment)
    try:
        clients, rows = directory.open_state(server, None, "cpu")
        known = _known()
        assert len(rows) in known
        w, kept = known[len(rows)]
        assert server.w.equal(w), "another model than the one that was written"
        for client in clients.clients():
            assert any(clients.get(client)["control"].equal(vector) for vector in kept)
    finally:
        directory.close()


def _readers(name: str) -> tuple[Callable[[Path], None], ...]:
    """Those that look into a file of this name."""
    if name.startswith(("checkpoints", "state")):
        return (_gone_on_with,)
    if name in ("flatness.json", "landscape.json"):
        return (_flatness, _reported)
    if name == "metrics.jsonl":
        return (_metrics, _experiment, _compared, _reported, _gone_on_with)
    return (_settings, _experiment, _compared, _reported, _gone_on_with)


@cache
def _environment() -> dict[str, Any]:
    from fedflat.storage.environment import environment

    return environment()


@cache
def _data() -> Any:
    import fedflat as ff

    return ff.federate("digits", clients=4, seed=1)


@cache
def _known() -> dict[int, tuple[torch.Tensor, list[torch.Tensor]]]:
    """The models and the clients' states that were written, by rounds done; the model that it began with."""
    from fedflat import FlatModel
    from fedflat.models import build_model
    from fedflat.storage.checkpoint import read_checkpoint
    from fedflat.storage.client_store import ClientStore

    start = FlatModel(build_model("mlp", _data(), 1), torch.float32, "cpu").vector.clone()
    known: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {0: (start, [])}
    for path in sorted((run() / "checkpoints").glob("*.safetensors")):
        vectors, numbers = read_checkpoint(path)
        store = ClientStore.restore(run() / "state" / "clients", path.stem)
        kept = [store.get(client)["control"].clone() for client in store.clients()]
        store.close()
        known[numbers["rounds done"]] = vectors["w"], kept
    return known
