"""What a model needs of its samples, checked before it is built."""

from __future__ import annotations

from ..errors import FedflatError


def image_shape(
    model: str,
    shape: tuple[int, ...],
    vocabulary: int | None = None,
    channels: int | None = None,
    smallest: int = 1,
    multiple: int = 1,
) -> tuple[int, int, int]:
    """Channels, height and width of the samples; refuses what is no image or does not fit the model."""
    fits = vocabulary is None and len(shape) == 3 and min(shape) >= 1 and channels in (None, shape[0])
    if not fits or min(shape[1:]) < smallest or any(side % multiple for side in shape[1:]):
        needs = f"images of shape ({channels or 'channels'}, height, width)"
        if smallest > 1:
            needs += f" with at least {smallest}x{smallest} pixels"
        if multiple > 1:
            needs += f" whose sides are multiples of {multiple}"
        raise _unfit(model, needs, shape, vocabulary, _remedy(shape) if vocabulary is None else "")
    return shape[0], shape[1], shape[2]


def token_shape(model: str, shape: tuple[int, ...], vocabulary: int | None) -> tuple[int, int]:
    """Tokens per sample and size of the vocabulary; refuses what is no text."""
    if len(shape) != 1 or shape[0] < 1 or vocabulary is None or vocabulary < 1:
        needs = "samples of shape (tokens,) and the federation's `vocabulary` (how many tokens there are)"
        raise _unfit(model, needs, shape, vocabulary)
    return shape[0], vocabulary


def refuse_tokens(model: str, shape: tuple[int, ...], vocabulary: int | None) -> None:
    """For models that multiply their inputs: token numbers are names, not quantities."""
    if vocabulary is not None:
        raise _unfit(model, "inputs that are quantities (for text: fasttext, char-lstm)", shape, vocabulary)


def _remedy(shape: tuple[int, ...]) -> str:
    """What to do about samples that are nearly images."""
    if len(shape) == 3 and shape[2] in (1, 3) and shape[0] not in (1, 3):
        return " Put the channels first: inputs.permute(0, 3, 1, 2)."
    if len(shape) == 2:
        return " Give them a channel: inputs.unsqueeze(1)."
    return " For a table, take mlp." if len(shape) == 1 else ""


def _unfit(
    model: str, needs: str, shape: tuple[int, ...], vocabulary: int | None, remedy: str = ""
) -> FedflatError:
    kind = "" if vocabulary is None else f", from a vocabulary of {vocabulary:,}"
    return FedflatError(f"{model} needs {needs}; the samples here have the shape {shape}{kind}.{remedy}")
