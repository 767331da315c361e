"""YAML from anywhere: text, numbers, switches, lists and mappings, and never more of them than a file can mean.

What looks like a date is text. Other tags, aliases that multiply, deep nesting and numbers of many digits are errors
with a line, so that whoever reads a file has one kind of mistake to tell.
"""

from __future__ import annotations

from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

DEEPEST = 50
"""How deeply lists and mappings may be nested."""
LONGEST = 2_000_000
"""Characters that a file may stand for, with its aliases written out."""
MOST_DIGITS = 100
"""Of a whole number."""

_CORE = "tag:yaml.org,2002:"
_PLAIN = {_CORE + kind for kind in ("map", "seq", "str", "int", "float", "bool", "null", "merge")}


class Refused(yaml.MarkedYAMLError):
    """YAML, but nothing to be read."""


class _Loader(yaml.SafeLoader):
    """What `yaml.safe_load` reads, less what an experiment never needs."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (a table of its own, as PyYAML wants it)
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _PLAIN]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012
        tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag is None or tag in _PLAIN
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """A value and what is in it; an error before Python's own limit is reached."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise _refused(f"it is nested more than {DEEPEST} deep", self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        """A value; whatever it is that makes it none is an error with a line."""
        if isinstance(node, ScalarNode) and node.tag == _CORE + "int" and len(node.value) > MOST_DIGITS:
            raise _refused(f"a number has {len(node.value):,} digits", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
            shown = node.value[:40] if isinstance(node, ScalarNode) else "a list or a mapping"
            kind = node.tag.removeprefix(_CORE)
            raise _refused(f"'{shown}' cannot be read as {kind}", node.start_mark) from None


def load_yaml(text: str) -> tuple[Any, Node | None]:
    """The value of a document, and the node with its lines; a `yaml.YAMLError` says what is wrong."""
    if len(text) > LONGEST:
        raise _refused(f"it is longer than {LONGEST:,} characters", None)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _measure(node, {})
        return loader.construct_document(node), node
    finally:
        loader.dispose()


def _measure(node: Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """The characters that a node stands for and how deeply it is nested, with aliases written out.

    What is known of a node that is not done yet is None.
    """
    if isinstance(node, ScalarNode):
        return len(node.value) + 1, 0
    if id(node) in known:
        found = known[id(node)]
        if found is None:
            raise _refused("an alias in it stands for itself; write the value there", node.start_mark)
        return found
    known[id(node)] = None
    parts = [part for pair in node.value for part in pair] if isinstance(node, MappingNode) else node.value
    measured = [_measure(part, known) for part in parts]
    length = 1 + sum(length for length, _ in measured)
    depth = 1 + max((depth for _, depth in measured), default=0)
    if length > LONGEST:
        raise _refused(f"its aliases stand for more than {LONGEST:,} characters", node.start_mark)
    if depth > DEEPEST:
        raise _refused(f"it is nested more than {DEEPEST} deep", node.start_mark)
    known[id(node)] = length, depth
    return length, depth


def _refused(problem: str, mark: yaml.Mark | None) -> Refused:
    return Refused(problem=problem, problem_mark=mark)


def told(error: yaml.YAMLError) -> str:
    """What is wrong, and in which line, to be written after the name of the file."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    line = f", line {mark.line + 1}" if mark else ""
    kind = "" if isinstance(error, Refused) else "this is not YAML: "
    return f"{line}: {kind}{problem or str(error).splitlines()[0]}."
