"""Is it worth taking part? Eight clients with data of their own, and a network that fedflat has never seen.

Every client has only 70 digits and a noisy scanner of its own, from a faint one to a strong one. It can train alone,
on what it has, or with the others, without showing them a digit. Prints for every client how many new digits, scanned
as its own are, it then reads right. Takes about 10 seconds.

    python examples/own_data_and_model.py
"""

import argparse

import torch
from torch import Tensor, nn

import fedflat as ff

CONTRASTS = (0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6)


def scanned(images: Tensor, contrast: float, seed: int) -> Tensor:
    """What a scanner makes of images."""
    return contrast * images + 0.4 * torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))


class Network(nn.Module):
    """Any module will do that takes a batch of inputs and returns a row of scores for each, one per class."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(1, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2))
        self.decide = nn.Linear(24 * 3 * 3, 10)

    def forward(self, images: Tensor) -> Tensor:
        """From images to scores."""
        return self.decide(self.see(images).flatten(1))


def main(rounds: int) -> None:
    """Train together, then everyone alone."""
    digits = ff.load_dataset("digits")  # in the place of your own two tensors, inputs and classes
    images, labels = digits.train
    clients = [(scanned(images[i::20], c, seed=i), labels[i::20]) for i, c in enumerate(CONTRASTS)]
    tests = [(scanned(digits.test[0], c, seed=100 + i), digits.test[1]) for i, c in enumerate(CONTRASTS)]
    everything = torch.cat([x for x, _ in tests]), torch.cat([y for _, y in tests])

    torch.manual_seed(0)
    network = Network()  # its weights are where everybody starts; training leaves them as they are
    local = ff.LocalSGD(lr=0.05, epochs=2, batch_size=20)
    together = ff.train(ff.Federation(clients, everything), network, "fedsam", local, rounds=rounds)

    print("contrast  digits  alone  together")
    for contrast, client, (inputs, classes) in zip(CONTRASTS, clients, tests, strict=True):
        alone = ff.train(ff.Federation([client], (inputs, classes)), network, "fedsam", local, rounds=rounds)
        with torch.inference_mode():
            right = (together.model(inputs).argmax(1) == classes).float().mean().item()
        print(f"{contrast:8}  {len(client[1]):6}  {alone.accuracy:5.1%}  {right:8.1%}")
    print(f"One model for all scanners: {together.accuracy:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    main(parser.parse_args().rounds)
