"""FastText: the mean of word vectors, then linear layers."""

from __future__ import annotations

from torch import Tensor, nn

from .shapes import token_shape


class FastText(nn.Module):
    """Embedding (token 0 is padding and stays 0), mean over all positions, fc, fc; no non-linearity.

    The mean divides by the length of the row, paddings included. With `sparse=True` the gradient of the
    embedding is a sparse tensor that has only the rows of tokens that occur in the batch.
    """

    def __init__(self, vocabulary: int, classes: int, width: int = 32, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0, sparse=sparse)
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of rows of tokens."""
        logits: Tensor = self.fc2(self.fc1(self.embedding(tokens).mean(dim=1)))
        return logits


def fasttext(
    shape: tuple[int, ...], classes: int, vocabulary: int | None = None, sparse: bool = True
) -> nn.Module:
    """Mean of word vectors of width 32 and two linear layers: 3,157,508 parameters on AG News.

    FedGMT's model on AG News, after Joulin et al. (2017), Bag of Tricks for Efficient Text Classification.
    """
    _, tokens = token_shape("fasttext", shape, vocabulary)
    return FastText(tokens, classes, sparse=sparse)
