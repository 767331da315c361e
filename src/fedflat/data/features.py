"""How the columns of a table become a model's inputs: fitted on training rows, plain values, applied to any rows."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from ..errors import FedflatError, nearest
from .readers.columns import Columns, as_floats, as_text, check_column, is_gap, is_number, kind_of

SCALINGS = ("standardise", "robust", "none")
RARE = 5
"""A level in fewer training rows has no input of its own: little can be learned from it, and it may name a person."""
LEVELS = 50
"""A column of words with more levels is used only where it is asked for."""
SHOWN = 5
"""Columns or levels that a sentence names."""

Number = Annotated[float, Field(allow_inf_nan=False)]
Missing = Literal["refuse", "median"] | Number


class _Column(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: str
    indicator: bool = False
    """whether one more input is 1 where the value is missing: so where training rows had gaps"""

    @model_serializer(mode="wrap")
    def _plain(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {
            key: value for key, value in written(self).items() if value is not None and value is not False
        }

    def _with_indicator(self, inputs: np.ndarray, gaps: np.ndarray) -> np.ndarray:
        return np.column_stack([inputs, gaps]) if self.indicator else inputs


class Numeric(_Column):
    """One input, `(value − centre) / scale`; `fill` stands in for a missing value."""

    kind: Literal["numeric"]
    centre: Number
    scale: Annotated[Number, Field(gt=0)]
    fill: Number | None = None

    @property
    def inputs(self) -> list[str]:
        """What every input is called."""
        return [self.name, *([f"{self.name} missing"] if self.indicator else [])]

    def apply(self, where: object, values: Sequence[Any]) -> np.ndarray:
        """The inputs, a row each, in double precision."""
        numbers = as_floats(where, self.name, values)
        gaps = np.isnan(numbers)
        filled = np.where(gaps, np.nan if self.fill is None else self.fill, numbers)
        with np.errstate(over="ignore"):
            return self._with_indicator((filled - self.centre)[:, None] / self.scale, gaps)


class Categorical(_Column):
    """An input per level, 1 for the row's own; with `other` one more for rare levels and those never seen.

    Without it a level that was never seen is 0 everywhere, as a missing one is.
    """

    kind: Literal["categorical"]
    levels: list[str]
    other: bool = False

    @property
    def inputs(self) -> list[str]:
        """What every input is called."""
        more = [name for name, there in (("other", self.other), ("missing", self.indicator)) if there]
        return [*(f"{self.name}={level}" for level in self.levels), *(f"{self.name} {name}" for name in more)]

    def apply(self, where: object, values: Sequence[Any]) -> np.ndarray:
        """The inputs, a row each."""
        places = {level: number for number, level in enumerate(self.levels)}
        gaps = np.array([is_gap(value) for value in values], dtype=bool)
        texts = [as_text(value) for value in values]
        found = np.array([places.get(text, len(places)) for text in texts])
        inputs = np.zeros((len(values), len(places) + 1))
        inputs[np.arange(len(values)), found] = ~gaps
        return self._with_indicator(inputs if self.other else inputs[:, :-1], gaps)

    def unseen(self, values: Sequence[Any]) -> list[str]:
        """The levels among some values that have no input of their own."""
        known = set(self.levels)
        return [text for text in (as_text(v) for v in values if not is_gap(v)) if text not in known]


Feature = Annotated[Numeric | Categorical, Field(discriminator="kind")]


# -- fitting ---------------------------------------------------------------------------------------


def choose_columns(
    where: object, columns: Columns, features: Sequence[str] | None, categorical: Sequence[str] | None
) -> dict[str, str]:
    """Which columns to learn from, and whether each is numeric or categorical.

    Named ones are taken as they are; else all with numbers, and those with words that have few levels.
    """
    for name in (*(features or ()), *(categorical or ())):
        check_column(where, columns, name)
    if features is not None and (beside := [name for name in categorical or () if name not in features]):
        raise FedflatError(
            f"'{beside[0]}' is named as categorical and not among the features; add it there, too."
        )
    chosen = {}
    for name in columns if features is None else features:
        values = columns[name]
        kind = kind_of(values)
        if kind == "dates":
            example = next(as_text(value) for value in values if not is_gap(value))
            raise FedflatError(
                f"{where}: column '{name}' holds dates or times ({example}), which no model learns from as they are. "
                "Make numbers of them, such as the days since a date or the month, or leave the column out: name the "
                "others with features (--features)."
            )
        if name in (categorical or ()):
            chosen[name] = "categorical"
        elif kind == "numbers":
            chosen[name] = "numeric"
        elif features is not None:
            mostly = sum(map(is_number, values)) * 2 > len(values)
            chosen[name] = "categorical" if kind == "words" and not mostly else "numeric"
        elif kind == "words" and categorical is None:
            levels = {as_text(value) for value in values if not is_gap(value)}
            if 1 < len(levels) <= min(LEVELS, len(values) // RARE):
                chosen[name] = "categorical"
    return chosen


def fit_columns(
    where: object, columns: Columns, chosen: dict[str, str], train: np.ndarray, numeric: str, missing: Missing
) -> list[Numeric | Categorical]:
    """Every chosen column with what its training rows say; `train` has their numbers."""
    if numeric not in SCALINGS:
        raise FedflatError(f"numeric='{numeric}' is not possible.{nearest(numeric, SCALINGS)}")
    if missing not in ("refuse", "median") and not (is_number(missing) and np.isfinite(float(missing))):
        raise FedflatError(f"missing='{missing}' is not possible: write refuse, median or a number.")
    fitted: list[Numeric | Categorical] = []
    for name, kind in chosen.items():
        values = [columns[name][row] for row in train]
        if kind == "numeric":
            as_floats(where, name, columns[name])  # rows are counted in the whole table
            fitted.append(_fit_numeric(where, name, as_floats(where, name, values), numeric, missing))
        else:
            fitted.append(_fit_categorical(name, values))
    return fitted


def _fit_numeric(where: object, name: str, values: np.ndarray, scaling: str, missing: Missing) -> Numeric:
    known = values[~np.isnan(values)]
    if not len(known):
        raise FedflatError(
            f"{where}: column '{name}' has no value in any training row; leave it out with features (--features)."
        )
    centre, scale = 0.0, 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        if scaling == "standardise":
            centre, scale = float(known.mean()), float(known.std())
        elif scaling == "robust":
            low, centre, high = (float(value) for value in np.percentile(known, (25, 50, 75)))
            scale = high - low
    if not (np.isfinite(centre) and np.isfinite(scale)):
        raise _too_large(where, name)
    if not scale > 1e-12 * abs(centre):  # it never changes: the rest is rounding
        scale = 1.0
    gaps = len(known) < len(values)
    fill = None if missing == "refuse" else float(np.median(known)) if missing == "median" else float(missing)
    return Numeric(
        name=name, kind="numeric", centre=centre, scale=scale, fill=fill, indicator=gaps and fill is not None
    )


def _fit_categorical(name: str, values: Sequence[Any]) -> Categorical:
    texts = [as_text(value) for value in values if not is_gap(value)]
    counts = Counter(texts)
    common = [text for text, count in counts.items() if count >= RARE]
    try:
        levels = sorted(common, key=lambda text: (float(text), text))
    except ValueError:
        levels = sorted(common)
    rare = len(common) < len(counts)
    return Categorical(
        name=name, kind="categorical", levels=levels, other=rare, indicator=len(texts) < len(values)
    )


# -- applying --------------------------------------------------------------------------------------


def apply_columns(
    where: object, fitted: Sequence[Numeric | Categorical], columns: Columns, missing: Missing, new: bool
) -> np.ndarray:
    """The inputs of all rows in single precision; for `new` ones, levels that training had not are mentioned."""
    for column in fitted:
        check_column(where, columns, column.name)
    if missing == "refuse":
        check_gaps(where, {column.name: columns[column.name] for column in fitted}, new)
    parts = []
    for column in fitted:
        values = columns[column.name]
        with np.errstate(over="ignore"):
            part = column.apply(where, values).astype(np.float32)
        if not np.isfinite(part).all():
            raise _too_large(where, column.name)
        parts.append(part)
        if new and isinstance(column, Categorical) and (unseen := column.unseen(values)):
            _mention_unseen(where, column, unseen, len(values))
    return np.concatenate(parts, axis=1)


def check_gaps(where: object, columns: Columns, new: bool = False) -> None:
    """Refuse missing values, with their number in every column."""
    found = {name: [n for n, value in enumerate(vs) if is_gap(value)] for name, vs in columns.items()}
    found = {name: gaps for name, gaps in found.items() if gaps}
    if not found:
        return
    rows = len(next(iter(columns.values())))
    said = [
        f"column '{name}' in {len(gaps):,} of {rows:,} rows, first in row {gaps[0] + 1}"
        for name, gaps in list(found.items())[:SHOWN]
    ]
    said += [f"{len(found) - SHOWN} more columns"] if len(found) > SHOWN else []
    remedy = (
        "; a model that is trained with --missing median takes them"
        if new
        else ", let the median or a number fill them (missing='median', --missing median), or leave columns out with "
        "features (--features)"
    )
    raise FedflatError(f"{where} has missing values: {'; '.join(said)}. Fill or drop those rows{remedy}.")


def _mention_unseen(where: object, column: Categorical, unseen: Sequence[str], rows: int) -> None:
    names = list(dict.fromkeys(unseen))
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    treated = "they count as other" if column.other else "they are 0 in all its inputs"
    warnings.warn(
        f"{where}: column '{column.name}' has levels in {len(unseen):,} of {rows:,} rows that training had not, or "
        f"hardly ({shown}); {treated}.",
        stacklevel=2,
    )


def _too_large(where: object, name: str) -> FedflatError:
    return FedflatError(
        f"{where}: column '{name}' has numbers too large for single precision; divide them first, or leave the "
        "column out with features (--features)."
    )
