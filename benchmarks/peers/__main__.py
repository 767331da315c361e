"""Every peer, in every way and layout, one line of JSON each: `python -m benchmarks.peers --workload W1`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import WAYS
from .launch import VENVS, launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="append", choices=WAYS, help="all when not given; may be repeated")
    parser.add_argument("--workload", action="append", choices=("W1", "W2"), help="both when not given")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds")
    parser.add_argument("--venvs", type=Path, default=VENVS, help="where the environments are, or will be")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one run may take")
    options = parser.parse_args()
    for workload in options.workload or ("W1", "W2"):
        for label in options.peer or WAYS:
            way = WAYS[label]
            for processes, threads in dict.fromkeys(way.layouts):
                result = launch(
                    way.peer,
                    workload,
                    options.rounds,
                    threads,
                    processes,
                    loader=way.loader,
                    venvs=options.venvs,
                    timeout=options.timeout,
                )
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
