"""FedAvg of fluke: its server, its clients, its FastDataLoader. One process: its parallel server asks for GPUs."""

from __future__ import annotations

from typing import Any

import torch
from common import BATCH, CLIENTS, COHORT, LR, WORKLOADS, Laps, Steps, options

try:
    import torchvision  # noqa: F401
except RuntimeError:
    # The wheel on PyPI is built for CUDA; next to a CPU torch its operators are missing. fluke only imports them.
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.utils import FederationObserver


class Stopwatch(FederationObserver):
    def __init__(self) -> None:
        self.laps, self.counter = Laps(), Steps()

    def end_round(self, round: int, **_: Any) -> None:
        self.laps.lap(self.counter.take())


def main() -> None:
    run = options()
    assert run.processes == 1, "fluke trains clients side by side only on several GPUs"
    torch.set_num_threads(run.threads)
    work = WORKLOADS[run.workload]
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_eval_cfg(server=False, locals=False, pre_fit=False, post_fit=False)
    loaders = [FastDataLoader(x, y, num_labels=10, batch_size=BATCH, shuffle=True) for x, y in work.data()]
    fedavg = FedAVG(
        CLIENTS,
        DataSplitter(DummyDataContainer(loaders, [None] * CLIENTS, None, 10)),
        DDict(
            model=work.model(),
            client=DDict(
                batch_size=BATCH,
                local_epochs=run.epochs,
                loss="CrossEntropyLoss",
                optimizer=DDict(name="SGD", lr=LR),
                scheduler=DDict(name="StepLR", gamma=1, step_size=1),
            ),
            server=DDict(weighted=True),
        ),
    )
    watch = Stopwatch()
    fedavg.set_callbacks([watch])
    fedavg.run(run.rounds + 1, COHORT / CLIENTS)
    watch.laps.report("fluke", "fluke-fl", run, "FedAVG, FastDataLoader, models in memory, evaluation off")


if __name__ == "__main__":
    main()
