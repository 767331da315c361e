"""A recurrent network that predicts the next character."""

from __future__ import annotations

from torch import Tensor, nn

from ..errors import FedflatError
from .shapes import token_shape


class CharLSTM(nn.Module):
    """Embedding, LSTM, and a linear layer on the output at the last character."""

    def __init__(self, vocabulary: int, embedding: int = 8, width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, width, num_layers=layers, batch_first=True)
        self.fc = nn.Linear(width, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits (samples, vocabulary) of the character that follows each row."""
        outputs, _ = self.lstm(self.embedding(characters))
        logits: Tensor = self.fc(outputs[:, -1])
        return logits


def char_lstm(shape: tuple[int, ...], classes: int, vocabulary: int | None = None) -> nn.Module:
    """Next character of a text: embedding 8, LSTM with 2 layers of 256, for Shakespeare's 80-character windows.

    The network of LEAF (Caldas et al. 2018) and McMahan et al. (2017). It has one output per character of the
    vocabulary, whether or not that character is a target in the federation.
    """
    _, characters = token_shape("char-lstm", shape, vocabulary)
    if classes > characters:
        raise FedflatError(
            f"char-lstm predicts one of the {characters:,} characters of the vocabulary; "
            f"the targets here have {classes:,} classes. It needs targets that are characters."
        )
    return CharLSTM(characters)
