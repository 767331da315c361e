"""The content of experiment files, with the line of every key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from ..errors import FedflatError
from .problems import ExperimentError, Place, Problem


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
