"""From a file to an experiment."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .changes import changed, unchanged
from .checks import check
from .parsing import read_file
from .problems import ExperimentError, Lines, Problem, schema_problems
from .schema import Experiment

HALF = "its text is not valid Unicode; give files and folders names in UTF-8."


def make_experiment(
    content: Mapping[str, Any],
    source: str = "The experiment",
    lines: Lines | None = None,
    to_run: bool = True,
) -> Experiment:
    """A checked experiment; what is wrong with it comes in one message.

    Unless it is `to_run`, nothing is said about what this machine lacks to do so.
    """
    lines = lines or {}
    unwritable = [
        Problem((key,), HALF) for key, value in content.items() if _has_half_characters((key, value))
    ]
    if unwritable:
        raise ExperimentError(source, unwritable, lines)
    try:
        experiment: Experiment = Experiment.model_validate(dict(content))
    except ValidationError as error:
        problems = schema_problems(error)
        bad = {problem.place[0] for problem in problems if problem.place}
        rest = {key: value for key, value in content.items() if key not in bad}
        with contextlib.suppress(ValidationError):  # what else is wrong, apart from that
            problems += [p for p in check(Experiment.model_validate(rest), to_run) if p.place[0] in rest]
        raise ExperimentError(source, problems, lines) from None
    problems = check(experiment, to_run)
    if problems:
        raise ExperimentError(source, problems, lines)
    return experiment


def _has_half_characters(value: Any) -> bool:
    """Whether there is text in it that no file can hold: names of files that are not UTF-8 come in this way."""
    if isinstance(value, str):
        return any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, Mapping):
        return any(map(_has_half_characters, value.items()))
    return isinstance(value, list | tuple) and any(map(_has_half_characters, value))


def load_experiment(
    path: str | Path, changes: Mapping[str, Any] | None = None, to_run: bool = True
) -> Experiment:
    """A checked experiment from a file, with changes by dotted keys."""
    content, lines = read_file(path)
    changes = changes or {}
    return make_experiment(changed(content, changes), str(path), unchanged(lines, changes), to_run)
