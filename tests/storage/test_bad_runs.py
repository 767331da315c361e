"""Among good runs one that was damaged or edited: it is named and left out, and alone it is a sentence."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import made_run

from fedflat.report.content import Content

Fedflat = Callable[..., tuple[int, str, str]]


def row(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        lines[1] = json.dumps({**json.loads(lines[1]), **changes})
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    return change


def file(name: str, content: str | bytes) -> Callable[[Path], None]:
    return lambda run: (
        (run / name).write_bytes(content.encode() if isinstance(content, str) else content) and None
    )


DAMAGES: dict[str, Callable[[Path], None]] = {
    "yaml: a list": file("experiment.yaml", "- 1\n"),
    "yaml: a date": file("experiment.yaml", "rounds: !!timestamp 2001-13-45\n"),
    "yaml: a tag": file("experiment.yaml", "rounds: !!int x\n"),
    "yaml: brackets": file("experiment.yaml", "method: " + "[" * 5000),
    "yaml: an alias of itself": file("experiment.yaml", "method: &a [*a]\n"),
    "yaml: no text": file("experiment.yaml", bytes(range(256))),
    "yaml: keys of two kinds": file("experiment.yaml", "method: {fedavg: {1: 2, a: 3}}\n"),
    "json: a number": file("run.json", '{"format": ' + "9" * 5000 + "}"),
    "json: brackets": file("run.json", "[" * 100_000),
    "json: a list": file("run.json", "[]"),
    "json: no text": file("run.json", bytes(range(128, 256))),
    "metrics: a list": file("metrics.jsonl", "[]\n[]\n"),
    "metrics: no index": row(index=None),
    "metrics: words": row(accuracy="high", seconds=[]),
    "metrics: measures": row(measures=3),
    "metrics: clients": row(client_accuracy={"worst_decile": None}),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("good")
    for method in ("fedavg", "fedsam"):
        made_run(place / method, method, rounds=3, flatness=True, landscape=True)
    return place


@pytest.fixture
def runs(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "runs")
    made_run(tmp_path / "runs" / "worse", "scaffold", rounds=3, flatness=True, landscape=True)
    return tmp_path / "runs"


def one_line(told: str) -> bool:
    return told.count("\n") == 1 and "Traceback" not in told


@pytest.mark.parametrize("kind", DAMAGES)
def test_one_bad_run_is_named_and_left_out(kind: str, runs: Path, fedflat: Fedflat, tmp_path: Path):
    bad = runs / "worse"
    DAMAGES[kind](bad)
    code, said, errors = fedflat("compare", runs)
    assert (code, errors) == (0, "")
    assert "fedavg" in said and "fedsam" in said and "scaffold" not in said
    [note] = [line for line in said.splitlines() if "Left out" in line]
    assert note.startswith(f"Note: Left out: {bad}")
    code, _, errors = fedflat("compare", bad)
    assert code == 2 and one_line(errors) and str(bad) in errors
    for command in ("resume", "flatness", "landscape"):
        code, _, errors = fedflat(command, bad)
        assert code == 2 and one_line(errors) and str(bad) in errors, (command, errors)
    page = Content([runs], splits=False).page()
    shown = {Path(run["id"]).name: run["notes"] for run in page["runs"]}
    assert {"fedavg", "fedsam"} <= set(shown)
    left = [entry["path"] for entry in page["left"]]
    assert left == [str(bad)] or shown["worse"], "nothing is said of it"


@pytest.mark.parametrize("kind", ["yaml: a tag", "json: a number", "metrics: words"])
def test_figures_without_the_bad_run(kind: str, runs: Path, fedflat: Fedflat, tmp_path: Path):
    DAMAGES[kind](runs / "worse")
    for command in (("curves",), ("radius",), ("landscape",), ("target", "--target", "0.1")):
        out = tmp_path / f"{command[0]}.svg"
        code, said, errors = fedflat("figure", *command[:1], runs, *command[1:], "--out", out)
        assert (code, errors) == (0, ""), command
        assert f"Note: Left out: {runs / 'worse'}" in said
        words = re.findall(r"<!-- (.*?) -->", out.read_text())
        assert any("FedSAM" in word for word in words) and not any("caffold" in word for word in words)


def test_a_run_that_has_just_begun_stops_no_figure(runs: Path, fedflat: Fedflat, tmp_path: Path):
    (runs / "worse" / "metrics.jsonl").write_text("")
    for command in (("curves",), ("sensitivity", "--by", "method"), ("target",)):
        out = tmp_path / f"{command[0]}.svg"
        code, said, errors = fedflat("figure", *command[:1], runs, *command[1:], "--out", out)
        assert (code, errors) == (0, ""), command
        assert command[0] == "target" or "has no accuracy yet: no round has been tested." in said
        assert out.stat().st_size > 0
    code, _, errors = fedflat("figure", "curves", runs / "worse", "--out", tmp_path / "alone.svg")
    assert code == 2 and one_line(errors) and "no round has been tested" in errors


@pytest.mark.parametrize("name", ["flatness.json", "landscape.json"])
@pytest.mark.parametrize(
    "content", ["[]", "{}", "[" * 100_000, '{"format": "x"}', '{"format": ' + "9" * 5000 + "}"]
)
def test_bad_measurements(name: str, content: str, runs: Path, fedflat: Fedflat, tmp_path: Path):
    (runs / "worse" / name).write_text(content)
    command = "radius" if name == "flatness.json" else "landscape"
    code, said, errors = fedflat("figure", command, runs, "--out", tmp_path / "a.svg")
    assert (code, errors) == (0, "")
    assert f"Left out: {runs / 'worse' / name}" in said
    code, _, errors = fedflat("figure", command, runs / "worse", "--out", tmp_path / "b.svg")
    assert code == 2 and one_line(errors)


# -- paths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["compare", "report", "resume", "flatness", "run", "sweep", "privacy", "figure"]
)
def test_names_that_no_system_has(command: str, fedflat: Fedflat, tmp_path: Path):
    arguments = ("figure", "curves", "--out", tmp_path / "a.svg") if command == "figure" else (command,)
    code, _, errors = fedflat(*arguments, "a" * 5000)
    assert code == 2 and one_line(errors) and "File name too long" in errors


# -- brackets ----------------------------------------------------------------------------------------


def test_brackets_and_colons_are_printed_as_they_are(fedflat: Fedflat, tmp_path: Path):
    """Rich would take [red] for a colour, [/] for its end and :boom: for a picture."""
    place = tmp_path / "[red]a[/] :boom: [b" / "[link=x]"
    first, second = (made_run(place / method, method, rounds=2) for method in ("fedavg", "fedsam"))
    sets = ("--rounds", 1, "--clients", 3, "--participation", 1, "--method", "fedavg", "--out", place / "run")
    words = {
        ("compare", place, "--out", place / "t.csv"): f"Written to {place / 't.csv'}",
        ("report", place, "--out", place / "r.html", "--no-splits"): f"2 runs: {place / 'r.html'}",
        ("figure", "curves", place, "--out", place / "c.png"): f"Drawn to {place / 'c.png'}",
        ("run", *sets): f"Written to {place / 'run'}",
        ("resume", place / "run"): f"{place / 'run'} is done",
        ("datasets", "--data", place): "digits  ships with fedflat",
        ("federate", "init", place / "app"): f"{place / 'app' / 'README.md'} says how to start",
    }
    for command, says in words.items():
        code, said, errors = fedflat(*command)
        assert (code, errors) == (0, ""), command
        assert says in said, command
    bad = {
        ("run", place / "[/red].yaml"): place / "[/red].yaml",
        ("sweep", place / "[/].yaml"): place / "[/].yaml",
        ("tune", place / "[/].yaml", "--vary", "seed=1,2"): place / "[/].yaml",
        ("privacy", place / "[/].yaml"): place / "[/].yaml",
        ("compare", place / "[/x]"): place / "[/x]",
        ("report", place / "[/x]"): place / "[/x]",
        ("resume", place / "[/x]"): place / "[/x]",
        ("flatness", first): first,
        ("landscape", second): second,
        ("split", place / "[/x].csv", "iid"): place / "[/x].csv",
    }
    for command, named in bad.items():
        code, _, errors = fedflat(*command)
        assert code == 2 and str(named) in errors and one_line(errors), (command, errors)


# -- hosts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["ü" * 70, "a b", "", 'a"\nb = "', "a..b"])
def test_hosts_that_are_none(host: str, good: Path, fedflat: Fedflat, tmp_path: Path):
    pytest.importorskip("plotly")
    pytest.importorskip("cryptography")
    code, _, errors = fedflat("federate", "keys", tmp_path / "keys", "--host", host)
    assert code == 2 and one_line(errors) and "is no name of a host" in errors
    assert not (tmp_path / "keys").exists()
    if host:  # an empty one is every address
        code, _, errors = fedflat("watch", good, "--no-splits", "--host", host)
        assert code == 2 and one_line(errors) and "Nothing can be served at" in errors


def test_a_host_in_other_letters(fedflat: Fedflat, tmp_path: Path):
    """As certificates and Flower have it: RFC 3490 gives this very name."""
    x509 = pytest.importorskip("cryptography.x509")
    assert fedflat("federate", "keys", tmp_path, "--nodes", 1, "--host", "bücher.example")[0] == 0
    certificate = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["xn--bcher-kva.example"]
    assert 'address = "xn--bcher-kva.example:8443"' in (tmp_path / "superlink.toml").read_text()
