"""Seconds per round of every method relative to FedAvg, interleaved in one run: `make bench`.

The workload is 784-200-200-10 on 100 clients of 600 samples, 10 clients a round, 5 epochs of batch 50, on random
data: arithmetic does not care what the pixels show. Ratios of medians are what to read; seconds depend on the day.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from rich.console import Console
from rich.table import Table

import fedflat as ff


def federation() -> ff.Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60_000, 1, 28, 28, generator=generator)
    y = torch.randint(10, (60_000,), generator=generator)
    return ff.Federation.from_indices((x, y), torch.arange(60_000).view(100, 600).unbind())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats of all methods")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per repeat; the first is not counted")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = federation()
    seconds: dict[str, list[float]] = {name: [] for name in ff.METHODS}
    for _ in range(options.repeats):
        for name in ff.METHODS:
            run = ff.train(
                data,
                "mlp",
                name,
                local=ff.LocalSGD(lr=0.01, epochs=5, batch_size=50),
                participation=10,
                rounds=options.rounds,
            )
            seconds[name] += [row["seconds"] for row in run.history[1:]]
    base = statistics.median(seconds["fedavg"])
    table = Table("method", "x FedAvg", "spread", "s/round", "passes F/B")
    for name, measured in seconds.items():
        cost = ff.METHODS[name]().cost
        ratios = sorted(second / base for second in measured)
        table.add_row(
            name,
            f"{statistics.median(ratios):.2f}",
            f"{ratios[0]:.2f} – {ratios[-1]:.2f}",
            f"{statistics.median(measured):.2f}",
            f"{cost.forward}/{cost.backward}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
