"""The ClientApp of the Flower run, in a module of its own so that Ray's actors import it and keep its data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from common import BATCH, LR, WORKLOADS, Steps
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

app = ClientApp()
steps = Steps()


@cache
def data(workload: str) -> list[tuple[Tensor, Tensor]]:
    return WORKLOADS[workload].data()


def by_index(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """An epoch's batches without a DataLoader, which gathers sample by sample."""
    return ((x[rows], y[rows]) for rows in torch.randperm(len(x)).split(BATCH))


@app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    torch.set_num_threads(config["threads"])
    steps.take()
    model = WORKLOADS[config["workload"]].model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    x, y = data(config["workload"])[context.node_config["partition-id"]]
    loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True) if config["loader"] else None
    for _ in range(config["epochs"]):
        for inputs, targets in loader or by_index(x, y):
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    metrics = MetricRecord({"num-examples": len(x), "steps": steps.take()})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
