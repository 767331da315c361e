"""The report's Python side: what it reads, what it says is missing, how large it is, and what it lets out."""

import base64
import hashlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import yaml
from synthetic_runs import CONFIG, grow, made_round, made_run, write_landscape

import fedflat as ff
from fedflat.cli import main
from fedflat.errors import MissingExtra
from fedflat.experiments.compare import compare, find_runs
from fedflat.experiments.files import make_experiment
from fedflat.experiments.presets import find_preset
from fedflat.experiments.run import run_experiment
from fedflat.experiments.scale import small
from fedflat.report import page as page_module
from fedflat.report.content import Content
from fedflat.report.page import SCRIPTS, write_report
from fedflat.report.series import columns, rounded, thinned
from fedflat.report.server import ReportServer, is_loopback

EVIL = "</script><img src=x onerror=alert(1)><!-- {{}} %{x} <b>&amp;"


class Elements(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""
        self._script: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.links += [value for name, value in attrs if name in ("src", "href", "action")]
        if tag == "meta" and ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"]
        if tag == "script":
            self._script = []

    def handle_data(self, data):
        if self._script is not None:
            self._script.append(data)

    def handle_endtag(self, tag):
        if tag == "script" and self._script is not None:
            self.scripts.append("".join(self._script))
            self._script = None


def shown(*places: Path, **options) -> dict:
    return Content(list(places), **{"splits": False, **options}).page()


def written(place: Path, out: Path, **options) -> str:
    write_report([place], out, **{"splits": False, **options})
    return out.read_text("utf-8")


# -- what it shows ---------------------------------------------------------------------------------


def test_statistics_are_those_of_compare(tmp_path):
    for method in ("fedavg", "fedgmt"):
        for seed in (0, 1):
            made_run(tmp_path / method / f"seed-{seed}", method, seed)
    content = shown(tmp_path, last=5, target=0.6)
    groups = compare(find_runs([tmp_path]), last=5, target=0.6)
    assert [group["name"] for group in content["groups"]] == [group.name for group in groups]
    for ours, theirs in zip(content["groups"], groups, strict=True):
        assert ours["summary"]["last"] == pytest.approx(theirs.last, rel=1e-3)
        assert ours["summary"]["best"] == pytest.approx(theirs.best, rel=1e-3)
        assert ours["summary"]["rounds_to"] == pytest.approx(theirs.rounds_to, rel=1e-3)
    rows = [json.loads(line) for line in (tmp_path / "fedavg/seed-1/metrics.jsonl").open()]
    run = next(run for run in content["runs"] if run["id"].endswith("fedavg/seed-1"))
    assert run["summary"]["last"][0] == pytest.approx(
        np.mean([row["accuracy"] for row in rows[-5:]]), rel=1e-3
    )
    assert run["summary"]["bytes_down"] == sum(row["bytes_down"] for row in rows)
    assert run["axes"]["bytes"] == list(np.cumsum([row["bytes_down"] + row["bytes_up"] for row in rows]))
    assert run["axes"]["rounds"] == list(range(1, 51))
    assert run["series"]["accuracy"] == pytest.approx([row["accuracy"] for row in rows], rel=1e-3)
    assert run["series"]["measures.distance"][9] == pytest.approx(0.3)


def test_long_runs_are_thinned_to_their_tests():
    rows = [made_round("fedavg", 0, index, tested=index % 5 == 4) for index in range(12_000)]
    kept = thinned(rows)
    assert len(kept) <= 1000 and kept[-1] == len(rows) - 1
    assert all(rows[n]["accuracy"] is not None for n in kept)
    found = columns(rows)
    assert found["thinned"] and len(found["axes"]["seconds"]) == len(kept)
    assert found["axes"]["seconds"][-1] == pytest.approx(sum(row["seconds"] for row in rows))
    assert all(len(column) == len(kept) for column in found["series"].values())
    assert thinned(rows[:900]) == list(range(900))
    assert (rounded(0.123456), rounded(12345.0, 7), rounded(1.0)) == (0.1235, 12345, 1)


def test_a_real_training_has_all_its_parts(tmp_path):
    content = {**CONFIG, "clients": 6, "participation": 3, "rounds": 2, "method": "fedwmsam", "seed": 3}
    content["local"] = {**content["local"], "epochs": 1}
    run_experiment(make_experiment(content), tmp_path / "run")
    (run,) = shown(tmp_path)["runs"]
    assert (run["finished"], run["done"], run["notes"]) == (True, 2, [])
    assert {"accuracy", "loss", "train_loss", "lr", "client_accuracy.worst_decile"} <= set(run["series"])
    assert "scalars.alpha" in run["series"]
    again = yaml.safe_load(run["repeat"]["experiment"])
    assert make_experiment(again).with_defaults() == make_experiment(content).with_defaults().model_copy(
        update={"engine": again.get("engine")}
    )


def test_splits_are_the_experiments_own(tmp_path):
    made_run(tmp_path / "a", "fedavg", 0)
    made_run(tmp_path / "b", "fedgmt", 0)
    made_run(tmp_path / "c", "fedavg", 1)
    made_run(tmp_path / "d", "fedavg", 0, dataset="cifar10", data=str(tmp_path))
    content = shown(tmp_path, splits=True)
    of = {Path(run["id"]).name: run["split"] for run in content["runs"]}
    assert of["a"] == of["b"] != of["c"]
    pictures = {split["id"]: split for split in content["splits"]}
    federation = ff.federate("digits", "dirichlet:0.1", clients=20, seed=1)
    counts = np.array(pictures[of["c"]]["counts"])
    assert counts.sum(axis=1).tolist() == federation.sizes
    labels = federation.client(7).stored()[1]
    assert counts[7].tolist() == np.bincount(labels, minlength=10).tolist()
    assert "no cifar10 here" in pictures[of["d"]]["missing"]


def test_a_cell_of_a_paper_is_recognised(tmp_path):
    table = find_preset("fedwmsam/table1")
    cell = next(c for c in table.cells() if (c.row, c.column) == ("FedSAM", "fashion-mnist/dirichlet-0.1"))
    settings = {key: value for key, value in cell.content.items() if key not in ("method", "rounds")}
    for seed in (0, 1):
        made_run(tmp_path / f"full-{seed}", cell.content["method"], seed, rounds=500, **settings)
    (tiny,) = small([cell])
    settings = {key: value for key, value in tiny.items() if key not in ("method", "rounds")}
    made_run(tmp_path / "small", tiny["method"], 0, rounds=tiny["rounds"], **settings)
    content = shown(tmp_path)
    entries = [entry for entry in content["published"] if entry["preset"] == "fedwmsam/table1"]
    assert [(e["row"], e["column"], e["seeds"]) for e in entries] == [("FedSAM", cell.column, 2)]
    assert entries[0]["paper"] == cell.published
    late = [
        [json.loads(line)["accuracy"] for line in (tmp_path / f"full-{seed}/metrics.jsonl").open()][-100:]
        for seed in (0, 1)
    ]
    assert entries[0]["ours"] == pytest.approx(np.mean(late), rel=1e-3)
    full = next(run for run in content["runs"] if run["id"].endswith("full-0"))
    commands = [one["command"] for one in full["repeat"]["commands"]]
    assert "fedflat reproduce fedwmsam/table1 --cells fashion-mnist/dirichlet-0.1 --rows FedSAM" in commands


# -- what is missing -------------------------------------------------------------------------------


def empty_metrics(path: Path) -> None:
    (path / "metrics.jsonl").write_text("")


def no_metrics(path: Path) -> None:
    (path / "metrics.jsonl").unlink()


def broken_metrics(path: Path) -> None:
    (path / "metrics.jsonl").write_text('{"index": 0}\nnonsense\n{"index": 2}\n')


def strange_metrics(path: Path) -> None:
    (path / "metrics.jsonl").write_text('[1, 2]\n{"index": "a"}\n')


def broken_run_json(path: Path) -> None:
    (path / "run.json").write_text('{"format": 1, ')


def no_run_json(path: Path) -> None:
    (path / "run.json").unlink()


def no_experiment(path: Path) -> None:
    (path / "experiment.yaml").unlink()


def broken_experiment(path: Path) -> None:
    (path / "experiment.yaml").write_text("a: [1\nb: }")


def strange_experiment(path: Path) -> None:
    (path / "experiment.yaml").write_text("- just\n- a list\n")


def broken_flatness(path: Path) -> None:
    (path / "flatness.json").write_text("{")


def newer_landscape(path: Path) -> None:
    (path / "landscape.json").write_text('{"format": 2}')


def ragged_landscape(path: Path) -> None:
    write_landscape(path, 50, 1.0)
    content = json.loads((path / "landscape.json").read_text())
    content["losses"]["train"].pop()
    (path / "landscape.json").write_text(json.dumps(content))


def nothing_tested(path: Path) -> None:
    (path / "metrics.jsonl").write_text('{"index": 0, "accuracy": null, "train_loss": 1.0}\n')


@pytest.mark.parametrize(
    ("harm", "note"),
    [
        (empty_metrics, "No round is finished yet"),
        (no_metrics, "No round is finished yet"),
        (broken_metrics, "line 2, is not JSON"),
        (strange_metrics, "line 1, is no round"),
        (broken_run_json, "run.json cannot be read"),
        (no_run_json, "There is no run.json"),
        (no_experiment, "There is no experiment.yaml"),
        (broken_experiment, "experiment.yaml cannot be read"),
        (strange_experiment, "experiment.yaml cannot be read: an experiment is a list"),
        (broken_flatness, "flatness.json cannot be read"),
        (newer_landscape, "landscape.json was written by another version"),
        (ragged_landscape, "do not fit its axes"),
        (nothing_tested, "there is no accuracy"),
    ],
)
def test_what_is_missing_is_said(tmp_path, harm, note):
    made_run(tmp_path / "good", "fedgmt")
    harm(made_run(tmp_path / "harmed", "fedavg"))
    content = shown(tmp_path, splits=True)
    notes = {Path(run["id"]).name: run["notes"] for run in content["runs"]}
    assert notes["good"] == []
    assert any(note in sentence for sentence in notes["harmed"]), notes["harmed"]
    assert written(tmp_path, tmp_path / "report.html").startswith("<!doctype html>")


def test_unfinished_runs_and_other_versions(tmp_path):
    made_run(tmp_path / "going", "fedavg", rounds=50, done=20)
    for name, version in (("newer", 2), ("older", 0)):
        run = made_run(tmp_path / name, "fedsam")
        about = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**about, "format": version}))
    content = shown(tmp_path)
    assert [Path(run["id"]).name for run in content["runs"]] == ["going", "older"]
    assert "Not finished: 20 of 50 rounds." in content["runs"][0]["notes"]
    assert content["runs"][0]["repeat"]["commands"][0]["command"] == f"fedflat resume {tmp_path / 'going'}"
    (left,) = content["left"]
    assert left["path"].endswith("newer") and "newer version of fedflat" in left["why"]


def test_no_run_is_one_sentence(tmp_path, monkeypatch, capsys):
    run = made_run(tmp_path / "run", "fedsam")
    (run / "run.json").write_text('{"format": 99}')
    (tmp_path / "nothing").mkdir()
    for place, sentence in (
        (tmp_path / "nothing", "There is no run to show in"),
        (tmp_path / "nowhere", "There is no directory"),
        (run, "written by a newer version"),
    ):
        out = tmp_path / "report.html"
        monkeypatch.setattr(sys, "argv", ["fedflat", "report", str(place), "-o", str(out)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert sentence in " ".join(capsys.readouterr().err.split())
        assert not out.exists()


def test_without_plotly_the_extra_is_named(tmp_path, monkeypatch):
    made_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page_module.plotly_script.cache_clear()
    with pytest.raises(MissingExtra, match=r"fedflat\[report\]"):
        write_report([tmp_path], tmp_path / "report.html")


# -- the page --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, pytest.param(60, marks=pytest.mark.slow)])
def test_any_number_of_runs(tmp_path, number):
    methods = ["fedavg", "fedsam", "fedgmt", "fedwmsam", "fednsam", "scaffold"]
    for n in range(number):
        made_run(tmp_path / "runs" / f"{n:02d}", methods[n % 6], n // 6, rounds=30)
    text = written(tmp_path / "runs", tmp_path / "report.html")
    data = json.loads(Elements(text).scripts[0])
    assert len(data["runs"]) == number
    assert len({run["id"] for run in data["runs"]}) == number
    assert sum(len(group["runs"]) for group in data["groups"]) == number


@pytest.mark.slow
def test_twenty_long_runs_stay_under_eight_megabytes(tmp_path):
    for n in range(20):
        method = ["fedavg", "fedsam", "fedgmt", "fedwmsam"][n % 4]
        made_run(tmp_path / f"{n}", method, n // 4, rounds=500, flatness=True, landscape=True)
    write_report([tmp_path], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 8e6


def test_no_text_of_a_run_becomes_markup(tmp_path):
    made_run(tmp_path / "good", "fedgmt")
    before = Elements(written(tmp_path, tmp_path / "before.html"))
    made_run(tmp_path / EVIL.replace("/", "∕"), EVIL, partition=EVIL)
    after = Elements(written(tmp_path, tmp_path / "after.html"))
    assert after.tags == before.tags and after.handlers == []
    data = json.loads(after.scripts[0])
    assert EVIL in {run["config"]["method"] for run in data["runs"]}
    assert after.scripts[1:] == before.scripts[1:]


def test_the_page_may_run_its_own_scripts_and_reach_nobody(tmp_path):
    made_run(tmp_path / "run")
    page = Elements(written(tmp_path, tmp_path / "report.html"))
    rules = dict(rule.split(" ", 1) for rule in page.policy.split("; "))
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'none'"
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in page.scripts[1:]]
    assert rules["script-src"].split() == [f"'sha256-{one}'" for one in hashes]
    assert all(link.startswith("#") or link == "data:," for link in page.links)


def test_every_part_of_the_page_is_used():
    folder = resources.files("fedflat.report") / "page"
    names = {entry.name for entry in folder.iterdir()}
    assert names == {*SCRIPTS, "page.html", "page.css"}


# -- watching --------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path):
    made_run(tmp_path / "runs" / "a", "fedavg", done=10)
    with ReportServer(Content([tmp_path / "runs"], splits=False), "127.0.0.1", 0, 1.0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path: str, **headers: str) -> tuple[int, dict, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.putrequest("GET", path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    result = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return result


def test_it_serves_the_page_and_its_data_and_nothing_else(server):
    status, headers, text = ask(server, "/")
    assert status == 200 and headers["X-Content-Type-Options"] == "nosniff"
    page = Elements(text.decode())
    assert "connect-src 'self'" in page.policy
    assert ask(server, "/data.json")[0] == 200
    for path in ("/a", "/../", "/a/run.json", "/%2e%2e/etc/passwd", "//etc/passwd", "/data.json/x", "/runs"):
        assert ask(server, path)[0] == 404, path


def test_it_answers_only_to_its_own_name(server):
    port = server.server_address[1]
    for good in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}"):
        assert ask(server, "/data.json", Host=good)[0] == 200, good
    for bad in (
        f"evil.example:{port}",
        "evil.example",
        "",
        f"127.0.0.1.evil.example:{port}",
        "localhost.evil",
    ):
        assert ask(server, "/data.json", Host=bad)[0] == 403, bad


def test_it_follows_runs_and_finds_new_ones(server, tmp_path):
    _, headers, text = ask(server, "/data.json")
    assert [run["done"] for run in json.loads(text)["runs"]] == [10]
    assert ask(server, "/data.json", If_None_Match=headers["ETag"])[0] == 304
    grow(tmp_path / "runs" / "a", "fedavg", 0, range(10, 15))
    made_run(tmp_path / "runs" / "deep" / "b", "fedsam", done=3)
    status, _, text = ask(server, "/data.json", If_None_Match=headers["ETag"])
    assert status == 200
    assert [run["done"] for run in json.loads(text)["runs"]] == [15, 3]


def test_watch_prints_its_address_and_ends_with_ctrl_c(tmp_path):
    made_run(tmp_path / "a", "fedavg")
    command = [sys.executable, "-m", "fedflat", "watch", str(tmp_path), "--no-splits"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    address = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
    assert address, line
    connection = http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=20)
    connection.request("GET", "/data.json")
    assert len(json.loads(connection.getresponse().read())["runs"]) == 1
    connection.close()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "") and "Ended" in out


def test_other_machines_are_let_in_only_when_asked_for():
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.4", "myhost")))
