"""Does it matter where clients run? Not for the result: one process, two or three, and the weights are equal.

Clients have from a handful to hundreds of digits, and each is there with a chance of one third, so that some finish
long before others. Prints the time, the accuracy and a checksum of all weights. Takes about 20 seconds.

    python examples/same_bits.py
"""

import argparse
import hashlib
import time

import fedflat as ff

ENGINES = ("inprocess", "workers:2", "workers:3")  # and "ray", for many machines: docs/ray.md


def main(rounds: int) -> None:
    """Train the same on every engine."""
    federation = ff.federate("digits", ff.Quantity(0.5), clients=24, seed=0)
    print(f"{len(federation)} clients have {min(federation.sizes)} to {max(federation.sizes)} digits.")
    checksums = set()
    for engine in ENGINES:
        began = time.perf_counter()
        run = ff.train(
            federation,
            model="cnn",
            method="fedgmt",  # every client keeps a dual variable from round to round
            local=ff.LocalSGD(lr=0.05, epochs=2, batch_size=20),
            participation=ff.Bernoulli(1 / 3),
            rounds=rounds,
            engine=engine,
        )
        seconds = time.perf_counter() - began
        checksum = hashlib.sha256(run.server.w.numpy().tobytes()).hexdigest()[:16]
        checksums.add(checksum)
        print(f"{engine:10}  {seconds:5.1f} s  accuracy {run.accuracy:.1%}  weights {checksum}")
    there = [len(row["clients"]) for row in run.history]
    print(f"{min(there)} to {max(there)} clients took part in a round.")
    print("Equal to the last bit." if len(checksums) == 1 else "The weights differ!")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    main(parser.parse_args().rounds)
