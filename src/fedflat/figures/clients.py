"""Every client's own accuracy, run beside run: the spread, with the clients that fare worst by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import FedflatError
from ..experiments.by_client import group_accuracies, worst_clients
from .footnote import noted
from .style import COLOURS, MARKERS, legend_above, look, panels
from .trials import gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

NAMED = 30
"""Clients that a figure names."""


@noted
def client_spread(runs: str | Path | Sequence[str | Path], width: str = "one") -> Figure:
    """A row for each of the clients that fare worst in the first run, at most 30, with a mark for every run.

    Args:
        runs: directories of runs on data whose clients have test samples of their own.
        width: one or two columns.
    """
    trials = gather(runs)
    found = {one.name: group_accuracies(one.places) for one in trials}
    known = {name: accuracies for name, accuracies in found.items() if accuracies}
    if not known:
        raise FedflatError(
            "No run knows whose its test samples are, so there is no client to draw; train with clients_every."
        )
    first = next(iter(known.values()))
    clients = worst_clients(first, NAMED)[::-1]
    with look():
        figure, (axes,) = panels(1, width, 0.6 + 0.16 * len(clients))
        for number, (name, accuracies) in enumerate(known.items()):
            places = [place for place, client in enumerate(clients) if client in accuracies]
            axes.plot(
                [100 * accuracies[clients[place]] for place in places],
                places,
                linestyle="none",
                marker=MARKERS[number % len(MARKERS)],
                color=COLOURS[number % len(COLOURS)],
                label=name,
            )
        axes.set_yticks(range(len(clients)), clients)
        left = len(first) - len(clients)
        axes.set_xlabel(
            "accuracy on own samples (%)" + (f"; {left:,} better clients not shown" if left else "")
        )
        legend_above(figure, [axes])
    return figure
