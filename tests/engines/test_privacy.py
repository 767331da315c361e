"""Noise on uploads, what it covers, and what is said about what leaves a client."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_flower_grid import alone, federation, grid_at, network, train

import fedflat as ff
from fedflat.cli import main
from fedflat.client.round import ClientRound
from fedflat.core.messages import Download, Upload
from fedflat.engines.flower.privacy import spent, uncovered
from fedflat.engines.flower.secret import node_secret

DOCS = Path(__file__).parents[2] / "docs"
STEPS = ff.LocalSGD(lr=0.1, steps=3, batch_size=8)


def one_upload(method: str, secret: bytes | None = None, size: int = 0, round: int = 0) -> Upload:
    """What a client uploads, from a large model, for statistics of the noise."""
    model = ff.FlatModel(network() if not size else torch.nn.Linear(6, size))
    training = ClientRound(model, ff.as_method(method), STEPS, torch.nn.functional.cross_entropy, seed=0)
    training.secret = secret
    values = {name: torch.zeros(model.size) for name in ff.as_method(method).down}
    return training.run(1, federation().client(1), Download(round, 0.1, model.vector.clone(), values), {})


def test_without_noise_uploads_are_clipped_and_no_more():
    plain, clipped = (
        one_upload("scaffold"),
        one_upload("scaffold + private-uploads(clip=0.01, noise=0, clip_extra=0.02)"),
    )
    for ours, theirs, length in (
        (clipped.update, plain.update, 0.01),
        (clipped.vectors["control"], plain.vectors["control"], 0.02),
    ):
        assert ours.norm().item() == pytest.approx(length, rel=1e-5)
        assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0).item() == pytest.approx(
            1.0, abs=1e-5
        )
    long = one_upload("scaffold + private-uploads(clip=1000, noise=0)")
    assert long.update.equal(plain.update)
    assert clipped.state["control"].equal(plain.state["control"])  # what stays is not touched


def test_the_noise_is_gaussian_of_the_stated_deviation_and_independent():
    noise = 2.0
    upload = one_upload("scaffold + private-uploads(clip=0.5, noise=2, clip_extra=0.25)", size=20000)
    quiet = one_upload("scaffold + private-uploads(clip=0.5, noise=0, clip_extra=0.25)", size=20000)
    update = upload.update - quiet.update
    control = upload.vectors["control"] - quiet.vectors["control"]
    for drawn, clip in ((update, 0.5), (control, 0.25)):
        drawn = drawn / (noise * clip)
        n = len(drawn)
        assert abs(drawn.mean().item()) < 5 / math.sqrt(n)
        assert drawn.std().item() == pytest.approx(1.0, abs=5 / math.sqrt(2 * n))
        assert (drawn.abs() < 1).float().mean().item() == pytest.approx(0.6827, abs=5 * 0.47 / math.sqrt(n))
    assert abs(torch.corrcoef(torch.stack([update, control]))[0, 1].item()) < 5 / math.sqrt(len(update))
    other = one_upload("scaffold + private-uploads(clip=0.5, noise=2, clip_extra=0.25)", size=20000, round=1)
    assert abs(torch.corrcoef(torch.stack([upload.update, other.update]))[0, 1].item()) < 0.05


def test_what_else_would_leave_is_withheld():
    upload = one_upload("fedgmt + private-uploads(clip=1, noise=1)")
    assert upload.samples == 1
    assert math.isnan(upload.loss)
    assert (upload.forward, upload.backward, upload.spared_forward, upload.spared_backward) == (0, 0, 0, 0)
    assert upload.steps == 3


@pytest.mark.parametrize("engine", ["inprocess", ff.Workers(2)])
def test_every_engine_adds_the_same_noise(engine: Any):
    method = "scaffold + private-uploads(clip=0.5, noise=0.1)"
    run = alone(method, rounds=3, engine=engine)
    expected = alone(method, rounds=3)
    assert run.server.w.equal(expected.server.w)
    assert not run.server.w.equal(alone("scaffold", rounds=3).server.w)


def test_a_node_draws_from_its_secret_and_the_same_question_gets_the_same_answer(tmp_path: Path):
    method = "scaffold + private-uploads(clip=0.5, noise=1)"
    runs = [train(method, grid_at(tmp_path / name), rounds=2) for name in ("a", "a", "b")]
    assert runs[0].server.w.equal(runs[1].server.w)  # asked again, a node adds the same noise
    assert not runs[0].server.w.equal(runs[2].server.w)  # another secret, other noise
    assert not runs[0].server.w.equal(alone(method, rounds=2).server.w)  # nobody can draw it from the seed
    assert all(row["reported"] is None for row in runs[0].history)
    secret = node_secret(tmp_path / "a")
    assert len(secret) == 32 and secret == node_secret(tmp_path / "a") != node_secret(tmp_path / "b")
    assert (tmp_path / "a" / "secret").stat().st_mode & 0o077 == 0
    # another question in the same round has other noise, so that a difference of answers tells nothing
    noises = []
    for clip in (0.5, 0.25):
        texts = [f"scaffold + private-uploads(clip={clip}, noise={noise})" for noise in (1, 0)]
        noisy, quiet = (one_upload(text, secret, size=2000).update for text in texts)
        noises.append((noisy - quiet) / clip)
    assert abs(torch.corrcoef(torch.stack(noises))[0, 1].item()) < 0.1
    (tmp_path / "b" / "secret").write_bytes(b"short")
    with pytest.raises(ff.FedflatError, match="secret is damaged: remove it"):
        node_secret(tmp_path / "b")


# -- ε ---------------------------------------------------------------------------------------------


def exact_delta(epsilon: float, multiplier: float) -> float:
    """δ of the Gaussian mechanism with sensitivity 1, from its definition (Balle and Wang 2018, Theorem 8)."""

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    half = 1 / (2 * multiplier)
    return phi(half - epsilon * multiplier) - math.exp(epsilon) * phi(-half - epsilon * multiplier)


@pytest.mark.parametrize(
    ("method", "vectors"), [("fedavg", 1), ("scaffold", 2), ("fedsmoo", 2), ("fedgmt", 1), ("fedwmsam", 1)]
)
def test_epsilon_is_that_of_all_vectors_of_all_rounds(method: str, vectors: int):
    noisy = ff.as_method(f"{method} + private-uploads(clip=1, noise=20)")
    cost = spent(noisy, STEPS, ff.Everyone(), clients=7, rounds=30, delta=1e-5)
    assert (cost.vectors, cost.rounds) == (vectors, 30)
    assert exact_delta(cost.epsilon, 20 / (2 * math.sqrt(30 * vectors))) == pytest.approx(1e-5, rel=1e-3)


def test_epsilon_is_that_of_the_busiest_client():
    method = ff.as_method("fedavg + private-uploads(noise=10)")
    schedule = ff.Schedule([[0, 1], [0], [0, 2], [1]])
    assert spent(method, STEPS, schedule, clients=3, rounds=4).rounds == 3
    few = spent(method, STEPS, ff.Uniform(2), clients=100, rounds=50)
    assert 1 <= few.rounds <= 6


def test_no_epsilon_where_something_uncovered_leaves():
    noisy = ff.as_method("fedavg + private-uploads(noise=1)")
    epochs = ff.LocalSGD(epochs=2)
    cases = [
        (ff.fedavg(), STEPS, False, "uploads vectors as they are"),
        (ff.as_method("fedavg + private-uploads(noise=0)"), STEPS, False, "noise=0 hides nothing"),
        (noisy, epochs, False, "give steps, not epochs"),
        (noisy, STEPS, True, "BatchNorm statistics"),
    ]
    for method, local, norm, reason in cases:
        assert len(uncovered(method, local, "average", norm)) == 1
        with pytest.raises(ff.FedflatError, match=f"No ε can be stated for .*{reason}"):
            spent(method, local, ff.Everyone(), 3, 5, has_buffers=norm)
    assert uncovered(noisy, STEPS, "server", True) == []
    with pytest.raises(ff.FedflatError, match="delta=2"):
        spent(noisy, STEPS, ff.Everyone(), 3, 5, delta=2)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ff.FedflatError, match=r'pip install "fedflat\[privacy\]"'):
        spent(ff.as_method("fedavg + private-uploads"), STEPS, ff.Everyone(), 3, 5)


# -- what leaves, as it is said and as it is -------------------------------------------------------


def test_the_tables_in_the_documentation_are_current(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    from make_privacy import TABLES

    page = (DOCS / "privacy.md").read_text("utf-8")
    for mark, make in TABLES.items():
        written = re.search(rf"<!-- {mark} -->\n(.*)\n<!-- /{mark} -->", page, re.DOTALL)
        assert written is not None
        assert written[1].strip() == make(), "run: python docs/make_privacy.py"


def test_the_command_lines_of_the_page(tmp_path: Path, monkeypatch, capsys):
    page = (DOCS / "privacy.md").read_text("utf-8")
    (experiment,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (commands,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (tmp_path / "private.yaml").write_text(experiment)
    monkeypatch.chdir(tmp_path)
    for line in commands.splitlines():
        monkeypatch.setattr(sys, "argv", line.split())
        with pytest.raises(SystemExit) as stop:
            main()
        told = capsys.readouterr()
        assert stop.value.code == 0, told.err
        if " privacy " in line:
            assert "a client uploads update, control" in told.out
            epsilon = float(re.search(r"ε = ([\d.]+)", told.out)[1])
            rounds = int(re.search(r"each of (\d+) rounds", told.out)[1])
            assert exact_delta(epsilon, 4 / (2 * math.sqrt(2 * rounds))) == pytest.approx(1e-5, rel=0.02)
    (tmp_path / "plain.yaml").write_text("method: scaffold\n")
    monkeypatch.setattr(sys, "argv", ["fedflat", "privacy", "plain.yaml"])
    with pytest.raises(SystemExit) as stop:
        main()
    told = capsys.readouterr()
    assert stop.value.code == 2
    assert "It keeps control" in told.out
    assert "No ε can be stated for SCAFFOLD" in told.err


def test_the_table_of_scale_is_current(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import make_scale

    page = (DOCS / "scale.md").read_text("utf-8")
    assert make_scale.table() in page, "run: python docs/make_scale.py"
