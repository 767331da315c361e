"""Models' features in two dimensions, by t-SNE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core.flat import FlatModel
from ..data.federation import Federation, Shard
from ..errors import FedflatError, MissingExtra
from .estimate import at_least
from .surface import CHUNK, Surface


@dataclass(frozen=True)
class Embedding:
    """The same samples as several models see them, in two dimensions."""

    points: dict[str, np.ndarray]
    """by model, a row per sample"""
    labels: np.ndarray
    """the samples' classes"""


def penultimate_features(model: nn.Module | FlatModel, data: Shard | Federation) -> np.ndarray:
    """What the last linear layer that a sample passes is given, a row per sample; in evaluation mode.

    The last layer is the last one to be called, wherever the module keeps it.
    """
    surface = Surface(model, data)
    given: list[Tensor] = []

    def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        given[:] = [inputs[0]]

    layers = [part for part in surface.model.module.modules() if isinstance(part, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    rows = []
    try:
        with surface.model.evaluating() as module, torch.no_grad():
            for inputs, _ in surface.data.batches(CHUNK):
                given.clear()
                surface.model.outputs(inputs)
                if not given:
                    raise FedflatError(
                        f"{type(module).__name__} calls no nn.Linear, whose input would be its features: end it in "
                        "one, or embed features of your own with `embed`."
                    )
                rows.append(given[0].flatten(1).double().cpu())
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(rows).numpy()


def embed(features: np.ndarray, perplexity: float = 30.0, seed: int = 0) -> np.ndarray:
    """t-SNE of features, a row per sample (van der Maaten & Hinton 2008; Barnes-Hut, starting from the PCA)."""
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        raise MissingExtra("scikit-learn", "embedding", "An embedding by t-SNE") from None
    if not 0 < perplexity < len(features):
        raise FedflatError(
            f"perplexity={perplexity:g}: give a number above 0 and below that of the samples, {len(features)}."
        )
    if not np.isfinite(features).all():
        raise FedflatError("The features hold NaN or infinite values: has the training diverged?")
    if features.shape[1] < 2 or not np.ptp(features, axis=0).any():
        raise FedflatError("The features are the same for all samples, or one number each: nothing to embed.")
    placed: np.ndarray = TSNE(perplexity=perplexity, random_state=seed).fit_transform(features)
    return placed


def embedding(
    models: Mapping[str, nn.Module | FlatModel],
    data: Shard | Federation,
    samples: int = 1000,
    perplexity: float = 30.0,
    seed: int = 0,
    together: bool = False,
) -> Embedding:
    """t-SNE of the penultimate features of models, by name, on at most this many samples, evenly spaced.

    As in FedWMSAM (NeurIPS 2025), Figure 5, every model is embedded by itself: the paper has a panel for each and
    does not say more, and features of networks that were trained apart have no axes in common. `together=True` puts
    all into one embedding, in which distances between models count too.
    """
    at_least("samples", samples, 3)
    if not models:
        raise FedflatError("There is nothing to embed: give at least one model, by name.")
    chosen = (data.union() if isinstance(data, Federation) else data).thinned(samples)
    if chosen.targets.is_floating_point() or chosen.targets.dim() > 1:
        raise FedflatError("The targets are no classes, so there is nothing to colour an embedding by.")
    labels = chosen.stored()[1].cpu().numpy()
    features = {name: penultimate_features(model, chosen) for name, model in models.items()}
    if not together:
        points = {name: embed(rows, perplexity, seed) for name, rows in features.items()}
        return Embedding(points, labels)
    widths = {name: rows.shape[1] for name, rows in features.items()}
    if len(set(widths.values())) > 1:
        told = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise FedflatError(
            f"Models of different width cannot be embedded together ({told}); embed them apart."
        )
    parts = np.split(embed(np.concatenate(list(features.values())), perplexity, seed), len(features))
    return Embedding(dict(zip(features, parts, strict=True)), labels)
