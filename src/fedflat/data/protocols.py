"""How a dataset is usually federated: what the command line fills in where nothing is said."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Protocol:
    """A model and a protocol for a dataset."""

    model: str = "mlp"
    clients: int = 20
    per_round: int = 5
    rounds: int = 40
    lr: float = 0.05
    epochs: int | None = 5
    steps: int | None = None
    batch_size: int = 20


def _paper(model: str, lr: float = 0.05, epochs: int = 5, batch_size: int = 50) -> Protocol:
    """100 clients of which 10 take part, as all four papers have it."""
    return Protocol(model, clients=100, per_round=10, rounds=100, lr=lr, epochs=epochs, batch_size=batch_size)


PROTOCOLS = {
    "digits": Protocol(),
    "fashion-mnist": _paper("mlp", lr=0.1),
    "cifar10": _paper("cnn"),
    "cifar100": _paper("resnet8", epochs=2, batch_size=20),
    "cinic10": _paper("vit-small", batch_size=100),
    "ag-news": _paper("fasttext", lr=0.1),
    "tiny-imagenet": _paper("resnet18", epochs=1),
    "office-home": Protocol("resnet50", clients=4, per_round=4, rounds=50, lr=0.01, epochs=1),
    # a role's windows overlap, so that an epoch over a large role would be thousands of steps
    "shakespeare": Protocol(
        "char-lstm", per_round=10, rounds=100, lr=0.5, epochs=None, steps=10, batch_size=50
    ),
}


def protocol_for(dataset: str) -> Protocol:
    """What is usual for a dataset; a small protocol for a person's own data."""
    return PROTOCOLS.get(dataset, Protocol())
