"""A line below a figure: what to know of the runs before comparing what it shows with a paper."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..experiments.caveats import all_caveats
from ..experiments.compare import find_runs
from .style import look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = 5.0
"""Points of the letters."""
MOST = 4
"""Sentences that are written out; a figure is no place for more."""

Draw = TypeVar("Draw", bound=Callable[..., Any])


def noted(draw: Draw) -> Draw:
    """A function that draws runs, its first argument, with what their run.json has to say below the figure."""
    first = next(iter(signature(draw).parameters))

    @wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> Figure:
        figure: Figure = draw(*args, **kwargs)
        places = _places(args[0] if args else kwargs[first])
        footnote(figure, all_caveats(find_runs(places)) if places else [])
        return figure

    return cast(Draw, drawn)


def _places(runs: Any) -> list[str | Path]:
    """The directories in whatever a figure is drawn of."""
    if isinstance(runs, str | Path):
        return [runs]
    if isinstance(runs, Mapping):
        return [place for source in runs.values() for place in _places(source)]
    if isinstance(runs, Sequence):
        return [one for one in runs if isinstance(one, str | Path)]
    return []


def footnote(figure: Figure, sentences: Iterable[str]) -> None:
    """Write sentences small below a figure, which grows for it; nothing where there are none."""
    told = list(sentences)
    if len(told) > MOST:
        told = [*told[: MOST - 1], f"{len(told) - MOST + 1} more notes are in the runs' run.json."]
    if not told:
        return
    room = int(72 * figure.get_figwidth() / (0.5 * SIZE))
    lines = [line for sentence in told for line in textwrap.wrap(sentence, room)]
    before = figure.get_figheight()
    extra = (len(lines) * 1.3 * SIZE + 4) / 72
    after = before + extra
    figure.set_figheight(after)
    if (engine := figure.get_layout_engine()) is None:
        ends = figure.subplotpars
        figure.subplots_adjust(
            bottom=(ends.bottom * before + extra) / after, top=(ends.top * before + extra) / after
        )
    else:
        bottom = (extra + _lift_label(figure, extra)) / after
        engine.set(rect=(0, bottom, 1, 1 - bottom))  # type: ignore[call-arg]  # all are constrained
    with look():
        figure.text(0.01, 2 / 72 / after, "\n".join(lines), fontsize=SIZE, color="#555555", va="bottom")


def _lift_label(figure: Figure, inches: float) -> float:
    """Put the label of the whole figure's x axis, if there is one, so high; how much room it takes."""
    name = figure.get_supxlabel()
    found = [text for text in figure.texts if name and text.get_text() == name]
    for label in found:  # one at most; a label that is put by hand has no room made for it
        size = float(label.get_fontsize())
        figure.supxlabel(name, y=inches / figure.get_figheight(), fontsize=size, color=label.get_color())
        lines = name.count("\n") + 1
        return (1.3 * lines * size + 4) / 72
    return 0.0
