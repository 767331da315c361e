"""FedAvg of pfl (pfl-research): its simulated backend, its local SGD; several processes are started by torchrun."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from common import BATCH, CLIENTS, COHORT, LR, WORKLOADS, Laps, Steps, Workload, options
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Net(nn.Module):
    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.net = work.model()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"loss": Weighted(cross_entropy(self.net(x), y, reduction="sum").item(), len(y))}


class Stopwatch(TrainingProcessCallback):
    def __init__(self, central: torch.optim.Optimizer) -> None:
        self.laps, self.counter = Laps(), Steps()
        self.counter.excluded = central

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        self.laps.lap(self.counter.take())
        return False, Metrics()


def main() -> None:
    run = options()
    torch.set_num_threads(run.threads)
    np.random.seed(0)  # the same cohorts in every process
    torch.manual_seed(0)
    work = WORKLOADS[run.workload]
    users = work.data()
    federation = FederatedDataset(
        lambda user: PyTorchTensorDataset(users[user], user_id=user),
        get_user_sampler("minimize_reuse", list(range(CLIENTS))),
    )
    net = Net(work)
    central = torch.optim.SGD(net.parameters(), lr=1.0)
    watch = Stopwatch(central)
    FederatedAveraging().run(
        # the first round, which is not timed, is the only one that is evaluated
        NNAlgorithmParams(run.rounds + 1, run.rounds + 2, COHORT, val_cohort_size=0),
        SimulatedBackend(federation, federation),
        PyTorchModel(net, torch.optim.SGD, central),
        NNTrainHyperParams(BATCH, local_num_epochs=run.epochs, local_learning_rate=LR),
        NNEvalHyperParams(BATCH),
        [watch],
        send_metrics_to_platform=False,
    )
    if run.processes > 1:
        assert torch.distributed.get_world_size() == run.processes
        steps = torch.tensor(watch.laps.steps)
        torch.distributed.all_reduce(steps)
        watch.laps.steps = steps.tolist()
    if run.processes == 1 or torch.distributed.get_rank() == 0:
        note = "FederatedAveraging, PyTorchTensorDataset, samples in fixed order as pfl does, evaluation off"
        watch.laps.report("pfl", "pfl", run, note)


if __name__ == "__main__":
    main()
