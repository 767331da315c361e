"""The power goes off in the middle of a run. What does it cost? A few rounds, and not one bit of the result.

A run writes to a directory and breaks off. The same call goes on from its last checkpoint, here even in other
processes than before, and ends with the same bits as a run that was never interrupted. Takes about 10 seconds.

    python examples/stop_and_resume.py
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

import fedflat as ff


class PowerCut(Exception):
    """Something that nobody expected."""


def main(rounds: int, place: Path) -> None:
    """Train without an interruption, then with one, and compare."""
    federation = ff.federate("digits", ff.Pathological(2), clients=20, seed=0)
    settings = {
        "federation": federation,
        "model": "mlp",
        "method": "scaffold",  # its clients and its server keep vectors from round to round
        "local": ff.LocalSGD(lr=0.05, epochs=2, batch_size=20),
        "participation": 5,
        "rounds": rounds,
    }
    smooth = ff.train(**settings)

    def cut(round: ff.RoundRecord) -> None:
        if round.index == rounds // 2:
            raise PowerCut

    try:
        ff.train(**settings, out=place, checkpoint_every=4, on_round=cut)
    except PowerCut:
        print(f"The power went off after round {rounds // 2 + 1} of {rounds}.")
    print("There is:", ", ".join(sorted(path.name for path in (place / "checkpoints").iterdir())))

    resumed = ff.train(**settings, out=place, resume=True, engine="workers:2")
    print((place / "log.txt").read_text().strip())
    print("Same bits as without the interruption:", torch.equal(resumed.server.w, smooth.server.w))

    # All of it is in plain files.
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    print(f"{len(rows)} rounds in metrics.jsonl, the last with accuracy {rows[-1]['accuracy']:.1%}")
    weights = load_file(place / "model.safetensors")
    print("model.safetensors:", ", ".join(f"{name} {tuple(value.shape)}" for name, value in weights.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args().rounds, Path(folder) / "run")
