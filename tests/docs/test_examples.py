"""Every example runs, and what it prints is true."""

import importlib.util
import re
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fedflat as ff

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def printed(name: str, rounds: int, place: Path) -> str:
    """What a script prints, run from any folder as a person would."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--rounds", str(rounds)]
    ended = subprocess.run(command, cwd=place, capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert list(place.iterdir()) == []  # it leaves nothing behind
    return ended.stdout


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- scripts ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_methods_are_compared_by_the_numbers_of_their_runs(tmp_path: Path):
    table = printed("compare_methods", 4, tmp_path)
    rows = re.findall(
        r"^(\w+) +([\d.]+)% ± ([\d.]+)% +([\d.]+)% .* ([\d.]+) ± [\d.]+ +(\d) of 3", table, re.M
    )
    assert [name for name, *_ in rows] == ["FedAvg", "SCAFFOLD", "FedSAM", "FedNSAM", "FedGMT"]
    local = ff.LocalSGD(lr=0.05, epochs=2, batch_size=20)
    for name, *numbers in rows:
        if name not in ("FedAvg", "FedGMT"):
            continue
        accuracies, worst, sharpness = [], [], []
        for seed in range(3):
            federation = ff.federate("digits", "dirichlet:0.1", clients=20, seed=seed)
            run = ff.train(federation, "mlp", name.lower(), local, participation=5, rounds=4, seed=seed)
            accuracies.append(100 * run.accuracy)
            worst.append(100 * run.history[-1]["client_accuracy"]["worst_decile"])
            sharpness.append(ff.sharpness(run.model, federation, rho=0.1))
        expected = [statistics.mean(accuracies), statistics.stdev(accuracies), statistics.mean(worst)]
        assert [float(number) for number in numbers[:3]] == pytest.approx(expected, abs=0.06)
        assert float(numbers[3]) == pytest.approx(statistics.mean(sharpness), abs=0.0006)
        assert int(numbers[4]) == 0  # nobody is at 90 % after four rounds


def test_the_cost_of_a_target_is_counted_up_to_its_first_round():
    rows = [
        {"index": i, "accuracy": a, "bytes_down": 2e6, "bytes_up": 1e6} for i, a in enumerate((0.5, 0.9, 0.8))
    ]
    run = ff.Run(ff.fedavg(), rows, torch.nn.Linear(1, 1), None, None)  # type: ignore[arg-type]
    until = loaded("compare_methods").until
    assert until(0.9, run) == (2, 6.0)
    assert until(0.95, run) is None


@pytest.mark.slow
def test_every_client_gains_by_taking_part(tmp_path: Path):
    table = printed("own_data_and_model", 6, tmp_path)
    rows = re.findall(r"^ *([\d.]+) +70 +([\d.]+)% +([\d.]+)%$", table, re.M)
    assert [float(contrast) for contrast, *_ in rows] == [0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6]
    alone, together = ([float(row[column]) for row in rows] for column in (1, 2))
    assert all(there > here for here, there in zip(alone, together, strict=True))
    (said,) = re.findall(r"all scanners: ([\d.]+)%", table)
    assert float(said) == pytest.approx(statistics.mean(together), abs=0.1)
    assert float(said) > 70


@pytest.mark.slow
def test_the_mechanism_can_be_switched_off_and_helps_when_it_remembers(tmp_path: Path):
    said = printed("own_mechanism", 20, tmp_path)
    assert "share=1 is FedSAM: True" in said
    whole, lost, kept = (float(number) for number in re.findall(r"accuracy ([\d.]+)%", said))
    assert whole > kept > lost > 40


def test_what_the_mechanism_leaves_out_is_kept_and_sent_later():
    sparse = loaded("own_mechanism").SparseUploads
    torch.manual_seed(0)
    model, data = torch.nn.Linear(10, 4), (torch.randn(30, 10), torch.randint(4, (30,)))

    def trained(rounds: int, *mechanisms: ff.Mechanism) -> tuple[torch.Tensor, torch.Tensor | None]:
        run = ff.train(ff.Federation([data]), model, ff.Method("one", mechanisms), rounds=rounds)
        start = torch.cat([weights.detach().flatten() for weights in model.parameters()])
        return run.server.w - start, run.clients.get(0).get("left_out")

    update, _ = trained(1)
    sent, left_out = trained(1, sparse(share=0.25))
    assert left_out is not None
    torch.testing.assert_close(sent + left_out, update)
    assert int((sent != 0).sum()) == 11  # a quarter of 44
    assert sent[sent != 0].abs().min() >= left_out.abs().max()
    second, rest = trained(2, sparse(share=0.25))
    assert rest is not None
    assert not torch.equal(second, sent)
    forgotten, nothing = trained(1, sparse(share=0.25, remember=False))
    torch.testing.assert_close(forgotten, sent)
    assert nothing is None


@pytest.mark.slow
def test_a_run_that_broke_off_ends_with_the_same_bits(tmp_path: Path):
    said = printed("stop_and_resume", 8, tmp_path)
    assert "went off after round 5 of 8" in said
    assert "There is: round-0000004.safetensors" in said
    assert "resumed after round 4" in said
    assert "Same bits as without the interruption: True" in said
    assert "8 rounds in metrics.jsonl" in said
    assert "fc1.weight (200, 64)" in said


def test_engines_have_the_same_bits(tmp_path: Path):
    said = printed("same_bits", 2, tmp_path)
    weights = re.findall(r"^(\S+) .* weights (\w{16})$", said, re.M)
    assert [engine for engine, _ in weights] == ["inprocess", "workers:2", "workers:3"]
    assert len({checksum for _, checksum in weights}) == 1
    assert "Equal to the last bit." in said


# -- all ----------------------------------------------------------------------------------------------


def test_the_overview_lists_every_example():
    listed = re.findall(r"^\| \[(\S+)\]\((\S+)\)", (EXAMPLES / "README.md").read_text("utf-8"), re.M)
    assert sorted(name for name, _ in listed) == sorted(path.name for path in [*SCRIPTS, *NOTEBOOKS])
    assert all(name == place for name, place in listed)
    assert (len(SCRIPTS), len(NOTEBOOKS)) == (5, 2)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_what_it_shows_how_long_it_takes_and_how_to_run_it(path: Path):
    assert len(path.read_text("utf-8").splitlines()) <= 75
    text = loaded(path.stem).__doc__ or ""
    assert re.search(r"Takes about \d+ seconds\.", text)
    assert f"\n    python examples/{path.name}\n" in text
