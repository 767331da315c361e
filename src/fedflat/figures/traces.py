"""A method's own numbers over the rounds: c of FedGF (Figures 7, 10, 15), α of FedWMSAM (Figure 11), cosines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import FedflatError, nearest
from .footnote import noted
from .lines import draw_against, line_of, recorded
from .style import legend_above, look, panels
from .trials import Runs, Trials, gather

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYMBOLS = {
    "alpha": r"$\alpha$",
    "c": r"$c$",
    "cosine": r"mean $\cos(G_k, g)$",
    "one-minus-cosine": r"mean $1-\cos(G_k, g)$",
    "divergence": r"$D$, mean length of updates",
}


@noted
def traces(
    runs: Runs,
    names: str | Sequence[str] | None = None,
    smooth: int = 1,
    width: str = "one",
) -> Figure:
    """Numbers that a method keeps, or measures such as `drift cosine`, by round, a panel for each.

    Without names all that the methods keep. Runs that do not have a number are left out of its panel.
    """
    trials = gather(runs)
    kept = dict.fromkeys(name for one in trials for name in _names(one, "scalars"))
    known = [*kept, *dict.fromkeys(name for one in trials for name in _names(one, "measures"))]
    wanted = [names] if isinstance(names, str) else list(kept if names is None else names)
    if not wanted:
        raise FedflatError(
            f"{trials[0].name} keeps no number of its own: FedGF has c, FedWMSAM alpha. Record the cosines "
            "between updates with `fedflat run --measure drift`, then draw 'drift cosine'."
        )
    for name in wanted:
        if name not in known:
            hint = nearest(name, known) if known else ""
            raise FedflatError(f"No run has recorded '{name}'.{hint}")
    with look():
        figure, axes = panels(len(wanted), width, 2.1)
        for one, name in zip(axes, wanted, strict=True):
            value = recorded(name, "measures", "scalars")
            lines = [line_of(each, value, "rounds", smooth) for each in trials]
            if not any(lines):
                raise FedflatError(f"'{name}' has no value in any round.")
            draw_against(one, lines, "rounds", SYMBOLS.get(name, name))
        legend_above(figure, axes)
    return figure


def _names(trials: Trials, column: str) -> list[str]:
    return list(
        dict.fromkeys(key for history in trials.histories for row in history for key in row.get(column) or {})
    )
