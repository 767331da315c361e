"""FedAvg of Flower's simulation on Ray: `--processes` actors of `--threads` threads. No service is left running."""

from __future__ import annotations

import os
from collections.abc import Iterable

from common import CLIENTS, COHORT, WORKLOADS, Laps, options
from flower_client import app
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

run, laps, server = options(), Laps(), ServerApp()


class Timed(FedAvg):
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        assert not failed, failed[0]
        result = super().aggregate_train(server_round, replies)
        laps.lap(sum(reply.content["metrics"]["steps"] for reply in replies))
        return result


@server.main()
def main(grid: Grid, context: Context) -> None:
    # the fraction alone is too few when the first round begins before all nodes are registered
    strategy = Timed(COHORT / CLIENTS, 0.0, min_train_nodes=COHORT, min_available_nodes=CLIENTS)
    given = {name: getattr(run, name) for name in ("workload", "threads", "epochs", "loader")}
    strategy.start(
        grid,
        ArrayRecord(WORKLOADS[run.workload].model().state_dict()),
        num_rounds=run.rounds + 1,
        train_config=ConfigRecord(given),
    )


if __name__ == "__main__":
    initial = {"num_cpus": run.processes * run.threads}
    if "RAY_TMPDIR" in os.environ:
        initial["_temp_dir"] = os.environ["RAY_TMPDIR"]
    resources = {"num_cpus": run.threads, "num_gpus": 0.0}
    run_simulation(server, app, CLIENTS, backend_config={"init_args": initial, "client_resources": resources})
    batches = (
        "a DataLoader, as in its guide" if run.loader else "index batches, faster than its guide's DataLoader"
    )
    note = f"Ray actors x threads; the local loop is the user's: {batches}"
    laps.report("flwr", "flwr", run, note)
