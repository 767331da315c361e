"""Which method suits my data? Five methods, three seeds each, on clients that see few classes.

Prints a line for each: accuracy and sharpness with their deviation over seeds, the accuracy of the tenth of clients
that fares worst, and what it took to get to 90 %, in rounds and in megabytes down and up. Takes about 20 seconds.

    python examples/compare_methods.py
"""

import argparse
import statistics

import fedflat as ff

METHODS = {
    "FedAvg": ff.fedavg(),
    "SCAFFOLD": ff.scaffold(),
    "FedSAM": ff.fedsam(rho=0.1),
    "FedNSAM": ff.fednsam(rho=0.1),
    "FedGMT": ff.fedgmt(),
}
SEEDS = 3
TARGET = 0.9


def spread(values: list[float], form: str) -> str:
    """The mean and the deviation over seeds."""
    return f"{statistics.mean(values):{form}} ± {statistics.stdev(values):{form}}"


def until(target: float, run: ff.Run) -> tuple[int, float] | None:
    """Rounds and megabytes until the test accuracy was reached for the first time; None if it never was."""
    megabytes = 0.0
    for row in run.history:
        megabytes += (row["bytes_down"] + row["bytes_up"]) / 1e6
        if row["accuracy"] >= target:
            return row["index"] + 1, megabytes
    return None


def main(rounds: int) -> None:
    """Train everything, then print one line for each method."""
    local = ff.LocalSGD(lr=0.05, epochs=2, batch_size=20)
    print(f"{'':8}  {'accuracy':>13}  {'worst tenth':>13}  {'sharpness':>15}  rounds and MB to {TARGET:.0%}")
    for name, method in METHODS.items():
        runs, sharpness = [], []
        for seed in range(SEEDS):  # another split, other weights, other participants
            federation = ff.federate("digits", ff.Dirichlet(0.1), clients=20, seed=seed)
            runs.append(ff.train(federation, "mlp", method, local, participation=5, rounds=rounds, seed=seed))
            sharpness.append(ff.sharpness(runs[-1].model, federation, rho=0.1))
        accuracy = spread([run.accuracy for run in runs], ".1%")
        worst = spread([run.history[-1]["client_accuracy"]["worst_decile"] for run in runs], ".1%")
        reached = [there for run in runs if (there := until(TARGET, run))]
        cost = f"{len(reached)} of {SEEDS} seeds"
        if reached:
            cost += f": {statistics.mean(r for r, _ in reached):4.1f}, {statistics.mean(m for _, m in reached):3.0f}"
        print(f"{name:8}  {accuracy:>13}  {worst:>13}  {spread(sharpness, '.3f'):>15}  {cost}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    main(parser.parse_args().rounds)
