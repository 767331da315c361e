"""The content of experiment files, with the line of every key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from ..errors import FedflatError
from .plain_yaml import DEEPEST, LONGEST, MOST_DIGITS, load_yaml, told
from .problems import ExperimentError, Place, Problem


def read_mapping(path: Path) -> dict[str, Any]:
    """The content of a run's own experiment file, whose keys may be those of another version."""
    content, _ = _read_yaml(path, _read_text(path))
    return content


def read_file(path: str | Path) -> tuple[dict[str, Any], dict[Place, int]]:
    """The content of a YAML or TOML file, and the line of every key."""
    path = Path(path)
    text = _read_text(path)
    if path.suffix == ".toml":
        return _read_toml(path, text)
    if path.suffix not in (".yaml", ".yml"):
        raise FedflatError(f"{path}: an experiment is a .yaml or a .toml file.")
    return _read_yaml(path, text)


def _read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(LONGEST + 1)
    except (OSError, ValueError) as problem:  # a name with a NUL is a ValueError, too
        reason = problem.strerror if isinstance(problem, OSError) else "it is not text"
        raise FedflatError(f"{path} cannot be read: {reason}.") from None
    if len(text) > LONGEST:
        raise FedflatError(f"{path} cannot be read: it is longer than {LONGEST:,} characters.")
    return text


def _read_yaml(path: Path, text: str) -> tuple[dict[str, Any], dict[Place, int]]:
    lines: dict[Place, int] = {}
    try:
        content, node = load_yaml(text)
    except yaml.YAMLError as error:
        raise FedflatError(f"{path}{told(error)}") from None
    if node is None:
        return {}, {}
    if not isinstance(node, yaml.MappingNode):
        raise FedflatError(f"{path}: an experiment is a list of `key: value` lines.")
    problem = _walk(node, (), lines)
    if problem is not None:
        raise ExperimentError(str(path), [problem], lines)
    return _whole_numbers(content), lines


def _walk(node: yaml.Node, place: Place, lines: dict[Place, int]) -> Problem | None:
    """Note the line of every key; the first one that cannot be."""
    if isinstance(node, yaml.SequenceNode):
        problems = (_walk(item, (*place, number), lines) for number, item in enumerate(node.value))
        return next((problem for problem in problems if problem is not None), None)
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(key, yaml.ScalarNode):
            return Problem(place, "a list or a mapping stands where a key should.")
        here = (*place, str(key.value))
        before, lines[here] = lines.get(here), key.start_mark.line + 1
        if before is not None:
            return Problem(here, f"it is there twice, first in line {before}; keep one.")
        if key.tag.split(":")[-1] not in ("str", "merge"):
            return Problem(here, "there is no key of this name.")
        problem = _walk(value, here, lines)
        if problem is not None:
            return problem
    return None


def _read_toml(path: Path, text: str) -> tuple[dict[str, Any], dict[Place, int]]:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise FedflatError(f"{path}: this is not TOML: {problem}.") from None
    except RecursionError:
        raise FedflatError(f"{path}: it is nested too deeply.") from None
    except ValueError:  # of Python, which reads no numbers of thousands of digits
        raise FedflatError(f"{path}: a number has thousands of digits.") from None
    lines: dict[Place, int] = {}
    table: Place = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([\w.-]+)\]", line):
            table = tuple(header[1].split("."))
            lines[table] = number
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            lines[(*table, *key[1].split("."))] = number
    wrong = _out_of_bounds(content)
    if wrong is not None:
        raise ExperimentError(str(path), [wrong], lines)
    return content, lines


def _out_of_bounds(content: dict[str, Any]) -> Problem | None:
    """The first value that is nested too deeply, or a number that is too long."""
    waiting: list[tuple[Place, Any]] = [((), content)]
    while waiting:
        place, value = waiting.pop()
        if len(place) > DEEPEST:
            return Problem(place[:1], f"it is nested more than {DEEPEST} deep.")
        if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
            return Problem(place, f"a number has more than {MOST_DIGITS} digits.")
        inner = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        waiting += [((*place, key), one) for key, one in inner]
    return None


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
        return _whole_numbers(load_yaml(text)[0])
    except yaml.YAMLError:
        return text
