"""From a file to an experiment; every problem at once, with its line and the nearest name."""

from __future__ import annotations

import contextlib
import copy
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ..errors import FedflatError, nearest
from .experiment import Experiment, LocalSection, RaySection

SECTIONS: dict[str, type[BaseModel]] = {"": Experiment, "local": LocalSection, "ray": RaySection}
"""Where unknown keys are looked up."""

Place = tuple[str | int, ...]
"""A key and its parents."""

Lines = Mapping[Place, int | None]
"""Where keys are in a file; None where a person changed them."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with a key."""

    place: Place
    sentence: str


class ExperimentError(FedflatError):
    """All that is wrong with an experiment."""

    def __init__(self, source: str, problems: Sequence[Problem], lines: Lines) -> None:
        self.problems = sorted(problems, key=lambda problem: _line(problem, lines) or 0)
        told = [_told(problem, lines) for problem in self.problems]
        head = f"{source} has {len(told)} problems:" if len(told) > 1 else f"{source}:"
        super().__init__("\n  ".join([head, *told]) if len(told) > 1 else f"{head} {told[0]}")


def _told(problem: Problem, lines: Lines) -> str:
    line, name = _line(problem, lines), ".".join(map(str, problem.place))
    where = [f"line {line}"] if line is not None else []
    return f"{', '.join([*where, name] if name else where)}: {problem.sentence}".removeprefix(": ")


def _line(problem: Problem, lines: Lines) -> int | None:
    """The line of the key, or of what it is part of."""
    place = problem.place
    return next((lines[place[:n]] for n in range(len(place), 0, -1) if place[:n] in lines), None)


# -- files -----------------------------------------------------------------------------------------


def read_file(path: str | Path) -> tuple[dict[str, Any], dict[Place, int]]:
    """The content of a YAML or TOML file, and the line of every key."""
    path = Path(path)
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not text"
        raise FedflatError(f"{path} cannot be read: {reason}.") from None
    if path.suffix == ".toml":
        return _read_toml(path, text)
    if path.suffix not in (".yaml", ".yml"):
        raise FedflatError(f"{path}: an experiment is a .yaml or a .toml file.")
    return _read_yaml(path, text)


def _read_yaml(path: Path, text: str) -> tuple[dict[str, Any], dict[Place, int]]:
    lines: dict[Place, int] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise FedflatError(f"{path}: an experiment is a list of `key: value` lines.")
        problem = _walk(node, (), lines)
        if problem is not None:
            raise ExperimentError(str(path), [problem], lines)
        content = _whole_numbers(yaml.safe_load(text))
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise FedflatError(f"{path}{line}: this is not YAML: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise FedflatError(f"{path}: this is not YAML: {str(error).splitlines()[0]}.") from None
    except RecursionError:
        raise FedflatError(f"{path}: an alias in it stands for itself; write the value there.") from None
    return content, lines


def _walk(node: yaml.MappingNode, place: Place, lines: dict[Place, int]) -> Problem | None:
    """Note the line of every key; the first one that cannot be."""
    for key, value in node.value:
        here = (*place, str(key.value))
        before, lines[here] = lines.get(here), key.start_mark.line + 1
        if before is not None:
            return Problem(here, f"it is there twice, first in line {before}; keep one.")
        if isinstance(key, yaml.ScalarNode) and key.tag.split(":")[-1] not in ("str", "merge"):
            return Problem(here, "there is no such key.")
        if isinstance(value, yaml.MappingNode):
            problem = _walk(value, here, lines)
            if problem is not None:
                return problem
    return None


def _read_toml(path: Path, text: str) -> tuple[dict[str, Any], dict[Place, int]]:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise FedflatError(f"{path}: this is not TOML: {problem}.") from None
    lines: dict[Place, int] = {}
    table: Place = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([\w.-]+)\]", line):
            table = tuple(header[1].split("."))
            lines[table] = number
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            lines[(*table, *key[1].split("."))] = number
    return content, lines


def _whole_numbers(value: Any) -> Any:
    """YAML takes 1e-3 for text: a number it is."""
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value


def parse_value(text: str) -> Any:
    """What stands after `--set key=`."""
    try:
        return _whole_numbers(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


# -- changes ---------------------------------------------------------------------------------------


def changed(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The content with other values, by dotted keys such as `local.lr`, `partition.alpha` or `method.rho`."""
    result: dict[str, Any] = copy.deepcopy(dict(content))
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        if parents == ["partition"]:
            result["partition"] = {**_partition_parts(result.get("partition", "dirichlet:0.1")), last: value}
            continue
        if parents == ["method"]:
            result["method"] = _with_parameter(result.get("method", "fedgmt"), last, value)
            continue
        section = result
        for parent in parents:
            inner = section.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise FedflatError(f"{dotted}: '{parent}' has no parts to set.")
            section = inner
        section[last] = value
    return result


def _partition_parts(given: Any) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    from ..data.partitions.text import partition_parts

    return partition_parts(str(given))


def _with_parameter(method: Any, name: str, value: Any) -> Any:
    """A method of one name with another parameter."""
    if isinstance(method, str) and re.fullmatch(r"[\w-]+", method):
        return {method: {name: value}}
    if isinstance(method, dict) and len(method) == 1:
        ((only, parameters),) = method.items()
        return {only: {**(parameters or {}), name: value}}
    raise FedflatError(
        f"method.{name}: the method is a composition; write the parameter there, such as "
        f"local-ascent({name}={value})."
    )


# -- checking --------------------------------------------------------------------------------------


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
    try:
        experiment = Experiment.model_validate(dict(content))
    except ValidationError as error:
        problems = _merged(error)
        bad = {problem.place[0] for problem in problems if problem.place}
        rest = {key: value for key, value in content.items() if key not in bad}
        with contextlib.suppress(ValidationError):  # what else is wrong, apart from that
            problems += [p for p in check(Experiment.model_validate(rest), to_run) if p.place[0] in rest]
        raise ExperimentError(source, problems, lines) from None
    problems = check(experiment, to_run)
    if problems:
        raise ExperimentError(source, problems, lines)
    return experiment


def load_experiment(
    path: str | Path, changes: Mapping[str, Any] | None = None, to_run: bool = True
) -> Experiment:
    """A checked experiment from a file, with changes by dotted keys."""
    content, lines = read_file(path)
    changes = changes or {}
    return make_experiment(changed(content, changes), str(path), unchanged(lines, changes), to_run)


def unchanged(lines: Lines, changes: Iterable[str]) -> Lines:
    """The lines of what still is as in the file; what is changed has none."""
    for dotted in changes:
        parts = tuple(dotted.split("."))
        key = parts if parts[0] in SECTIONS else parts[:1]
        lines = {**{place: line for place, line in lines.items() if place[: len(key)] != key}, key: None}
    return lines


def _merged(error: ValidationError) -> list[Problem]:
    """One problem per place: alternatives of a key are one mistake, not several."""
    found: dict[Place, list[Any]] = {}
    for item in error.errors():
        place = item["loc"][:2] if item["loc"][0] in SECTIONS else item["loc"][:1]
        found.setdefault(place, []).append(item)
    return [Problem(place, _sentence(place, items)) for place, items in found.items()]


def _sentence(place: Place, items: list[Any]) -> str:
    first = items[0]
    if first["type"] == "extra_forbidden":
        section = SECTIONS[str(place[0]) if len(place) > 1 else ""]
        return f"there is no such key.{nearest(str(place[-1]), section.model_fields)}"
    name, given = place[-1], first["input"]
    kinds = {item["type"]: item.get("ctx", {}) for item in items}
    if "literal_error" in kinds and isinstance(given, str):
        known = re.findall(r"'([^']*)'", str(kinds["literal_error"]["expected"]))
        return f"{name}='{given}' is not possible.{nearest(given, known)}"
    for kind, words in BOUNDS.items():
        if kind in kinds:
            bound = next(iter(kinds[kind].values()))
            return f"{name} must be {words} {bound:g}, not {given}."
    expected = list(dict.fromkeys(EXPECTED[kind] for kind in kinds if kind in EXPECTED))
    return f"{name} must be {' or '.join(expected) or 'something else'}, not {given!r}."


BOUNDS = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}
EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of keys and values",
    "literal_error": "'full'",
}


def check(experiment: Experiment, to_run: bool = True) -> list[Problem]:
    """What the schema cannot see: names, parameters, and what does not go together."""
    problems: list[Problem] = []

    def attempt(place: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except FedflatError as problem:
            problems.append(Problem(tuple(place.split(".")), str(problem)))
            return None

    from ..composition import as_method
    from ..data.augmentation import find_augmentation
    from ..engines import make_engine
    from ..environment import check_device
    from ..store import parse_size
    from .building import (
        OF_A_FOLDER,
        OF_A_TABLE,
        check_dataset,
        check_fits,
        check_model,
        make_participation,
        make_partition,
        make_ray,
        make_sgd,
    )

    filled = experiment.filled()
    if attempt("dataset", lambda: check_dataset(experiment)):
        for key in (*OF_A_TABLE, *OF_A_FOLDER):
            attempt(key, partial(check_fits, experiment, key))
    attempt("model", lambda: check_model(filled.model or "mlp"))
    if to_run:
        attempt("device", lambda: check_device(experiment.device))
    attempt("method", lambda: as_method(experiment.method))
    partition = attempt("partition", lambda: make_partition(experiment.partition))
    if experiment.augment is not None:
        attempt("augment", lambda: find_augmentation(str(experiment.augment)))
    if experiment.local.epochs is not None and experiment.local.steps is not None:
        problems.append(Problem(("local", "steps"), "give epochs or steps, not both."))
    else:
        attempt("local", lambda: make_sgd(filled.local))
    participation = attempt("participation", lambda: make_participation(filled.participation))
    if participation is not None and partition is not None and filled.clients is not None:
        attempt("participation", lambda: participation.check(filled.clients, filled.rounds))
    if to_run and experiment.engine is not None:
        attempt("engine", lambda: make_engine(str(experiment.engine)))
    if to_run and experiment.ray is not None:
        attempt("ray", lambda: make_ray(experiment, 0))
    if experiment.state_memory is not None:
        attempt("state_memory", lambda: parse_size(str(experiment.state_memory)))
    if experiment.measure:
        from ..flatness.recording import wanted

        attempt("measure", lambda: wanted(experiment.measure))
    if experiment.trackers:
        from ..trackers import check_trackers

        attempt("trackers", lambda: check_trackers(experiment.trackers))
    seeds = experiment.seed if isinstance(experiment.seed, list) else [experiment.seed]
    if not seeds:
        problems.append(Problem(("seed",), "the list is empty; give at least one."))
    if len(set(seeds)) < len(seeds):
        problems.append(Problem(("seed",), f"{seeds} has a seed twice; keep one."))
    return problems


def split_values(text: str) -> list[Any]:
    """The values of a list such as `0.01,0.1,1`; a comma inside brackets does not separate."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    return [parse_value(part.strip()) for part in [*parts, current]]


def parse_changes(given: Iterable[str]) -> dict[str, str]:
    """`key=value` texts as a mapping of texts."""
    changes = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise FedflatError(f"--set {text}: write key=value, such as local.lr=0.05.")
        changes[key.strip()] = value.strip()
    return changes
