"""`fedflat federate`: keys that fit together, an app that is complete, and the tutorial, run as printed."""

import datetime
import ipaddress
import os
import re
import signal
import ssl
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from loopback import BIN, PATIENCE, end, free_port, living, wait_for
from test_flower_deployment import in_process, same_model

import fedflat as ff
from fedflat.cli import main
from fedflat.engines.flower.keys import make_keys
from fedflat.engines.flower.project import write_project
from fedflat.storage.metrics_file import read_metrics

DOCS = Path(__file__).parents[2] / "docs"


def fedflat(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedflat", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_keys_fit_together(tmp_path: Path, monkeypatch, capsys):
    place = tmp_path / "keys"
    words = ["federate", "keys", str(place), "--nodes", "2", "--host", "10.0.0.7", "--host", "link.example"]
    assert fedflat(monkeypatch, *words, "--days", "30") == 0
    assert "PRIVATE" not in capsys.readouterr().out
    authority, server = (
        x509.load_pem_x509_certificate((place / n).read_bytes()) for n in ("ca.crt", "server.pem")
    )
    server.verify_directly_issued_by(authority)
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("10.0.0.7")]
    assert names.get_values_for_type(x509.DNSName) == ["link.example"]
    left = server.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=29) < left <= datetime.timedelta(days=30)
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
        place / "server.pem", place / "server.key"
    )
    publics = set()
    for number in range(2):
        private = serialization.load_ssh_private_key((place / f"node-{number}").read_bytes(), None)
        public = serialization.load_ssh_public_key((place / f"node-{number}.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey) and isinstance(private.curve, ec.SECP384R1)
        assert private.public_key() == public
        publics.add((place / f"node-{number}.pub").read_bytes())
    assert len(publics) == 2
    for name in ("ca.key", "server.key", "node-0", "node-1"):
        assert stat.S_IMODE((place / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    connection = tomllib.loads((place / "superlink.toml").read_text())["superlink"]["federation"]
    assert connection == {"address": "10.0.0.7:8443", "root-certificates": str(place / "ca.crt")}


def test_keys_are_never_overwritten(tmp_path: Path, monkeypatch, capsys):
    make_keys(tmp_path, 1, ["localhost"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert fedflat(monkeypatch, "federate", "keys", str(tmp_path)) == 2
    assert "exists already and is not overwritten" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(ff.FedflatError, match="Name the server's host"):
        make_keys(tmp_path / "new", 1, [])


def test_an_app_is_complete_and_installs_nothing(tmp_path: Path, monkeypatch, capsys):
    project = tmp_path / "My Clinics"
    assert fedflat(monkeypatch, "federate", "init", str(project)) == 0
    assert "federated/data.py" in capsys.readouterr().out
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    assert settings["project"]["dependencies"] == []  # Flower would install them at every run
    assert settings["project"]["name"] == "my-clinics"
    assert not any("PROJECT" in path.read_text() for path in project.rglob("*") if path.is_file())
    from fedflat.engines.flower.server import read_settings

    read_settings(settings["tool"]["flwr"]["app"]["config"], "run")
    assert fedflat(monkeypatch, "federate", "init", str(project)) == 2
    assert "is there already and not empty" in capsys.readouterr().err
    with pytest.raises(ff.FedflatError, match="cannot name a project"):
        write_project(tmp_path / "123")


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    for name in [m for m in sys.modules if m.startswith(("flwr.", "fedflat.engines.flower."))]:
        monkeypatch.delitem(sys.modules, name)
    import fedflat.engines.flower

    with pytest.raises(ff.FedflatError, match=r'pip install "fedflat\[flower\]"'):
        fedflat.engines.flower.client_app  # noqa: B018


def script(page: str) -> str:
    """A page as one shell script: blocks that begin with a file's name are written there, the others are run."""
    lines = ["set -e"]
    for language, block in re.findall(r"^```(python|yaml|sh)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        if language == "sh":
            lines.append(block)
        else:
            name = block.splitlines()[0].removeprefix("# ")
            lines.append(f"cat > {name} <<'END OF FILE'\n{block}END OF FILE")
    return "\n".join(lines)


@pytest.mark.slow
def test_the_tutorial_runs_as_printed(tmp_path: Path):
    """From nothing to three nodes with private data: every command of docs/flower.md, in order."""
    text = script((DOCS / "flower.md").read_text("utf-8"))
    ports = {"8443": free_port(), "909$n": "$((BASE + n))"}
    base = free_port() // 10 * 10
    for old, new in ports.items():
        assert old in text
        text = text.replace(old, str(new))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FLWR_", "FEDFLAT_"))}
    env |= {
        "HOME": str(tmp_path),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "BASE": str(base),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        ["bash", "-c", text],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = process.communicate(timeout=PATIENCE)
        wait_for(lambda: not living(tmp_path), PATIENCE, lambda: f"still running: {living(tmp_path)}")
    finally:
        for pid in living(tmp_path):
            end(pid, signal.SIGKILL)
    logs = "\n".join(path.read_text("utf-8", "replace")[-2000:] for path in tmp_path.glob("*.log"))
    assert process.returncode == 0, told + logs
    rows = read_metrics(tmp_path / ".fedflat" / "runs" / "clinics")
    assert [row["clients"] for row in rows] == [[0, 1, 2]] * 3
    assert rows[-1]["reported"]["accuracy"] > max(0.6, rows[0]["reported"]["accuracy"])
    # what the next commands of the page show is what the clinics reported of the models after one and two rounds
    reported = [row["reported"]["accuracy"] for row in rows[1:]]
    assert (
        "reported by" in told and f"{50 * sum(reported):.2f}" in told and f"{100 * max(reported):.2f}" in told
    )
    assert (tmp_path / "report.html").stat().st_size > 1e6 and (tmp_path / "curves.png").exists()
    # nothing of a patient is where the server is
    for path in [*(tmp_path / ".fedflat" / "runs").rglob("*"), tmp_path / "superlink.log"]:
        if path.is_file():
            assert b"pressure" not in path.read_bytes(), path
    assert list((tmp_path / "clinic-0" / "state").rglob("client-0/*.safetensors"))


@pytest.mark.slow
def test_an_app_runs_in_flower_s_simulation_too(tmp_path: Path):
    """As it was written, with the same bits as in one process. Nothing is left of what Flower starts."""
    write_project(tmp_path / "demo")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FLWR_", "FEDFLAT_"))}
    env |= {"HOME": str(tmp_path), "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    env["RAY_ADDRESS"] = "local"  # not the cluster of another test, should there be one
    command = [BIN / "flwr", "run", "demo", "--stream", "--federation-config", "num-supernodes=3"]
    try:
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE
        )
        told = done.stdout + done.stderr
        place = tmp_path / ".fedflat" / "runs" / "demo"
        assert (place / "model.safetensors").exists(), told
        same_model(place, in_process("fedgmt", rounds=5, epochs=2))
        rows = read_metrics(place)
        assert rows[-1]["reported"]["accuracy"] > rows[0]["reported"]["accuracy"]
    finally:
        for pid in living(tmp_path):
            end(pid, signal.SIGKILL)
    wait_for(lambda: not living(tmp_path), PATIENCE, lambda: f"still running: {living(tmp_path)}")


def test_the_readme_of_an_app_has_the_commands_of_the_tutorial(tmp_path: Path):
    write_project(tmp_path / "clinics")
    flags = [
        set(re.findall(r"(?<=\s)--[a-z-]+", text))
        for text in (
            (tmp_path / "clinics" / "README.md").read_text(),
            (DOCS / "flower.md").read_text("utf-8"),
        )
    ]
    assert flags[0] <= flags[1]
